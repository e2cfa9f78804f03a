"""Lines of Python as HTML: coloured, numbered, every line addressable, every known name a link.

Called by: `source_pages`, `macros`. Calls: `links`; Pygments, whose class names the theme colours.
"""

import ast
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from typing import ClassVar

from pygments.lexer import inherit
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES, Name, Operator, Punctuation, Text

from source.annotate import AnnotatedPage
from source.links import uses_of
from source.package import Package, Place

Link = tuple[int, str]
"""Length of the name in characters, and its URL."""
FOLDED_LINES = 4
"""Fewer lines of imports are not folded away."""
PLAIN = ("w", "n")
"""Classes of Pygments that the theme gives no colour: spaces and names."""


class Lexer(PythonLexer):
    """The same pieces in half the time: what most code is made of comes before forty other rules.

    Names are taken here only where they cannot be a word of the language or a string's prefix.
    """

    tokens: ClassVar = {
        "root": [
            (r"(?<=\S)[^\S\n]+", Text),
            # Strings, `match` and `case` at the beginning of a line have rules that read its spaces.
            (r"^ +(?=[^\s\"'rRuUbBmc])", Text),
            (r"[](){},;[]", Punctuation),
            (r"=(?!=)|\.(?!\d)", Operator),
            (r"(?<=\.)[A-Za-z]\w*(?![\w\"'])", Name),
            (r"[A-Za-z]+[_\d]\w*(?![\w\"'])", Name),
            inherit,
        ]
    }


@lru_cache(maxsize=64)
def _tokens_by_line(source: str) -> list[list[tuple[str, str]]]:
    """For each line, its (CSS class, text) pieces."""
    lines: list[list[tuple[str, str]]] = [[]]
    for kind, text in Lexer(stripnl=False, ensurenl=False).get_tokens(source):
        css = STANDARD_TYPES.get(kind, "")
        for index, part in enumerate(text.split("\n")):
            if index:
                lines.append([])
            if part:
                lines[-1].append((css, part))
    return lines


def links_of(page: AnnotatedPage, package: Package, base: str) -> dict[int, dict[int, Link]]:
    """Line -> column -> link, for the names that lead to another place than their own line."""
    named = [(one, package.find(one.target)) for one in page.references]
    places = [(one.line, one.column, one.length, place) for one, place in named if place]
    for use in uses_of(package)[page.module]:
        if use.how != "with":
            module, symbol = use.target
            places.append(
                (use.line, use.column, len(use.name), Place(package.pages[module], symbol))
            )
    found: dict[int, dict[int, Link]] = {}
    for line, column, length, place in places:
        here = place.page.module == page.module
        definition = place.definition
        if here and (definition is None or definition.line == line):
            continue
        url = f"#{place.anchor}" if here and base == "" else base + place.url
        found.setdefault(line, {})[column] = (length, url)
    return found


def code_block(
    page: AnnotatedPage,
    numbers: Sequence[int],
    links: dict[int, dict[int, Link]],
    anchors: dict[int, list[str]] | None = None,
    line_url: str = "",
    folded: range = range(0),
) -> str:
    """A `<pre>` with a span for each line.

    `anchors`: ids to put at lines. `line_url`: what precedes `#L12` in the line numbers' links;
    with "" the lines get those ids, as on the page that they belong to. `folded`: lines to fold away,
    the module's imports (see `imports_of`).
    """

    def block(numbers: Sequence[int]) -> str:
        return _pre(page, numbers, links, anchors or {}, line_url)

    inside = [number for number in numbers if number in folded]
    if not inside:
        html = block(numbers)
    else:
        before, after = _around(numbers, folded, page)
        count = num_imports(page, folded)
        summary = f"<summary>{count} imports <span>{folded[0]}–{folded[-1]}</span></summary>"
        fold = f'<details class="mm-imports">{summary}{block(inside)}</details>'
        html = (block(before) if before else "") + fold + (block(after) if after else "")
    return f'<div class="mm-code highlight" data-search-exclude>{html}</div>'


def _around(
    numbers: Sequence[int], folded: range, page: AnnotatedPage
) -> tuple[list[int], list[int]]:
    """The lines before and after those that are folded, without blank ones at the fold."""
    before = [number for number in numbers if number < folded[0]]
    after = [number for number in numbers if number > folded[-1]]
    while before and not page.lines[before[-1] - 1].strip():
        before.pop()
    while after and not page.lines[after[0] - 1].strip():
        after.pop(0)
    return before, after


def imports_of(page: AnnotatedPage) -> range:
    """The lines of the module's first imports, one statement after another; empty if they are few."""
    run: list[ast.stmt] = []
    for node in page.tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            run.append(node)
        elif run:
            break
    lines = range(run[0].lineno, run[-1].end_lineno + 1) if run else range(0)
    return lines if len(lines) >= FOLDED_LINES else range(0)


def num_imports(page: AnnotatedPage, lines: range) -> int:
    """How many import statements stand in these lines."""
    return sum(
        isinstance(node, ast.Import | ast.ImportFrom) and node.lineno in lines
        for node in page.tree.body
    )


def _pre(
    page: AnnotatedPage,
    numbers: Sequence[int],
    links: dict[int, dict[int, Link]],
    anchors: dict[int, list[str]],
    line_url: str,
) -> str:
    tokens, parts, previous = _tokens_by_line(page.source), [], None
    for number in numbers:
        if previous is not None and number != previous + 1:
            parts.append('<span class="mm-gap"></span>')
        previous = number
        ids = "".join(f'<span id="{escape(i)}"></span>' for i in anchors.get(number, ()))
        own = f' id="L{number}"' if not line_url else ""
        parts.append(
            f'<span class="mm-line"{own}>{ids}{_number(number, page, line_url)}'
            f"{_line(tokens[number - 1], links.get(number, {}))}\n</span>"
        )
    return f'<pre tabindex="0"><code>{"".join(parts)}</code></pre>'


def _number(number: int, page: AnnotatedPage, line_url: str) -> str:
    # Blank lines at the edges of a row are not on the page, so none of them is linked to.
    if not page.lines[number - 1].strip():
        return f'<span class="mm-number" data-n="{number}"></span>'
    return (
        f'<a class="mm-number" href="{line_url}#L{number}" tabindex="-1" '
        f'aria-label="line {number}" data-n="{number}"></a>'
    )


def _line(pieces: list[tuple[str, str]], links: dict[int, Link]) -> str:
    out, column = [], 0
    for css, text in pieces:
        out.append(_piece(css, text, column, links))
        column += len(text)
    return "".join(out)


def _piece(css: str, text: str, column: int, links: dict[int, Link]) -> str:
    # A piece may hold several names (`a.b.c` in an import is one token), or none.
    inside = [start for start in links if column <= start < column + len(text)] if links else ()
    out, at = [], 0
    for start in sorted(inside):
        length, url = links[start]
        first = start - column
        if first < at or first + length > len(text):
            continue
        out.append(_html(text[at:first]))
        name = _html(text[first : first + length])
        out.append(f'<a class="mm-name" href="{escape(url)}">{name}</a>')
        at = first + length
    inner = "".join(out) + _html(text[at:])
    return f'<span class="{css}">{inner}</span>' if css and css not in PLAIN else inner


def _html(text: str) -> str:
    return escape(text, quote=False)
