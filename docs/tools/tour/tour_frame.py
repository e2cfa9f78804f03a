"""What the build puts around a page of the tour, and the paths on the tour's index.

Called by: `site_pages` (around each page), `macros` (what the macros in it become), `mkdocs_hook` (the
navigation). Calls: `tour`, `chain_map`.
"""

from collections.abc import Sequence
from itertools import groupby

from source.package import Package
from source.page_words import DEFAULT, say, spoken
from source.spine import lines_per_minute, read_spine, spine_hours
from source.stash import Stash
from tour.chain_map import strip_html
from tour.tour import (
    Page,
    Route,
    minutes_of,
    minutes_of_route,
    page_after,
    page_of,
    pages_of,
    read_routes,
    read_speeds,
    read_tour,
    time_words,
)


def framed(docs_path: str, text: str) -> str:
    """A page of the tour with its place in the chain below its title, and its end; else the text."""
    if page_of(docs_path) is None:
        return text
    title_end = text.index("\n", text.index("\n# ") + 1)
    parts = [
        text[:title_end],
        "{{ here }}",
        text[title_end:].strip(),
        "{{ why_next }}",
    ]
    return "\n\n".join(parts) + "\n"


def here(package: Package, page: Page, stash: Stash) -> str:
    """The strip, and how far the reader is."""
    words = say(
        "page.how-far",
        number=page.number,
        all=len(read_tour()),
        minutes=minutes_of(page, package),
    )
    how_far = f'<p class="mm-how-far" data-search-exclude>{words}</p>'
    return stash.put(
        f'<div class="mm-here">{strip_html(package, f"tour/{page.page}.md")}{how_far}</div>'
    )


def why_next(package: Package, page: Page) -> str:
    """The page's last paragraph: which page follows, and why."""
    following = page_after(page)
    if following is None:
        words = say("page.the-spine")
        spine = f"[{words}]({to_root()}source/index.md#the-spine)"
        link = say("page.next.hours", link=spine, hours=spine_hours())
    else:
        link = say("page.next", link=_link_to(following), minutes=minutes_of(following, package))
        if following.aside:
            link = f"{_way_round(following)}\n\n{link}"
    return f'<div class="mm-next" markdown="1">\n\n{page.own_why_next}\n\n{link}\n\n</div>\n'


def _link_to(page: Page) -> str:
    """Its title, and that it is in English, if it is not in the language of the page before it."""
    note = "" if page.is_spoken else say("page.in-english")
    return f"[{page.own_title}]({page.own_way('md')}){note}"


def to_root() -> str:
    """From a page of the tour to the site's root."""
    return "../" if spoken() == DEFAULT else "../../"


def _way_round(aside: Page) -> str:
    """Where a reader goes on who leaves out this page and those like it after it."""
    goes_on = aside
    while goes_on.aside:
        goes_on = page_after(goes_on)
    return say("page.way-round", n=goes_on.number - aside.number, link=_link_to(goes_on))


def tour_nav() -> list:
    """The tour's part of the navigation, as MkDocs reads it."""
    sections = groupby(read_tour(), key=lambda page: page.section)
    return [
        "tour/index.md",
        *({section: [f"tour/{page.page}.md" for page in pages]} for section, pages in sections),
    ]


# -- Paths --


def paths(package: Package) -> str:
    """Each path: what it is for, its pages after those of the path before it, and the sum."""
    parts, have_read = [], []
    for route in read_routes():
        minutes = time_words(minutes_of_route(route, package))
        parts.append(f"## {route.name} {{ #{anchor_of(route)} }}\n\n{route.what}\n")
        new = [page for page in pages_of(route) if page not in have_read]
        if new:
            parts.append(_pages_table(new, package, is_first=not have_read))
        if route.spine:
            parts.append(_spine_table())
        parts.append(f"In all: **{minutes}**{_how_counted(route, not have_read)}.\n")
        have_read += new
    return "\n".join(parts)


def speeds() -> str:
    """How the minutes of a page are counted, in words."""
    found = read_speeds()
    return (
        f"{found.words_per_minute} words a minute; {lines_per_minute()} lines of code a minute, folded "
        f"ones too; {found.minutes_per_picture} minutes for a picture, a table or a formula; "
        f"{found.minutes_per_player} minutes for a player. Questions at the end of a page count, and "
        "so do their answers. Worked problems, notebooks and exercises do not."
    )


def anchor_of(route: Route) -> str:
    """
    >>> anchor_of(Route("One hour", ""))
    'one-hour'
    """
    return route.name.lower().replace(" ", "-")


def _how_counted(route: Route, is_first: bool) -> str:
    if is_first:
        return f", {len(pages_of(route))} pages"
    before = read_routes()[read_routes().index(route) - 1].name.lower()
    return f", {before} and this" if not route.spine else ", the tour and the spine"


def _pages_table(pages: Sequence[Page], package: Package, is_first: bool) -> str:
    rows = ["| | page | minutes |", "|--:|---|--:|"]
    for page in pages:
        minutes = minutes_of(page, package)
        shown = f"[{page.title}]({page.own_way('md')})<br>{page.question}"
        rows.append(f"| {page.number} | {shown} | {minutes} |")
    rows.append(f"| | {'sum' if is_first else 'sum of these'} | {_sum(pages, package)} |")
    return '<div class="mm-paths" markdown="1">\n\n' + "\n".join(rows) + "\n\n</div>\n"


def _sum(pages: Sequence[Page], package: Package) -> int:
    return sum(minutes_of(page, package) for page in pages)


def _spine_table() -> str:
    rows = ["| files | in the spine | minutes |", "|--:|---|--:|"]
    for section, found in groupby(read_spine(), key=lambda link: link.section):
        links = list(found)
        first = f"[{section}]({to_root()}source/{links[0].module}.md)"
        rows.append(f"| {len(links)} | {first} | {sum(link.minutes for link in links)} |")
    every = read_spine()
    rows.append(f"| {len(every)} | sum of these | {sum(link.minutes for link in every)} |")
    return '<div class="mm-paths" markdown="1">\n\n' + "\n".join(rows) + "\n\n</div>\n"
