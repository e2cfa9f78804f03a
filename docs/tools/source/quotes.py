"""An excerpt of the package's code on a page: what the page speaks of, its comments beside it, the rest
folded.

Called by: `macros`, `tour` (how long an excerpt is). Calls: `excerpts`, `folding`, `code_html`.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from html import escape

from source.annotate import NOTE, AnnotatedPage
from source.code_html import Link, code_block, links_of
from source.excerpts import ExcerptError, cut_out, num_definitions
from source.folding import Part, Row, own_comments, parts_of, rows_of
from source.package import Package, Place
from source.page_words import say


@dataclass(frozen=True)
class Quote:
    """Lines of a module, in parts that are shown or folded."""

    place: Place
    parts: list[Part]

    @property
    def numbers(self) -> list[int]:
        """All lines, folded ones included."""
        return [n for part in self.parts for n in part.numbers]

    @property
    def num_lines(self) -> int:
        """Lines of code and comments on the page, folded ones included."""
        return self.num_full(self.numbers)

    def num_full(self, numbers: Iterable[int]) -> int:
        """How many of these lines are not blank."""
        return sum(bool(self.place.page.lines[n - 1].strip()) for n in numbers)


@cache
def read_quote(package: Package, argument: str) -> Quote:
    """What `x.y.z from="..." to="..." shows="a, b" fold=no rest=out` asks for.

    With `rest=out` what would be folded is not on the page; a link says how many lines, and where.

    Raises ExcerptError for a name that is not where it is defined, lines that are not there, a
    statement that would be cut, and words that the excerpt does not have.
    """
    dotted, *options = shlex.split(argument)
    place = package.find(dotted)
    if place is None or (not place.symbol and dotted != place.page.module):
        raise ExcerptError(f"the package has no {dotted}")
    chosen = dict(option.split("=", 1) for option in options)
    lines, numbers = place.page.lines, _lines_of(place)
    _check_name(place, dotted)
    if "from" in chosen:
        numbers = cut_out(lines, numbers, chosen["from"], chosen.get("to"))
    words = [word for word in chosen.get("shows", "").split(", ") if word]
    for word in words:
        if not any(word in lines[n - 1] for n in numbers):
            raise ExcerptError(f"{dotted}: the excerpt does not show {word!r}")
    is_whole = chosen.get("fold") == "no" or not words
    parts = [Part(False, list(numbers))] if is_whole else parts_of(lines, numbers, words)
    if chosen.get("rest") == "out":
        parts = [part for part in parts if not part.is_folded]
    return Quote(place, parts)


def _lines_of(place: Place) -> list[int]:
    """Without the docstring, which the page says in its own words."""
    if not place.symbol:
        return list(place.page.rows[0].code_lines)
    definition = place.definition
    prose = {n for row in place.page.rows if row.kind != "note" for n in row.prose_lines}
    numbers = range(definition.first_line or definition.line, definition.end_line + 1)
    return [n for n in numbers if n not in prose]


def _check_name(place: Place, dotted: str) -> None:
    """An excerpt is known by the name under which it is defined, and that once."""
    qualified = ".".join(filter(None, (place.page.module, place.symbol)))
    if qualified != dotted:
        raise ExcerptError(f"{dotted}: is defined as {qualified}; call it so")
    if place.symbol and num_definitions(place.page.tree, place.symbol) > 1:
        raise ExcerptError(f"{dotted}: is defined more than once")


# -- As HTML --


def quote_html(quote: Quote, package: Package, source: str) -> str:
    """`source` is where the annotated source is, seen from the page."""
    page, place = quote.place.page, quote.place
    shown = _Shown(page, links_of(page, package, source), f"{source}{page.module}.html")
    first = quote.numbers[0]
    body, last = "", first - 1
    for part in quote.parts:
        left_out = range(last + 1, part.numbers[0])
        if number := quote.num_full(left_out):
            body += _left_out(f"{shown.url}#L{left_out[0]}", number)
        rows, last = shown.rows(part.numbers), part.numbers[-1]
        body += _folded(quote.num_full(part.numbers), rows) if part.is_folded else rows
    beside = " mm-beside" if shown.has_notes else ""
    return (
        f'<figure class="mm-quote{beside}"><figcaption>'
        f'<a href="{source}{place.url}">{escape(place.symbol or page.module)}</a>'
        f'<a class="mm-quote-file" href="{shown.url}#L{first}">{page.path}:{first}</a>'
        f"</figcaption>{body}</figure>"
    )


class _Shown:
    """One module's lines as rows: comments beside, or above, the code that they are about."""

    def __init__(self, page: AnnotatedPage, links: dict[int, dict[int, Link]], url: str):
        self.page, self.links, self.url = page, links, url
        self.comments = own_comments(page.source)
        self.has_notes = False

    def rows(self, numbers: list[int]) -> str:
        return "".join(self._row(row) for row in rows_of(numbers, self.comments))

    def _row(self, row: Row) -> str:
        note = ""
        if row.comments:
            self.has_notes = True
            first, last = row.comments[0], row.comments[-1]
            words = _prose(self.page.lines[n - 1] for n in row.comments)
            note = f'<div class="mm-note" data-first="{first}" data-last="{last}">{words}</div>'
        full = [n for n in row.code if self.page.lines[n - 1].strip()]
        # Blank lines at the edges only take room.
        numbers = [n for n in row.code if full and full[0] <= n <= full[-1]]
        code = code_block(self.page, numbers, self.links, line_url=self.url) if full else ""
        return f'<div class="mm-quote-row">{note}{code}</div>'


def _folded(number: int, rows: str) -> str:
    words = say("page.folded", n=number)
    return f'<details class="mm-fold"><summary>{words}</summary>{rows}</details>'


def _left_out(url: str, number: int) -> str:
    words = say("page.in-the-source", n=number)
    return f'<p class="mm-left-out"><a href="{url}">{words}</a></p>'


def _prose(comments: Iterable[str]) -> str:
    """Comments as a paragraph; the title of a note in bold.

    >>> _prose(["    # -- The `update` --", "    # Then ranks", "    # agree."])
    '<p><b>The <code>update</code></b> Then ranks agree.</p>'
    """
    title, words = "", []
    for comment in comments:
        if found := NOTE.match(comment.strip()):
            title = f"<b>{_spans(found['title'])}</b> "
        else:
            words.append(comment.strip().lstrip("#").strip())
    return f"<p>{(title + _spans(' '.join(words))).strip()}</p>"


def _spans(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
