"""Pages in several languages: which text a page was made from, and which are of an older one.

Called by: `mkdocs_hook`, which writes each page's digest into its head, its language, where it is in
others, and that it is of an older text; tests/docs. Calls: `page_words`.

    python docs/tools/tell.py translations zh       what is missing or older in docs/zh, by page

A page in another language lies below docs/LANGUAGE/ under the same name. Its front matter says which
text it was made from: `made_from: 3f2a9c01d7e4`, the digest of the English file at that time. The
problems of a page of the tour are in docs/LANGUAGE/problems, why the next page comes next in
docs/LANGUAGE/tour_why_next.toml. Words of widgets, and those that the build writes around pages, are
in docs/strings/LANGUAGE.json; LANGUAGE_terms.toml has the one word for each entry of the glossary.
"""

import hashlib
import re
import sys
from pathlib import Path

from source.page_words import LANGUAGES, bare, is_there, language_of, say, speaking, translated
from source.places import DOCS
from tour.tour import read_tour

MADE_FROM = re.compile(r"\A---\n.*?^made_from: *(\w+)$.*?^---$", re.MULTILINE | re.DOTALL)
OWN_NAMES = {"en": "English", "zh": "中文"}


TABS = {
    "Home": "page.tab.home",
    "Tour": "page.tab.tour",
    "Practise": "page.tab.practise",
    "Help": "page.tab.help",
    "Source": "page.tab.source",
    "Look up": "page.tab.look-up",
}
"""As mkdocs.yml names them -> their names among the strings."""
TAB = re.compile(
    r'(class="md-(?:tabs__link|ellipsis)"[^>]*>\s*|<span class="md-nav__icon md-icon"></span>\s*)'
    rf"({'|'.join(TABS)})(?=\s*<)"
)


def digest(text: str) -> str:
    """Of a page's text, macros not filled in: what a translator has read.

    >>> digest("# A stage")
    'c1ededfe39df'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def made_from(page: str, docs: Path = DOCS) -> str:
    """The digest of the file in docs/ that a page of the site is made from; "" for generated pages."""
    path = docs / page
    return digest(path.read_text()) if path.is_file() else ""


def with_tabs(html: str, language: str) -> str:
    """A page of the site, its tabs named in its language.

    >>> with_tabs('<a class="md-tabs__link"> Help </a>', "en")
    '<a class="md-tabs__link"> Help </a>'
    """
    with speaking(language):
        return TAB.sub(lambda found: found[1] + say(TABS[found[2]]), html)


def links_to_others(page: str, docs: Path = DOCS) -> str:
    """A line of HTML: the same page in other languages. Empty where there is none."""
    links = [
        f'<a href="{_way(page, other)}" hreflang="{language}" lang="{language}">{name}</a>'
        for language, name in OWN_NAMES.items()
        for other in [translated(page, language)]
        if language != language_of(page) and is_there(other, docs)
    ]
    inner = " ".join(links)
    return f'<p class="mm-languages" data-search-exclude>{inner}</p>\n' if links else ""


def older_notice(page: str, docs: Path = DOCS) -> str:
    """HTML that says, in the page's language, that the English page has changed since; else empty."""
    language, english = language_of(page), bare(page)
    parts = (
        [english, f"problems/{Path(english).name}"] if english.startswith("tour/") else [english]
    )
    if page == english or not any(_is_older(language, part, docs) for part in parts):
        return ""
    with speaking(language):
        link = f'<a href="{_way(page, english)}" hreflang="en">{say("page.older.link")}</a>'
        words = say("page.older", link=link)
    return f'<p class="mm-older" data-search-exclude>{words}</p>\n'


def _is_older(language: str, english: str, docs: Path) -> bool:
    """Whether the translation says that it was made from another text; not if it is not there."""
    path = docs / translated(english, language)
    said = MADE_FROM.search(path.read_text()) if path.is_file() else None
    return said is not None and said[1] != made_from(english, docs)


def _way(page: str, other: str) -> str:
    return "../" * page.count("/") + other.removesuffix(".md") + ".html"


def nav_of(language: str, docs: Path) -> list[str | dict[str, str]]:
    """A language's part of the navigation, as MkDocs reads it: Home, the tour, the glossary, others."""
    tour = [f"tour/{page.page}.md" for page in read_tour()]
    order = ["index.md", "tour/index.md", *tour, "glossary.md"]
    there = {bare(found.relative_to(docs).as_posix()) for found in (docs / language).rglob("*.md")}
    listed = [page for page in order if page in there]
    others = sorted(there.difference(order))
    with speaking(language):
        home = say("search.kind.home")
    return [
        {home: translated(page, language)} if page == "index.md" else translated(page, language)
        for page in [*listed, *others]
    ]


def pages(docs: Path = DOCS) -> list[str]:
    """The pages that are written by hand, in English."""
    found = (path.relative_to(docs) for path in docs.rglob("*.md"))
    return sorted(x.as_posix() for x in found if x.parts[0] not in {"tools", *LANGUAGES})


def to_do(language: str, docs: Path = DOCS) -> dict[str, str]:
    """Page -> "missing", "says not which text it is of" or "of an older text"; nothing for others."""
    found = {}
    for page in pages(docs):
        path = docs / language / page
        if not path.exists():
            found[page] = "missing"
            continue
        said = MADE_FROM.search(path.read_text())
        if said is None:
            found[page] = "says not which text it is of"
        elif said[1] != made_from(page, docs):
            found[page] = "of an older text"
    return found


def main() -> None:
    """Prints what the language that is named still lacks."""
    for page, words in to_do(sys.argv[1]).items():
        print(f"{page}: {words}")
