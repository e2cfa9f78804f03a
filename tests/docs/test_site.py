"""The built site: it builds without a warning, every link leads somewhere, and nothing is remote."""

import os
import re
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.docs.conftest import MAX_BUILD_PARSES

RESOURCES = {
    ("link", "href"),
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("object", "data"),
}
"""What a browser fetches by itself; a link that a reader may click is another matter."""

NAMELESS_LINKS = {"canonical", "alternate", "prev", "next", "edit"}


TAG = re.compile(
    r"""<([a-z][a-z0-9-]*)((?:\s+[^\s=>"/]+(?:\s*=\s*(?:"[^"]*"|'[^']*'|[^\s>"']+))?)*)\s*/?>""",
    re.I,
)
ATTRIBUTE = re.compile(r"""([^\s=>"/]+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"']+)))?""")
WANTED = re.compile(r"\b(?:id|href|src|data)=")


class Page:
    """Ids, links and fetched files of a page. By patterns: a parser takes longer."""

    def __init__(self, text: str):
        self.ids: list[str] = []
        self.links: list[str] = []
        self.resources: list[str] = []
        for tag in TAG.finditer(text):
            if WANTED.search(tag[2]):
                self._read(tag[1].lower(), tag[2])
        self.anchors = set(self.ids)

    def _read(self, tag: str, attributes: str) -> None:
        named = {
            found[1]: unescape(found[2] or found[3] or found[4] or "")
            for found in ATTRIBUTE.finditer(attributes)
        }
        if "id" in named:
            self.ids.append(named["id"])
        if tag == "a" and named.get("href"):
            self.links.append(named["href"])
        for name, value in named.items():
            is_fetched = (tag, name) in RESOURCES and named.get("rel") not in NAMELESS_LINKS
            if is_fetched and value:
                self.resources.append(value)


@cache
def read(path: Path) -> Page:
    return Page(path.read_text())


def test_the_build_takes_its_time_and_no_more(site):
    if os.environ.get("MINIMEGATRON_SITE"):
        pytest.skip("the site is what `make docs` left; nobody has timed it")
    assert float((site.parent / "parses").read_text()) < MAX_BUILD_PARSES


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def is_remote(url: str) -> bool:
    return bool(urlsplit(url).netloc)


def test_every_page_is_there(site):
    found = {path.relative_to(site).as_posix() for path in pages(site)}
    assert {"index.html", "glossary.html", "formulas.html", "rosetta.html"} <= found
    # With its index. Pages on other models and along the sequence are asides: paths may leave them out.
    assert len([name for name in found if name.startswith("tour/")]) == 37
    assert len([name for name in found if name.startswith("source/")]) > 100


def test_no_macro_is_left(site):
    signs = ("{{", "<!--mm:")
    for path in pages(site):
        text = path.read_text()
        if any(sign in text for sign in signs):  # else there is nothing to take out first
            text = re.sub(r"<(pre|code|script)\b.*?</\1>", "", text, flags=re.DOTALL)
            assert not any(sign in text for sign in signs), path


@cache
def file_at(folder: Path, url: str) -> Path | None:
    """What a page in the folder links to so; None if it is not there."""
    target = (folder / unquote(url)).resolve()
    target = target / "index.html" if target.is_dir() else target
    return target if target.exists() else None


def test_links_and_anchors_lead_somewhere(site):
    broken = []
    for path in pages(site):
        if path.name == "404.html":
            continue
        # Most lines of a page of code have a link of their own, and names many of the same.
        for link in dict.fromkeys(read(path).links):
            url, fragment = urldefrag(link)
            if is_remote(link) or link.startswith(("mailto:", "data:")):
                continue
            target = file_at(path.parent, url) if url else path
            if target is None:
                broken.append(f"{path.relative_to(site)}: {link}")
            elif (
                fragment
                and target.suffix == ".html"
                and unquote(fragment) not in read(target).anchors
            ):
                broken.append(f"{path.relative_to(site)}: {link} (no such anchor)")
    assert not broken, f"{len(broken)}: " + "\n".join(broken[:20])


def test_ids_are_unique(site):
    for path in pages(site):
        ids = [i for i in read(path).ids if not i.startswith("__")]
        twice = {i for i in ids if ids.count(i) > 1} if len(ids) != len(set(ids)) else set()
        assert not twice, f"{path.relative_to(site)}: {sorted(twice)[:5]}"


def test_nothing_is_fetched_from_elsewhere(site):
    for path in pages(site):
        remote = [url for url in read(path).resources if is_remote(url)]
        assert not remote, f"{path.relative_to(site)}: {remote}"
    for path in site.rglob("*.css"):
        remote = re.findall(r"(?:url\(|@import\s+)[\"']?(https?:)?//[^)\"']*", path.read_text())
        assert not remote, path


def test_files_that_pages_name_exist(site):
    for path in pages(site):
        if path.name == "404.html":
            continue
        for url in read(path).resources:
            name = unquote(urlsplit(url).path)
            assert is_remote(url) or (path.parent / name).exists(), f"{path}: {url}"


def test_formulas_are_drawn_without_scripts(site):
    assert "<mfrac>" in (site / "formulas.html").read_text()
