"""A small page at each old address, which leads to the new one and keeps what stands after the #.

Called by: `build_docs`, when all other pages are written; `every_page`. Calls: `places`. Pages that
have moved are in docs/redirects.toml; modules whose names have changed, in `minimegatron.moved`.
"""

import os
import tomllib
from html import escape
from pathlib import Path

from minimegatron.moved import MOVED
from source.places import DOCS, write

REDIRECTS = DOCS / "redirects.toml"

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="robots" content="noindex">
<link rel="canonical" href="{canonical}">
<script>
const to = new URL("{target}", location);
to.search = location.search;
if (location.hash) to.hash = location.hash;
location.replace(to);
</script>
<noscript><meta http-equiv="refresh" content="0; url={target}"></noscript></head>
<body><p>This page has moved: <a href="{target}">{name}</a></p></body></html>
"""


def read_redirects(path: Path = REDIRECTS) -> dict[str, str]:
    """Old address -> new one, both below the site's root, of pages and of modules."""
    pages = tomllib.loads(path.read_text()) if path.exists() else {}
    return pages | {
        f"source/minimegatron.{old}.html": f"source/minimegatron.{new}.html"
        for old, new in MOVED.items()
    }


def write_redirects(out: Path, redirects: dict[str, str], site_url: str | None = None) -> None:
    """Writes them below `out`, once all pages are there, as .html or as the .md that becomes it.

    Raises ValueError for an old address at which there is a page, and for a new one without a page.
    """
    site_url = os.environ.get("SITE_URL", "") if site_url is None else site_url
    for old, new in redirects.items():
        page = new.partition("#")[0]
        if exists(out, old):
            raise ValueError(f"redirects: {old} is moved to {new}, but there is a page at {old}")
        if not exists(out, page):
            raise ValueError(f"redirects: {old} is moved to {new}, but there is no such page")
        write(out / old, redirect_page(old, new, site_url))


def redirect_page(old: str, new: str, site_url: str = "") -> str:
    """What stands at the old address."""
    page, _, fragment = new.partition("#")
    target = "../" * old.count("/") + page
    if "/" in old and page.startswith(folder := old.rpartition("/")[0] + "/"):
        target = page.removeprefix(folder)
    if fragment:
        target += f"#{fragment}"
    canonical = f"{site_url.rstrip('/')}/{page}" if site_url else target
    return PAGE.format(
        target=escape(target), canonical=escape(canonical), name=escape(page.rpartition("/")[2])
    )


def exists(out: Path, page: str) -> bool:
    """Whether the site has such a page."""
    path = out / page
    return path.exists() or path.with_suffix(".md").exists()
