"""The chain of calls as a map, and as a strip that says where a page stands in it.

Called by: `macros`, `tour_frame` (map, strip of a tour page), `source_pages` (strip of a module).
Calls: `tour`, `callers`.
"""

import re
from collections.abc import Iterable
from html import escape

from source.callers import CALL, sites_of
from source.package import Package
from source.page_words import DEFAULT, say, spoken
from tour.tour import Call, Page, page_named, page_of, place_of, read_chain, read_tour

WORDS = {"your (.+)": "page.link.your", "(.+), with chunks": "page.link.chunks"}
"""Names of links that are not code alone."""


def children_of(name: str | None) -> list[Call]:
    """What the link calls, in that order; of None, where the chain begins."""
    return [call for call in read_chain().values() if call.under == name]


def line_to(call: Call) -> list[Call]:
    """The callers above the link, the first one first, and the link itself."""
    above = line_to(read_chain()[call.under]) if call.under else []
    return [*above, call]


def title_html(page: Page) -> str:
    """The page's title, code as code."""
    parts = escape(page.title, quote=False).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def name_html(call: Call) -> str:
    """
    >>> name_html(Call("your loss", "", "")), name_html(Call("f_b, with chunks", "", ""))
    ('your <code>loss</code>', '<code>f_<wbr>b</code>, with chunks')
    """
    for pattern, name in WORDS.items():
        if found := re.fullmatch(pattern, call.name):
            return say(name, name=_code(found[1]))
    return _code(call.name)


def _code(name: str) -> str:
    # A long name may break after an underscore or a dot.
    shown = re.sub(r"(?<=\w[._])(?=\w)", "<wbr>", escape(name))
    return f"<code>{shown}</code>"


# -- The map --


def map_html(package: Package, up: str = "../") -> str:
    """Every link of the chain as a nested list: to its page of the tour, and to its source.

    Pages that are about a link but are not its first page stand beside it. `up` leads from the page
    to the site's root.
    """
    return (
        '<nav class="mm-map" aria-label="The chain of calls">'
        f"<ul>{_branch(None, package, up)}</ul></nav>"
    )


def _branch(name: str | None, package: Package, up: str) -> str:
    return "".join(_item(call, package, up) for call in children_of(name))


def _item(call: Call, package: Package, up: str) -> str:
    place = place_of(package, call)
    line = place.definition.line
    file = place.page.path.rpartition("/")[2]
    links = [
        f'<a class="mm-map-name" href="{up}tour/{call.page}.html">{name_html(call)}</a>',
        *(
            f'<a class="mm-map-more" href="{up}tour/{page.page}.html">{title_html(page)}</a>'
            for page in read_tour()
            if page.link == call.name and page.page != call.page
        ),
        f'<a class="mm-map-source" href="{up}source/{place.url}">'
        f'<span class="mm-said">source of {escape(call.name)}, </span>'
        f'<span class="mm-map-file">{escape(file)}:{line}</span></a>',
    ]
    below = _branch(call.name, package, up)
    inner = f"<ul>{below}</ul>" if below else ""
    return f'<li><div class="mm-map-line">{"".join(links)}</div>{inner}</li>'


# -- The strip --


def strip_html(package: Package, page: str) -> str:
    """Where a page stands in the chain, "" if it is about no link of it.

    `page` is a module of the package, whose links lead to its own source, or a page of the tour as
    "tour/NAME.md", whose links lead to the tour.
    """
    tour_page = page_of(page)
    if tour_page is not None:
        return _tour_strip(package, tour_page)
    return _source_strip(package, page)


def _tour_strip(package: Package, page: Page) -> str:
    here = read_chain()[page.link]
    up = "../" if spoken() == DEFAULT else "../../"

    def link(call: Call) -> str:
        # A page about several links leads from the others to their source.
        at = page_named(call.page).own_way("html")
        if call.page == page.page and call != here:
            at = f"{up}source/{place_of(package, call).url}"
        return f'<a href="{at}">{name_html(call)}</a>'

    *above, _ = line_to(here)
    now = name_html(here)
    if here.page != page.page:  # this page is a further one about the link
        now = link(here)
    parts = [
        _crumbs([link(call) for call in above], now),
        _beside("page.calls", [link(call) for call in children_of(here.name)]),
        _beside(
            "page.beside",
            [link(call) for call in children_of(here.under) if call.name != here.name],
            " class='mm-aside'",
        ),
    ]
    return _strip(parts)


def _source_strip(package: Package, module: str) -> str:
    """Of a file that defines links of the chain, or has the helper in which one is called."""
    chain = read_chain().values()
    here = [call for call in chain if place_of(package, call).page.module == module]
    helped = [call for call in chain if call.inside and _symbol(package, call.inside)[0] == module]
    if here:
        above = [call for call in line_to(here[0]) if call not in here]
        now = [_source_link(package, call) for call in here]
    elif helped:
        above = line_to(read_chain()[helped[0].under])
        now = [_helper_link(package, name) for name in dict.fromkeys(one.inside for one in helped)]
    else:
        return ""
    pages = {call.page for call in here or helped}
    tour = [page for page in read_tour() if page.page in pages]
    to_tour = [f'<a href="../tour/{page.page}.html">{title_html(page)}</a>' for page in tour]
    crumbs = _crumbs([_source_link(package, call) for call in above], ", ".join(now))
    called = [link for _, _, link in calls_in(package, module)]
    return _strip([crumbs, _beside("page.calls", called), _beside("page.in-the-tour", to_tour)])


def calls_in(package: Package, module: str) -> list[tuple[int, str, str]]:
    """What of the chain the file calls and does not define: line, name, link; in order of lines.

    A link that is called in a helper in another file is left to that file; the helper is named here.
    """
    found: dict[str, tuple[int, str, str]] = {}

    def note(numbers: Iterable[int], name: str, link: str) -> None:
        if first := min(numbers, default=None):
            found[name] = (first, name, link)

    for call in read_chain().values():
        if place_of(package, call).page.module != module:
            numbers = {*_lines_of(package, call, module), *_sites_in(package, call.symbol, module)}
            note(numbers, call.name, _source_link(package, call))
        if call.inside and _symbol(package, call.inside)[0] != module:
            numbers = _sites_in(package, call.inside, module)
            note(numbers, _symbol(package, call.inside)[1], _helper_link(package, call.inside))
    return sorted(found.values())


def _lines_of(package: Package, call: Call, module: str) -> Iterable[int]:
    """The lines of the file in which docs/tour.toml says that the link is called."""
    caller = package.find(call.inside or read_chain()[call.under].symbol) if call.under else None
    if caller is None or caller.page.module != module:
        return []
    numbers = range(caller.definition.first_line, caller.definition.end_line + 1)
    return [number for number in numbers if call.calls in caller.page.lines[number - 1]]


def _sites_in(package: Package, dotted: str, module: str) -> Iterable[int]:
    """The lines of the file that call it, as the source pages say; not where one above it is."""
    sites = sites_of(package).get(_symbol(package, dotted), [])
    here = [site for site in sites if site.module == module and site.how == CALL]
    return [site.line for site in here if site.because or not site.through]


def _symbol(package: Package, dotted: str) -> tuple[str, str]:
    place = package.find(dotted)
    return place.page.module, place.symbol


def _source_link(package: Package, call: Call) -> str:
    return f'<a href="{place_of(package, call).url}">{name_html(call)}</a>'


def _helper_link(package: Package, dotted: str) -> str:
    place = package.find(dotted)
    return f'<a href="{place.url}">{name_html(Call(place.symbol, dotted, ""))}</a>'


def _strip(parts: Iterable[str]) -> str:
    inner = "".join(parts)
    name = say("page.where")
    return f'<nav class="mm-strip" aria-label="{name}" data-search-exclude>{inner}</nav>'


def _crumbs(above: list[str], now: str) -> str:
    items = "".join(f"<li>{link}</li>" for link in above)
    return f'<ol>{items}<li aria-current="true">{now}</li></ol>'


def _beside(name: str, links: list[str], attributes: str = "") -> str:
    shown = say(name, links=say("page.comma").join(links))
    return f"<p{attributes}>{shown}</p>" if links else ""
