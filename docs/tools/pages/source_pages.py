"""The annotated source: one page per module, prose beside the code that it is about.

Called by: `build_docs`, `site_pages`, `every_page`. Calls: `annotate`, `prose`, `code_html`,
`caller_lists`, `rosetta`.
"""

from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path

from rosetta.rosetta import REPOSITORY, Record, counterpart_module
from source.annotate import AnnotatedPage, Row
from source.caller_lists import callers_of
from source.code_html import code_block, imports_of, links_of
from source.package import Package, Place
from source.prose import is_line, link_names, to_markdown
from source.spine import Link, read_spine, room_of
from source.stash import Stash
from tour.chain_map import strip_html

HEADER = """---
title: "{title}"
hide: [navigation]
search:
  boost: 0.6
---
"""


FEW = 3
"""Modules that the head names without a fold."""
SCRIPT = '<script src="../javascripts/source.js"></script>'


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

    anchors, folded = _line_anchors(page), imports_of(page)

    def markdown(words: str) -> str:
        return link_names(to_markdown(words), find, url) if words else ""

    what, _, more = page.rows[0].prose.strip().partition("\n\n")
    parts = [HEADER.format(title=page.module), *_head(page, markdown(what), package, stash)]
    for row in page.rows:
        callers, first, rest = callers_of(row, page, package), "", row.prose
        if row.kind == "module":
            rest = more
        elif callers:  # after what the function is, before all that is to be said of it
            first, _, rest = row.prose.strip().partition("\n\n")
        numbers = row.code_lines
        code = code_block(page, numbers, links, anchors, folded=folded) if numbers else ""
        parts += _row(row, [markdown(first), callers, markdown(rest)], code, stash)
    parts += ["", stash.put(SCRIPT), ""]
    return "\n".join(parts)


def _line_anchors(page: AnnotatedPage) -> dict[int, list[str]]:
    """Ids at lines of code, for definitions that open no row."""
    opened = {row.anchor for row in page.rows}
    found: dict[int, list[str]] = {}
    for anchor, definition in page.definitions.items():
        if anchor not in opened and definition.kind != "variable":
            found.setdefault(definition.line, []).append(anchor)
    return found


def _row(row: Row, words: list[str], code: str, stash: Stash) -> Iterator[str]:
    """`words`: prose, the callers' lists, and more prose."""
    first, callers, rest = words
    bare = "" if first or rest else " mm-bare"
    yield f'<div class="mm-row mm-{row.kind}{bare}" markdown="1">'
    yield '<div class="mm-prose" markdown="1">'
    yield ""
    if row.kind != "module":
        yield _heading(row)
        yield ""
    if row.prose_lines:
        yield stash.put(_prose_lines(row))
        yield ""
    for part in (first, stash.put(callers) if callers else "", rest):
        if part:
            yield part
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


# -- The head --


def _head(page: AnnotatedPage, lead: str, package: Package, stash: Stash) -> Iterator[str]:
    """Where the module is; its name and what it is; a table of what it belongs to."""
    yield '<div class="mm-top" markdown="1">'
    yield stash.put(_crumbs(page, package) + strip_html(package, page.module))
    yield ""
    yield '<div class="mm-name-of" markdown="1">'
    yield ""
    yield _heading(page.rows[0])
    yield ""
    yield lead
    yield ""
    yield "</div>"
    facts = "".join(
        f"<dt>{title}</dt><dd>{words}</dd>" for title, words in _facts(page, package) if words
    )
    yield stash.put(f'<dl class="mm-facts">{facts}</dl>')
    yield "</div>"
    yield ""


def _crumbs(page: AnnotatedPage, package: Package) -> str:
    parts = page.module.split(".")
    crumbs = ['<a href="index.html">Source</a>']
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        has_page = name in package.pages
        crumbs.append(
            f'<a href="{name}.html">{parts[depth - 1]}</a>' if has_page else parts[depth - 1]
        )
    crumbs.append(parts[-1])
    return f'<nav class="mm-crumbs" aria-label="Module">{" <span>›</span> ".join(crumbs)}</nav>'


def _facts(page: AnnotatedPage, package: Package) -> Iterator[tuple[str, str]]:
    yield "File", f"<code>{escape(page.path)}</code> · {len(page.lines) - 1} lines"
    yield "Spine", _place_in_spine(page.module)
    yield "Megatron", _counterpart(page)
    yield "Imported by", _module_links(package.used_by[page.module])
    imported = {
        place.page.module
        for target in {*page.imports, *page.aliases.values()}
        if (place := package.find(target)) and place.page.module != page.module
    }
    yield "Imports", _module_links(sorted(imported))


def _counterpart(page: AnnotatedPage) -> str:
    """The module of Megatron that the docstring names, as a link where it was recorded."""
    name, path = counterpart_module(page.module, page.rows[0].prose, {}), ""
    if not name:
        return ""
    record, files = _recorded()
    for ending in (".py", "/__init__.py"):
        if (file := name.replace(".", "/") + ending) in files:
            path = file
    code = f"<code>{escape(name)}</code>"
    return f'<a href="{REPOSITORY}/{record.tag}/{path}">{code}</a>' if path else code


@cache
def _recorded() -> tuple[Record, frozenset[str]]:
    """What is known of Megatron, and the names of its files."""
    record = Record()
    files = {one.file for one in record.symbols.values()}
    return record, frozenset(files | {place[0] for place in record.repository.values()})


def _module_links(modules: list[str]) -> str:
    """All of a few; of many the number, and they are folded."""
    links = ", ".join(
        f'<a href="{name}.html">{escape(name.removeprefix("minimegatron."))}</a>'
        for name in modules
    )
    if len(modules) <= FEW:
        return links
    return f"<details><summary>{len(modules)} modules</summary><p>{links}</p></details>"


# -- The spine --


def _place_in_spine(module: str) -> str:
    """Which link of the list the module is, and its neighbours."""
    links = read_spine()
    here = next((link for link in links if link.module == module), None)
    the_spine = '<a href="index.html#the-spine">the spine</a>'
    if (room := room_of(module)) is not None:
        return f"In the room \u201c{room.name}\u201d: who reads {the_spine} may leave it shut."
    if here is None:
        return f"Second reading: not in {the_spine}, the files to read first."
    parts = [f"Link {here.number} of {len(links)} in {the_spine}, {here.minutes} minutes"]
    if here.number > 1:
        parts.append(f"previous: {_link(links[here.number - 2])}")
    if here.number < len(links):
        parts.append(f"next: {_link(links[here.number])}")
    return "".join(f"<span>{part}</span> " for part in parts).rstrip()


def _link(link: Link) -> str:
    return f'<a href="{link.module}.html">{escape(link.module.removeprefix("minimegatron."))}</a>'
