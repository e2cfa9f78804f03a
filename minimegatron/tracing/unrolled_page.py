"""A step unrolled as one page that needs no network, and the data that its program reads.

Torch-free. Megatron has no counterpart.

The keys of the data are short, since there are hundreds of calls per rank:

* `functions`: [name, path, first line, its first sentence, first and last line of the docstring, text].
  The text has no docstring and no common indentation. `names` has what a reader knows them by.
* `views`: [function, [[first, last, words] of each fold], [[line, calls that ran it]]]
* `ranks`: of each `rank`, `place`, `calls`, `functions`, `lines` (how many), and
  `nodes`: [view, caller, line of the caller below which it stands, calls, units, notes, whether a link,
  1 where its lines are shown, -1 if those of another function within it are, loops of the caller that
  it is called in]; `units`, `notes` and loops (the lines that begin them) are indices into `words`;
  `messages`: [node, 1 if it is sent, what it carries, microbatch, chunk, other rank, number of the
  message there or -1, size, number of the call that carried it]
* `words`: texts and lists of texts that occur often; `chunks`: whether a stage has several
"""

import json
import os
import textwrap
from functools import lru_cache
from pathlib import Path
from typing import Any

from minimegatron.core.datasets.atomic_file import write_atomically
from minimegatron.core.json_text import json_for_html
from minimegatron.planner.actions import SEND
from minimegatron.tracing.code_rows import DOCSTRING
from minimegatron.tracing.rank_trace import RankTrace
from minimegatron.tracing.run import Run
from minimegatron.tracing.trace_words import names_of, size
from minimegatron.tracing.unrolled import CallNode, Unrolled, unroll
from minimegatron.tracing.unrolled_outline import outline_html
from minimegatron.tracing.unrolled_text import by_chunk, number_words

ASSETS = Path(__file__).parent / "assets"
LINES_PER_MINUTE = 10
"""How fast one reads code that one wants to understand; a call's own row counts as a line."""


def write_unrolled_html(run: Run, path: str | os.PathLike, rank: int = 0) -> None:
    """Writes the page. `rank` is the one that it opens with."""
    write_atomically(path, unrolled_html(run, rank).encode(), makes_folder=False)


def unrolled_html(run: Run, rank: int = 0) -> str:
    """The page's text. Raises ValueError if no lines were recorded, or none of this rank."""
    data = unrolled_data(run)
    if rank not in [of_rank["rank"] for of_rank in data["ranks"]]:
        raise ValueError(f"there are no recorded lines of rank {rank}")
    data |= {"rate": LINES_PER_MINUTE, "first": rank, "strings": read_strings()}
    page = (ASSETS / "unrolled.html").read_text(encoding="utf-8")
    for name, text in (
        ("/*STYLE*/", (ASSETS / "unrolled.css").read_text(encoding="utf-8")),
        ("/*PROGRAM*/", (ASSETS / "unrolled.js").read_text(encoding="utf-8")),
        ("<!--OUTLINE-->", outline_html(data)),
        ("/*DATA*/", json_for_html(data)),
    ):
        page = page.replace(name, text, 1)
    return page


def read_strings() -> dict[str, str]:
    """The words of the page, by name; a site may have them in another language."""
    return json.loads((ASSETS / "unrolled_words.json").read_text(encoding="utf-8"))


# -- Data --


class _Table:
    """Values, each once, by number."""

    def __init__(self):
        self._numbers: dict[str, int] = {}
        self.values: list[Any] = []

    def number(self, value: Any) -> int:
        key = json.dumps(value)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]


def unrolled_data(run: Run) -> dict[str, Any]:
    """Everything the page shows, of all ranks whose lines were recorded."""
    functions, views, words = _Table(), _Table(), _Table()
    found = [unrolled for _, unrolled in sorted(unroll(run).items())]
    ranks = [_rank_data(unrolled, functions, views, words) for unrolled in found]
    return {
        "functions": functions.values,
        "names": names_of([function[0] for function in functions.values]),
        "chunks": int(any(unrolled.has_chunks for unrolled in found)),
        "views": views.values,
        "words": words.values,
        "ranks": ranks,
    }


def _rank_data(unrolled: Unrolled, functions: _Table, views: _Table, words: _Table) -> dict:
    def view(node: CallNode) -> int:
        rows = unrolled.rows(node)
        folds = [[f.first, f.last, words.number(f.words)] for f in rows.folds]
        number = functions.number(function_data(unrolled, node))
        return views.number([number, folds, [list(count) for count in rows.counts.items()]])

    messages: dict[int, list] = {}
    carriers = sorted({row.event for node in unrolled.nodes for row in node.rows})
    for node in unrolled.nodes:
        for row in node.rows:
            message = row.message
            messages[row.number] = [
                node.number,
                int(message.direction == SEND),
                words.number(message.payload),
                message.microbatch,
                message.chunk,
                row.peer_rank,
                -1 if row.peer_number is None else row.peer_number,
                words.number(size(message.num_bytes)),
                carriers.index(row.event),
            ]
    recording = unrolled.recording
    return {
        "rank": recording.rank,
        "place": place_words(recording),
        "calls": len(unrolled.lines.calls),
        "functions": len(unrolled.lines.functions),
        "lines": unrolled.num_lines,
        "nodes": [
            [
                view(node),
                -1 if node.parent is None else node.parent.number,
                unrolled.place_in_caller(node),
                node.num_calls,
                words.number(_units(node)),
                words.number(node.notes),
                int(node.is_link),
                int(node in unrolled.first) or -int(node in unrolled.new),
                words.number([loop.line for loop in unrolled.loops(node)]),
            ]
            for node in unrolled.nodes
        ],
        "messages": [messages[number] for number in sorted(messages)],
    }


def place_words(recording: RankTrace) -> str:
    """A rank's coordinates on the axes that have more than one; "" if none has."""
    axes = [axis for axis, size in recording.sizes.items() if size > 1]
    return ", ".join(f"{axis} {recording.coordinates[axis]}" for axis in axes)


def _units(node: CallNode) -> list[list]:
    """[chunk, its microbatches in words] for each chunk; empty for work on none."""
    return [[chunk, number_words(found)] for chunk, found in by_chunk(node.units).items()]


def function_data(unrolled: Unrolled, node: CallNode) -> list:
    """A function as the page has it."""
    path, line = unrolled.place(node)
    source, folds = unrolled.source(node), unrolled.rows(node).folds
    docstring = next(((f.first, f.last) for f in folds if f.words == DOCSTRING), (0, 0))
    return [source.name, path, line, *page_text(source.text, docstring)]


@lru_cache(maxsize=4096)
def page_text(text: str, docstring: tuple[int, int]) -> tuple[str, int, int, str]:
    """The first sentence of the docstring, its first and last line, and the text without it."""
    first, last = docstring
    lines = textwrap.dedent(text).rstrip("\n").split("\n")
    words = " ".join(line.strip() for line in lines[first - 1 : last]).strip() if first else ""
    sentence = words.strip("\"' ").partition(". ")[0].rstrip(".")
    kept = lines[: first - 1] + lines[last:] if first else lines
    return sentence, first, last, "\n".join(kept)
