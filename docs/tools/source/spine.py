"""The spine: which files of the package to read first, in which order, and how long that takes.

Called by: `source_pages`, `site_pages`, `tour`, `cases` and others; after an edit of
docs/spine.toml or of a file in it, run `python docs/tools/record.py spine`: it sets the minutes,
and the figures in README.md. Calls: `code_count`. Megatron has no counterpart.
"""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from source.code_count import code_lines
from source.places import DOCS, ROOT, recorded

LIST = DOCS / "spine.toml"
README = ROOT / "README.md"
STEP = 5
"""Minutes are multiples of it."""
SENTENCE = re.compile(
    r"(?P<files>\d+)\s+files,\s+about\s+(?P<lines>[\d,]+)\s+lines\s+of\s+code,\s+"
    r"about\s+(?P<hours>\d+)\s+hours"
)
"""In README.md."""
ENTERED = re.compile(r"(A plain GPT's step enters )\d+")
"""Likewise."""


class Link(NamedTuple):
    """One file of the list."""

    number: int
    """From 1."""
    file: str
    """Below minimegatron/."""
    section: str
    minutes: int
    what: str

    @property
    def path(self) -> Path:
        return ROOT / "minimegatron" / self.file

    @property
    def module(self) -> str:
        name = self.file.removesuffix(".py").removesuffix("/__init__")
        return "minimegatron." + name.replace("/", ".")

    @property
    def num_lines(self) -> int:
        """Lines of code."""
        return _num_lines(self.path.read_text())


@cache
def _num_lines(source: str) -> int:
    # Each of several pages counts the whole spine.
    return len(code_lines(source))


@cache
def read_spine() -> tuple[Link, ...]:
    """The list, in its order."""
    modules = tomllib.loads(LIST.read_text())["modules"]
    return tuple(Link(number, **module) for number, module in enumerate(modules, start=1))


class Room(NamedTuple):
    """Files that a step enters through few calls, their door, and that a reader may leave shut."""

    name: str
    files: list[str]
    """Below minimegatron/; a folder ends in "/"."""
    door: str
    """What of the room a step calls."""
    shut: str
    """Why a reader of the step may leave it shut."""
    what: str

    def has(self, file: str) -> bool:
        """Whether a file, below minimegatron/, is in it."""
        return any(
            file == one or (one.endswith("/") and file.startswith(one)) for one in self.files
        )


@cache
def read_rooms() -> tuple[Room, ...]:
    """The rooms, in the order of the list."""
    return tuple(Room(**room) for room in tomllib.loads(LIST.read_text())["rooms"])


def room_of(module: str) -> Room | None:
    """The room that a module, by its full name, is in."""
    path = module.removeprefix("minimegatron.").replace(".", "/")
    as_file_and_folder = (f"{path}.py", f"{path}/")
    return next((room for room in read_rooms() if any(map(room.has, as_file_and_folder))), None)


@cache
def lines_per_minute() -> int:
    """The speed of reading that the list assumes."""
    return tomllib.loads(LIST.read_text())["code_lines_per_minute"]


def minutes_of(num_lines: int) -> int:
    """How long a file of so many lines of code takes: at least `STEP`."""
    return max(STEP, STEP * round(num_lines / lines_per_minute() / STEP))


# -- Figures, for README and pages --


def spine_files() -> str:
    """How many files the list has."""
    return str(len(read_spine()))


def spine_lines() -> str:
    """Their lines of code, to the next hundred."""
    return f"{round(sum(link.num_lines for link in read_spine()), -2):,}"


def spine_hours() -> str:
    """All minutes, in hours."""
    return str(round(sum(link.minutes for link in read_spine()) / 60))


def spine_rate() -> str:
    """Lines of code in an hour."""
    return str(60 * lines_per_minute())


def num_entered() -> int:
    """How many of them a plain GPT's step enters, as `records.entered_files` has seen it."""
    entered = recorded("entered_files")["files"]["GPT"]
    return len({link.file for link in read_spine()}.intersection(entered))


def main() -> None:
    """Sets `minutes` in the list and the figures in README.md."""
    text = LIST.read_text()
    for link in read_spine():
        entry = re.compile(rf'(file = "{re.escape(link.file)}"\n.*?minutes = )\d+', re.DOTALL)
        text = entry.sub(rf"\g<1>{minutes_of(link.num_lines)}", text, count=1)
    LIST.write_text(text)
    read_spine.cache_clear()
    files, lines, hours = spine_files(), spine_lines(), spine_hours()

    def filled(found: re.Match) -> str:
        begin, words = found.start(), found[0]
        for name, value in (("hours", hours), ("lines", lines), ("files", files)):
            first, last = found.start(name) - begin, found.end(name) - begin
            words = words[:first] + value + words[last:]
        return words

    text = SENTENCE.sub(filled, README.read_text())
    README.write_text(ENTERED.sub(rf"\g<1>{num_entered()}", text))
    print(f"{files} files, {lines} lines of code, {hours} hours")
