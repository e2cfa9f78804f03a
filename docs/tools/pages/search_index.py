"""What docs/javascripts/search.js searches: every section of the site, with the kind of its page.

Called by: `mkdocs_hook`, when the site is there. Calls: `tour`, for the chain. Reads the index that
MkDocs has written and the site's pages; writes `search/pages.js`, which is loaded when search is first
opened, from a server or from a folder, and leaves an index without sections for the theme's own script.

Bodies are cut where another page says the same: of the reference, which repeats the docstrings of the
source pages, and of Rosetta, names are kept.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from html import unescape
from pathlib import Path

from source.page_words import DEFAULT, HAN, language_of, translated
from source.places import DOCS
from tour.tour import read_chain

SYNONYMS = DOCS / "search_synonyms.toml"
TAG = re.compile(r"<[^>]*>")
QUOTE = re.compile(r'<figure class="mm-quote">.*?</figure>', re.DOTALL)
NAME = re.compile(r"\b(?:[A-Za-z]\w*_\w+|[A-Z]\w*[A-Z]\w*)\b")
DOTTED = re.compile(r"[\w.]+")
METHOD = re.compile(r"\.[A-Z]\w*\.\w+$")
BEHIND_AN_EXERCISE = re.compile(r"\.exercises\.catalog\.\w+\.(?!stub\.)\w+\.html")
"""What students are asked to write, and what checks it: not found before they look for it."""
SAME = 0
"""In place of an anchor that is the title."""
MAX_TEXT = {"source": 50, "reference": 0, "rosetta": 400, "notebooks": 650, "exercises": 800}
MAX_TEXT |= {"walkthroughs": 1500, "benchmarks": 900}
"""Characters of a section's text that are kept; of other kinds, all."""
MAX_TRANSLATED, MAX_OF_TERM = 100, 24
"""Of a page in another language, and of an entry of its glossary: the English page is found too."""
WHOLE = {"names-in-older-texts"}
"""Sections that are kept whole: no other page has these names."""
LESSONS = ("tour", "symptoms")
"""Of these pages, the names in quoted code are found too."""


def write_search(site: Path) -> None:
    """Writes the index of a built site."""
    path = site / "search" / "search_index.json"
    index = json.loads(path.read_text())
    data = {"pages": list(pages(index["docs"], site)), **synonyms()}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    (site / "search" / "pages.js").write_text(f"(globalThis.MM ||= {{}}).searchData = {text};\n")
    empty = json.dumps(index | {"docs": []}, separators=(",", ":"))
    path.write_text(empty)
    path.with_suffix(".js").write_text(f"var __index = {empty};\n")


def synonyms() -> dict[str, list | dict]:
    """ "same", "means" and "symptoms" of docs/search_synonyms.toml."""
    data = tomllib.loads(SYNONYMS.read_text())
    return {name: data[name] for name in ("same", "means", "symptoms")}


def explained() -> dict[str, list[str]]:
    """Page -> what it explains: "explains" of docs/search_synonyms.toml, and the links of the chain."""
    found = {
        page: [*words] for page, words in tomllib.loads(SYNONYMS.read_text())["explains"].items()
    }
    for call in read_chain().values():
        name = call.name.rpartition(" ")[2] if call.name.startswith("your ") else call.name
        found.setdefault(f"tour/{call.page}", []).append(name.rpartition(".")[2])
    return {f"{page}.html": list(dict.fromkeys(words)) for page, words in found.items()}


def pages(docs: Iterable[dict], site: Path) -> Iterator[dict]:
    """One page each: its url, title, kind, where it belongs, names in its code, sections."""
    by_page: dict[str, list[dict]] = {}
    explains = explained()
    for doc in docs:
        if not BEHIND_AN_EXERCISE.search(doc["location"]):
            by_page.setdefault(doc["location"].partition("#")[0], []).append(doc)
    for url, sections in by_page.items():
        kind, language = kind_of(url), language_of(url)
        title, where = title_of(kind, plain(sections[0]["title"]))
        most = MAX_TEXT.get(kind)
        if language != DEFAULT:
            most = MAX_OF_TERM if kind == "glossary" else MAX_TRANSLATED
        found = list(_sections(kind, title, sections, most))
        page = {"url": url, "title": title, "kind": kind, "sections": found}
        if where:
            page["where"] = where
        if language != DEFAULT:  # the English page has what it explains, and the names in its code
            yield page | {"language": language}
            continue
        if url in explains:
            page["explains"] = explains[url]
        if kind in LESSONS and (names := quoted_names((site / url).read_text())):
            page["names"] = names
        yield page


def kind_of(url: str) -> str:
    """
    >>> kind_of("tour/p2p.html"), kind_of("zh/glossary.html"), kind_of("index.html")
    ('tour', 'glossary', 'home')
    """
    first = translated(url, DEFAULT).partition("/")[0].removesuffix(".html")
    return "home" if first in ("index", "") else first


def title_of(kind: str, title: str) -> tuple[str, str]:
    """A module's page has the module's bare name; the package it is in is told apart.

    >>> title_of("source", "minimegatron.core.parallel_state")
    ('parallel_state', 'core')
    """
    if kind not in ("source", "reference") or not title.startswith("minimegatron"):
        return title, ""
    where, _, name = title.removeprefix("minimegatron.").rpartition(".")
    return name, where


def _sections(
    kind: str, page_title: str, sections: list[dict], most: int | None
) -> Iterator[list[str | int]]:
    """[anchor, title, text] of each; above the first heading, the first two are empty."""
    for section in sections:
        anchor = section["location"].partition("#")[2]
        text, title = plain(section["text"]), bare(kind, plain(section["title"]))
        if kind == "rosetta":
            text = " ".join(dict.fromkeys(NAME.findall(text)))
        if title == page_title:
            title = ""
        if not anchor:
            title = ""
        elif not title and not text:
            continue
        if (title.startswith("__") and not text) or (kind == "reference" and METHOD.search(anchor)):
            continue
        kept = text if anchor in WHOLE else shortened(text, most)
        yield [SAME if anchor == title else anchor, title, kept]


def bare(kind: str, title: str) -> str:
    """The name of a symbol without the module and the signature.

    >>> bare("reference", "core.x.send(a, b=None)"), bare("source", "Steady state: one forward")
    ('send', 'Steady state: one forward')
    """
    if kind not in ("source", "reference"):
        return title
    name = title.partition("(")[0].strip() if kind == "reference" else title
    return name.rpartition(".")[2] if DOTTED.fullmatch(name) else name


def plain(html: str) -> str:
    """Text without tags, in one line.

    >>> plain("<p>A <code>b</code>\\n &lt; c</p>")
    'A b < c'
    """
    return " ".join(unescape(TAG.sub("", html.replace("</p>", " ").replace("</li>", " "))).split())


def shortened(text: str, most: int | None) -> str:
    """At most so many characters, to the end of a word; None for all.

    >>> shortened("one two three", 9), shortened("一二三四五", 3)
    ('one two', '一二三')
    """
    if most is None or len(text) <= most:
        return text
    # Chinese is written without spaces.
    return text[:most] if HAN.search(text) else text[:most].rpartition(" ")[0]


def quoted_names(html: str) -> str:
    """The names in a page's excerpts of code that are written with an underscore or in capitals."""
    names = (name for quote in QUOTE.findall(html) for name in NAME.findall(plain(quote)))
    return " ".join(sorted(set(names)))
