"""The annotated source: one page per module, prose beside the code that it is about.

Called by: `build_docs`. Calls: `annotate`, `prose`, `code_html`.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from annotate import AnnotatedPage, Row
from chain_map import strip_html
from code_html import code_block, links_of
from package import Caller, Package, Place
from prose import is_line, link_names, to_markdown
from spine import Link, read_spine
from stash import Stash

HEADER = """---
title: "{title}"
hide: [navigation]
search:
  boost: 0.6
---
"""


def write_source_pages(package: Package, folder: Path, pieces: Path) -> None:
    """Writes `<module>.md` for every module, and the pieces of its code."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in package.pages.values():
        stash = Stash()
        (folder / f"{page.module}.md").write_text(source_page(page, package, stash))
        stash.save(pieces / f"{page.module}.md.json")


def first_sentence(page: AnnotatedPage) -> str:
    """What the module says it is."""
    return page.rows[0].prose.strip().partition("\n\n")[0].replace("\n", " ")


# -- One page --


def source_page(page: AnnotatedPage, package: Package, stash: Stash) -> str:
    """The page's Markdown."""
    links = links_of(page, package, "")

    def find(words: str) -> Place | None:
        return package.find_in_prose(words, page.module)

    def url(place: Place) -> str:
        here = place.page.module == page.module
        # Lines get their ids when Markdown is done, so it cannot check links to them.
        ending = "html" if is_line(place.anchor) else "md"
        file = "" if here and place.anchor else f"{place.page.module}.{ending}"
        return file + (f"#{place.anchor}" if place.anchor else "")

    anchors = _line_anchors(page)
    top = stash.put("".join(_top(page, package)))
    parts = [HEADER.format(title=page.module), top, ""]
    for row in page.rows:
        prose = link_names(to_markdown(row.prose), find, url) if row.prose else ""
        code = code_block(page, row.code_lines, links, anchors) if row.code_lines else ""
        parts += _row(row, prose, callers_of(row, page, package), code, stash)
    parts.append("")
    return "\n".join(parts)


def _line_anchors(page: AnnotatedPage) -> dict[int, list[str]]:
    """Ids at lines of code, for definitions that open no row."""
    opened = {row.anchor for row in page.rows}
    found: dict[int, list[str]] = {}
    for anchor, definition in page.definitions.items():
        if anchor not in opened and definition.kind != "variable":
            found.setdefault(definition.line, []).append(anchor)
    return found


def _row(row: Row, prose: str, callers: str, code: str, stash: Stash) -> Iterator[str]:
    bare = "" if prose else " mm-bare"
    yield f'<div class="mm-row mm-{row.kind}{bare}" markdown="1">'
    yield '<div class="mm-prose" markdown="1">'
    yield ""
    yield _heading(row)
    yield ""
    if row.prose_lines:
        yield stash.put(_prose_lines(row))
        yield ""
    yield prose
    yield ""
    if callers:
        yield stash.put(callers)
        yield ""
    yield "</div>"
    if code:
        yield stash.put(code)
        yield ""
    yield "</div>"
    yield ""


def _heading(row: Row) -> str:
    # As HTML, since Markdown would read the underscores in `{ #Thing.__init__ }` as bold.
    level = {"module": 1, "note": 3, "method": 3}.get(row.kind, 2)
    words = (
        row.title.replace("<", "&lt;")
        if row.kind == "note"
        else f"`{row.title.rpartition('.')[2]}`"
    )
    return f'<h{level} id="{row.anchor}" markdown="1">{words}</h{level}>'


def _prose_lines(row: Row) -> str:
    """The numbers of the lines that stand here as prose, each with its id."""
    first, last = row.prose_lines[0], row.prose_lines[-1]
    ids = "".join(f'<span id="L{n}"></span>' for n in row.prose_lines)
    words = f"line {first}" if first == last else f"lines {first} to {last}"
    text = f"{first}" if first == last else f"{first}–{last}"
    return (
        f'<p class="mm-where" data-search-exclude data-first="{first}" data-last="{last}">{ids}'
        f'<a href="#L{first}" aria-label="{words}">{text}</a></p>'
    )


def _top(page: AnnotatedPage, package: Package) -> Iterator[str]:
    parts = page.module.split(".")
    crumbs = ['<a href="index.html">Source</a>']
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        has_page = name in package.pages
        crumbs.append(
            f'<a href="{name}.html">{parts[depth - 1]}</a>' if has_page else parts[depth - 1]
        )
    crumbs.append(parts[-1])
    yield '<div class="mm-top" data-search-exclude>'
    yield f'<nav class="mm-crumbs" aria-label="Module">{" <span>›</span> ".join(crumbs)}</nav>'
    yield strip_html(package, page.module)
    yield f'<p class="mm-file"><code>{escape(page.path)}</code> · {len(page.lines) - 1} lines</p>'
    yield _place_in_spine(page.module)
    yield _module_links("Imported by", package.used_by[page.module])
    imported = {
        place.page.module
        for target in {*page.imports, *page.aliases.values()}
        if (place := package.find(target)) and place.page.module != page.module
    }
    yield _module_links("Imports", sorted(imported))
    yield "</div>"


def _module_links(title: str, modules: list[str]) -> str:
    if not modules:
        return ""
    links = ", ".join(
        f'<a href="{name}.html">{escape(name.removeprefix("minimegatron."))}</a>'
        for name in modules
    )
    return f"<details><summary>{title} {len(modules)}</summary><p>{links}</p></details>"


# -- The spine --


def _place_in_spine(module: str) -> str:
    """Which link of the list the module is, and its neighbours."""
    links = read_spine()
    here = next((link for link in links if link.module == module), None)
    the_spine = '<a href="index.html#the-spine">the spine</a>'
    if here is None:
        return (
            f'<p class="mm-spine">Second reading: not in {the_spine}, the files to read first.</p>'
        )
    parts = [f"Link {here.number} of {len(links)} in {the_spine}, {here.minutes} minutes"]
    if here.number > 1:
        parts.append(f"previous: {_link(links[here.number - 2])}")
    if here.number < len(links):
        parts.append(f"next: {_link(links[here.number])}")
    return f'<p class="mm-spine">{" · ".join(parts)}</p>'


def _link(link: Link) -> str:
    return f'<a href="{link.module}.html">{escape(link.module.removeprefix("minimegatron."))}</a>'


# -- Who calls it --

MOST_CALLERS = 6
"""More are folded away."""
SOLUTIONS = "minimegatron.exercises.catalog."
"""What students are asked to write is not shown to them here."""


def callers_of(row: Row, page: AnnotatedPage, package: Package) -> str:
    """Under a public function or class of the module: which functions call it, or hand it on."""
    if row.kind not in ("function", "class") or row.symbol.startswith("_"):
        return ""
    found = [
        caller
        for caller in package.callers.get((page.module, row.symbol), [])
        if not caller.module.startswith(SOLUTIONS)
    ]
    called = [caller for caller in found if caller.is_call]
    # A class is named by every annotation.
    named = [caller for caller in found if not caller.is_call and row.kind == "function"]
    texts = (("Called from", called), ("Handed on in", named))
    return "".join(_callers(title, callers, page, package) for title, callers in texts)


def _callers(title: str, callers: list[Caller], page: AnnotatedPage, package: Package) -> str:
    if not callers:
        return ""
    first = {link.module for link in read_spine()} | {page.module}
    ordered = sorted(callers, key=lambda caller: (caller.module not in first, caller))
    items = "".join(f"<li>{_caller(caller, page, package)}</li>" for caller in ordered)
    if len(ordered) <= MOST_CALLERS:
        return f'<div class="mm-callers">{title}<ul>{items}</ul></div>'
    summary = f"<summary>{title} {len(ordered)} places</summary>"
    return f'<details class="mm-callers">{summary}<ul>{items}</ul></details>'


def _caller(caller: Caller, page: AnnotatedPage, package: Package) -> str:
    """Its name, with the module's if that is another one; in full where one points at it."""
    place = Place(package.pages[caller.module], caller.symbol)
    names = caller.module.removeprefix("minimegatron.").split(".")
    if caller.module == page.module:
        shown = caller.symbol or "this file"
    else:
        shown = ".".join([*names[-1:], caller.symbol] if caller.symbol else names)
    full = ".".join(filter(None, (caller.module, caller.symbol)))
    return f'<a href="{escape(place.url)}" title="{escape(full)}"><code>{escape(shown)}</code></a>'
