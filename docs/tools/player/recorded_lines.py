"""Finds the lines of a recording again, in today's source: lines move, texts are edited, files renamed.

Called by: `emit_player`, `unrolled_pages`, tests/docs. Calls: `package`.

A recording says of each frame the function (dotted name, file, first line) and the line with its text.
The function is found by its name, and in it the line:

    1. with the recorded text;
    2. else with a call of a function that the recorded text calls, most of them first, then the text
       most like it; a text without a call is found by its likeness alone.

Where several are alike, the one nearest to where the recorded line stood in its function.
"""

import ast
import difflib
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from minimegatron import moved
from source.annotate import AnnotatedPage, module_name
from source.package import Package

MOVED = {
    f"minimegatron/{old.replace('.', '/')}.py": f"minimegatron/{new.replace('.', '/')}.py"
    for old, new in moved.MOVED.items()
}
"""Former file -> today's, for recordings that are older than the move."""
ALIKE = 0.6
"""How much of a text without a call must be left; 1 for all of it."""
CALLED = re.compile(r"([A-Za-z_]\w*)\s*\(")


@dataclass(frozen=True)
class RecordedLine:
    """A frame of a recording."""

    name: str
    """The function's, dotted."""
    path: str
    first_line: int
    """The function's."""
    line: int
    text: str


@dataclass(frozen=True)
class Found:
    """Where it is today."""

    page: AnnotatedPage
    line: int

    @property
    def url(self) -> str:
        """Relative to the site."""
        return f"source/{self.page.module}.html#L{self.line}"

    @property
    def text(self) -> str:
        return self.page.lines[self.line - 1].strip()


class Missing(Exception):
    """A recorded call that is no longer there: the recording shows a run that this code cannot do."""


class Finder:
    """Looks into one package; `moved` says what a recorded file is called today."""

    def __init__(self, package: Package, moved: Mapping[str, str] = MOVED):
        self.package, self.moved = package, moved

    def function(self, name: str, path: str) -> tuple[AnnotatedPage, str]:
        """The page and the name within it. Raises Missing."""
        former, today = module_name(path), module_name(self.moved.get(path, path))
        # What is nested in a function has no place of its own.
        symbol = name.removeprefix(f"{former}.").partition(".<locals>")[0]
        if name == former or symbol == "<module>":
            symbol = ""
        place = self.package.find(f"{today}.{symbol}" if symbol else today)
        if place is None or today not in self.package.pages:
            raise Missing(f"{name}: {'the function' if symbol else 'the module'} is gone")
        return place.page, place.symbol

    def name_today(self, name: str, path: str) -> str:
        """The dotted name, with what is nested in the function. Raises Missing."""
        page, symbol = self.function(name, path)
        own = name.removeprefix(f"{module_name(path)}.")
        nested = own.removeprefix(own.partition(".<locals>")[0])
        return f"{page.module}.{symbol}{nested}" if symbol else name

    def line(self, frame: RecordedLine) -> Found:
        """Raises Missing."""
        page, symbol = self.function(frame.name, frame.path)
        if symbol:
            definition = page.definitions[symbol]
            begins = _first_lines(page.source).get(definition.line, definition.line)
            numbers = range(definition.line, definition.end_line + 1)
            number = _line_in(page, numbers, begins + frame.line - frame.first_line, frame.text)
        else:
            numbers = range(1, len(page.lines) + 1)
            number = _line_in(page, numbers, frame.line, frame.text)
        if number is None:
            called = " and ".join(sorted(_called(frame.text)))
            lacks = f"it no longer calls {called}" if called else "no line is like the recorded one"
            raise Missing(f"{frame.name}: {lacks}; line {frame.line} was {frame.text!r}")
        return Found(page, number)


def _line_in(page: AnnotatedPage, numbers: range, expected: int, recorded: str) -> int | None:
    """The line, among these, that was recorded; `expected` is where, had nothing been edited."""
    texts = {number: page.lines[number - 1].strip() for number in numbers}
    if same := [number for number in numbers if texts[number] == recorded]:
        return min(same, key=lambda number: abs(number - expected))
    wanted, calls, likeness = _called(recorded), _calls(page.source), {}
    for number, text in texts.items():
        common = len(wanted & calls.get(number, frozenset()))
        alike = difflib.SequenceMatcher(None, text, recorded).ratio()
        if common or (not wanted and alike >= ALIKE):
            likeness[number] = (common, alike, -abs(number - expected))
    return max(likeness, key=likeness.__getitem__, default=None)


def _called(text: str) -> frozenset[str]:
    """
    >>> sorted(_called("loss, skipped = train_step(make_batch(x) + (1, 2))"))
    ['make_batch', 'train_step']
    """
    return frozenset(name for name in CALLED.findall(text) if not keyword.iskeyword(name))


@lru_cache(maxsize=64)
def _first_lines(source: str) -> dict[int, int]:
    """Line of a `def` -> that of its first decorator, which is where a recording has it begin."""
    functions = [node for node in ast.walk(ast.parse(source)) if hasattr(node, "decorator_list")]
    return {
        node.lineno: min(one.lineno for one in [*node.decorator_list, node]) for node in functions
    }


@lru_cache(maxsize=64)
def _calls(source: str) -> dict[int, frozenset[str]]:
    """Line -> the last names of what it calls; of a call over several lines, the line of its name."""
    found: dict[int, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = node.func
            name = getattr(function, "attr", None) or getattr(function, "id", None)
            if name:
                found.setdefault(function.end_lineno, set()).add(name)
    return {line: frozenset(names) for line, names in found.items()}
