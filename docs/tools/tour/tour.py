"""The tour: its pages, how long each takes to read, the paths through them, the chain they follow.

Called by: all that speaks of the tour. Run by hand, `python docs/tools/tell.py minutes` prints the
minutes. Calls: `quotes`, for the code that a page shows; `spine`.

A page takes as long as its words, its lines of code (folded ones too: a reader may open them), its
pictures and its player; docs/tour.toml has the speeds. Questions count, their answers too; worked
problems do not. A page in another language takes as long as the English one.
"""

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from math import ceil
from typing import NamedTuple

from source.package import Package, Place
from source.page_words import DEFAULT, bare, is_there, say, spoken, translated
from source.places import DOCS
from source.quotes import read_quote
from source.spine import lines_per_minute, read_spine

LIST = DOCS / "tour.toml"
FOLDER = DOCS / "tour"


class Page(NamedTuple):
    """One page of the tour."""

    number: int
    """From 1."""
    page: str
    """Its file, without the ending."""
    section: str
    link: str
    """The link of the chain that it is about."""
    why_next: str
    aside: bool = False
    """Whether the paths through the tour leave it out, but for the longest."""

    @property
    def text(self) -> str:
        return (FOLDER / f"{self.page}.md").read_text()

    @property
    def title(self) -> str:
        """Of its first heading, with code in backticks; of its head, if the heading has a macro."""
        return _title_in(self.text)

    @property
    def is_spoken(self) -> bool:
        """Whether it is there in the language of the page that is being made."""
        return spoken() == DEFAULT or is_there(self.own_file)

    @property
    def own_file(self) -> str:
        """In the language of the page that is being made, below docs/; it may be missing."""
        return translated(f"tour/{self.page}.md", spoken())

    @property
    def own_title(self) -> str:
        """In that language, if the page is there, else the English one."""
        return _title_in((DOCS / self.own_file).read_text()) if self.is_spoken else self.title

    def own_way(self, ending: str) -> str:
        """To it from another page of the tour: to that in the same language, if it is there."""
        above = "" if self.is_spoken else "../../tour/"
        return f"{above}{self.page}.{ending}"

    @property
    def own_why_next(self) -> str:
        """In that language, if it is there, else the English one."""
        return read_why_next(spoken()).get(self.page, self.why_next)

    @property
    def question(self) -> str:
        """What the page answers."""
        return re.search(r'class="mm-question"[^>]*>(.+?)</div>', self.text, re.DOTALL)[1].strip()


def _title_in(text: str) -> str:
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)[1]
    if "{{" in heading:
        return re.search(r"^title: (.+)$", text, re.MULTILINE)[1]
    return re.sub(r" *\{[^{}]*\}$", "", heading)


@cache
def read_why_next(language: str) -> dict[str, str]:
    """Page -> why the next one comes next, in another language; English is in docs/tour.toml."""
    path = DOCS / language / "tour_why_next.toml"
    return tomllib.loads(path.read_text()) if path.exists() else {}


class Route(NamedTuple):
    """A path through the tour that fits a time. Each begins with the first page."""

    name: str
    what: str
    most_minutes: int | None = None
    last: str | None = None
    """Its last page; None for all pages."""
    asides: bool = False
    """Whether it has the pages that the others leave out."""
    spine: bool = False
    """Whether the files of the spine come after the pages."""


class Call(NamedTuple):
    """One link of the chain; see docs/tour.toml."""

    name: str
    symbol: str
    page: str
    under: str | None = None
    calls: str | None = None
    inside: str | None = None


@cache
def read_tour() -> tuple[Page, ...]:
    """The pages, in their order."""
    pages = _list()["pages"]
    return tuple(Page(number, **page) for number, page in enumerate(pages, start=1))


@cache
def read_routes() -> tuple[Route, ...]:
    """The paths, the shortest first."""
    return tuple(Route(**path) for path in _list()["paths"])


@cache
def read_chain() -> dict[str, Call]:
    """The links by name, in the order in which they are called."""
    return {call["name"]: Call(**call) for call in _list()["chain"]}


@cache
def _list() -> dict:
    return tomllib.loads(LIST.read_text())


def page_of(docs_path: str) -> Page | None:
    """The page whose file is `tour/NAME.md`, in any language; None for any other file."""
    english = bare(docs_path)
    return next((page for page in read_tour() if english == f"tour/{page.page}.md"), None)


def page_named(name: str) -> Page:
    """The page with this file name, without the ending."""
    return next(page for page in read_tour() if page.page == name)


def page_after(page: Page) -> Page | None:
    """The page that follows; None at the end."""
    return read_tour()[page.number] if page.number < len(read_tour()) else None


def pages_of(route: Route) -> Sequence[Page]:
    """What the path has one read, from the first page on."""
    pages = [page for page in read_tour() if route.asides or not page.aside]
    if route.last is None:
        return pages
    names = [page.page for page in pages]
    return pages[: names.index(route.last) + 1]


def place_of(package: Package, call: Call) -> Place:
    """Where the link is defined. Raises ValueError if the package has no such name."""
    place = package.find(call.symbol)
    if place is None or call.symbol != ".".join(filter(None, (place.page.module, place.symbol))):
        raise ValueError(f"docs/tour.toml: the package does not define {call.symbol}")
    return place


# -- Minutes --


class Speeds(NamedTuple):
    """How fast a reader is assumed to be."""

    words_per_minute: int
    minutes_per_picture: float
    minutes_per_player: int


@cache
def read_speeds() -> Speeds:
    """Those of docs/tour.toml; lines of code have theirs in `spine.lines_per_minute`."""
    return Speeds(*(_list()[name] for name in Speeds._fields))


class Amount(NamedTuple):
    """What a page gives to read."""

    words: int
    code_lines: int
    pictures: int
    players: int

    @property
    def minutes(self) -> int:
        """Whole minutes, rounded up."""
        speeds = read_speeds()
        return ceil(
            self.words / speeds.words_per_minute
            + self.code_lines / lines_per_minute()
            + self.pictures * speeds.minutes_per_picture
            + self.players * speeds.minutes_per_player
        )


MACRO = re.compile(r"\{\{ (\w+)(?: ((?:(?! \}\}).)+))? \}\}")


@cache
def amount_of(page: Page, package: Package) -> Amount:
    """Counted in the page's source."""
    text = re.sub(r"\A---\n.*?\n---\n", "", page.text, flags=re.DOTALL)
    found = [(macro[1], macro[2] or "") for macro in MACRO.finditer(text)]
    kinds = [kind for kind, _ in found]
    fences = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
    fenced = [line for fence in fences.findall(text) for line in fence.split("\n")[1:-1]]
    text = fences.sub("", text)
    text, num_formulas = re.subn(r"\$\$.+?\$\$", "", text, flags=re.DOTALL)
    text = re.sub(r"</?\w[^>]*>", "", MACRO.sub(_words_of_macro, text))
    return Amount(
        words=len([word for word in text.split() if re.search(r"\w", word)]),
        code_lines=len([line for line in fenced if line.strip()])
        + sum(read_quote(package, code).num_lines for kind, code in found if kind == "code"),
        pictures=sum(map(kinds.count, ("figure", "table", "run"))) + num_formulas,
        players=sum(map(kinds.count, ("player", "replay"))),
    )


def _words_of_macro(macro: re.Match) -> str:
    """What of a macro is read as words of the text."""
    kind, argument = macro[1], macro[2] or ""
    if kind in ("value", "link"):
        return argument.partition(" | ")[2] or "one"
    if kind == "term":
        return argument.partition(" | ")[2] or argument
    return argument.partition(" | ")[2] if kind in ("figure", "practice") else ""


def minutes_of(page: Page, package: Package) -> int:
    """How long the page takes."""
    return amount_of(page, package).minutes


def minutes_of_route(route: Route, package: Package) -> int:
    """The sum over its pages, and over the spine's files where it has them."""
    pages = sum(minutes_of(page, package) for page in pages_of(route))
    return pages + (sum(link.minutes for link in read_spine()) if route.spine else 0)


def time_words(minutes: int) -> str:
    """
    >>> time_words(58), time_words(60), time_words(205)
    ('58 minutes', '1 hour', '3 hours 25 minutes')
    """
    hours, rest = divmod(minutes, 60)
    parts = [say("page.hours", n=hours)] if hours else []
    if rest or not hours:
        parts.append(say("page.minutes", n=rest))
    return " ".join(parts)


def report(package: Package) -> str:
    """The minutes of all pages and paths, and what they are counted from."""
    lines = []
    for page in read_tour():
        found = amount_of(page, package)
        counted = ", ".join(f"{number} {name}" for name, number in found._asdict().items())
        lines.append(f"{page.number:3} {page.page:26} {found.minutes:3} minutes: {counted}")
    for route in read_routes():
        time = time_words(minutes_of_route(route, package))
        lines.append(f"{route.name}: {len(pages_of(route))} pages, {time}")
    return "\n".join(lines).replace("_", " ")


def main() -> None:
    """Prints the minutes."""
    print(report(Package.read()))
