"""Which text a page was made from, and which translated pages are of an older one.

Called by: `mkdocs_hook`, which writes each page's digest into its head; tests/docs.

    python docs/tools/translations.py zh       what is missing or older in docs/zh, by page

A page in another language lies below docs/LANGUAGE/ under the same name. Its front matter says which
text it was made from: `made_from: 3f2a9c01d7e4`, the digest of the English file at that time. Words of
widgets are in docs/strings/LANGUAGE.json.
"""

import hashlib
import re
import sys
from pathlib import Path

from package import ROOT

DOCS = ROOT / "docs"
MADE_FROM = re.compile(r"\A---\n.*?^made_from: *(\w+)$.*?^---$", re.MULTILINE | re.DOTALL)
LANGUAGES = ("zh",)
"""Folders of docs/ that hold translations."""


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


if __name__ == "__main__":
    for page, words in to_do(sys.argv[1]).items():
        print(f"{page}: {words}")
