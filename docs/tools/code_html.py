"""Lines of Python as HTML: coloured, numbered, every line addressable, every known name a link.

Called by: `source_pages`, `quotes`. Calls: Pygments, whose class names the theme colours.
"""

from collections.abc import Iterable
from functools import lru_cache
from html import escape

from annotate import AnnotatedPage
from package import Package
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

Link = tuple[int, str]
"""Length of the name in characters, and its URL."""


@lru_cache(maxsize=4)
def _tokens_by_line(source: str) -> list[list[tuple[str, str]]]:
    """For each line, its (CSS class, text) pieces."""
    lines: list[list[tuple[str, str]]] = [[]]
    for kind, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens(source):
        css = STANDARD_TYPES.get(kind, "")
        for index, part in enumerate(text.split("\n")):
            if index:
                lines.append([])
            if part:
                lines[-1].append((css, part))
    return lines


def links_of(page: AnnotatedPage, package: Package, base: str) -> dict[int, dict[int, Link]]:
    """Line -> column -> link, for the names that lead to another place than their own line."""
    found: dict[int, dict[int, Link]] = {}
    for reference in page.references:
        place = package.find(reference.target)
        if place is None:
            continue
        here = place.page.module == page.module
        definition = place.definition
        if here and (definition is None or definition.line == reference.line):
            continue
        url = f"#{place.anchor}" if here and base == "" else base + place.url
        found.setdefault(reference.line, {})[reference.column] = (reference.length, url)
    return found


def code_block(
    page: AnnotatedPage,
    numbers: Iterable[int],
    links: dict[int, dict[int, Link]],
    anchors: dict[int, list[str]] | None = None,
    line_url: str = "",
) -> str:
    """A `<pre>` with a span for each line.

    `anchors`: ids to put at lines. `line_url`: what precedes `#L12` in the line numbers' links;
    with "" the lines get those ids, as on the page that they belong to.
    """
    tokens, parts, previous = _tokens_by_line(page.source), [], None
    for number in numbers:
        if previous is not None and number != previous + 1:
            parts.append('<span class="mm-gap"></span>')
        previous = number
        ids = "".join(f'<span id="{escape(i)}"></span>' for i in (anchors or {}).get(number, ()))
        own = f' id="L{number}"' if not line_url else ""
        parts.append(
            f'<span class="mm-line"{own}>{ids}{_number(number, page, line_url)}'
            f"{_line(tokens[number - 1], links.get(number, {}))}\n</span>"
        )
    return (
        '<div class="mm-code highlight" data-search-exclude><pre tabindex="0"><code>'
        + "".join(parts)
        + "</code></pre></div>"
    )


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
    out, at = [], 0
    for start in sorted(c for c in links if column <= c < column + len(text)):
        length, url = links[start]
        first = start - column
        if first < at or first + length > len(text):
            continue
        out.append(_html(text[at:first]))
        name = _html(text[first : first + length])
        out.append(f'<a class="mm-name" href="{escape(url)}">{name}</a>')
        at = first + length
    out.append(_html(text[at:]))
    inner = "".join(out)
    return f'<span class="{css}">{inner}</span>' if css and css not in ("w", "n") else inner


def _html(text: str) -> str:
    return escape(text, quote=False)
