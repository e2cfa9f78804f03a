"""Pages in several languages: which text a page was made from, and which are of an older one.

Called by: `mkdocs_hook`, which writes each page's digest into its head, its language, and where it
is in others; tests/docs.

    python docs/tools/tell.py translations zh       what is missing or older in docs/zh, by page

A page in another language lies below docs/LANGUAGE/ under the same name. Its front matter says which
text it was made from: `made_from: 3f2a9c01d7e4`, the digest of the English file at that time. Words of
widgets are in docs/strings/LANGUAGE.json.
"""

import hashlib
import re
import sys
from pathlib import Path

from source.places import ROOT

DOCS = ROOT / "docs"
MADE_FROM = re.compile(r"\A---\n.*?^made_from: *(\w+)$.*?^---$", re.MULTILINE | re.DOTALL)
LANGUAGES = ("zh",)
"""Folders of docs/ that hold translations."""
OWN_NAMES = {"en": "English", "zh": "中文"}


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


def language_of(page: str) -> str:
    """
    >>> language_of("glossary.md"), language_of("zh/glossary.md")
    ('en', 'zh')
    """
    folder = page.partition("/")[0]
    return folder if folder in LANGUAGES else "en"


def links_to_others(page: str, docs: Path = DOCS) -> str:
    """A line of HTML: the same page in other languages. Empty where there is none."""
    own = language_of(page)
    bare = page.removeprefix(f"{own}/")
    links = [
        f'<a href="{_way(page, other)}" hreflang="{language}" lang="{language}">{name}</a>'
        for language, name in OWN_NAMES.items()
        for other in [bare if language == "en" else f"{language}/{bare}"]
        if language != own and (docs / other).is_file()
    ]
    return f'<p class="mm-languages">{" ".join(links)}</p>\n' if links else ""


def _way(page: str, other: str) -> str:
    return "../" * page.count("/") + other.removesuffix(".md") + ".html"


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
