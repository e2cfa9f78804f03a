"""Finished HTML that Markdown need not read: a comment stands for it until the page is whole.

Called by: all that puts HTML on pages (put), `build_docs` (save), `mkdocs_hook` (fill). Calls
nothing.

Thousands of coloured spans a page would take Markdown and the search index minutes to walk through.
"""

import json
import re
from pathlib import Path

from source.places import read_json, write

MARK = re.compile(r"<!--mm:(\d+)-->")


class Stash:
    """The pieces of one page."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def put(self, html: str) -> str:
        """What to write in the Markdown in place of the HTML."""
        self.pieces.append(html)
        return f"<!--mm:{len(self.pieces) - 1}-->"

    def save(self, path: Path) -> None:
        write(path, json.dumps(self.pieces))


def fill(html: str, path: Path) -> str:
    """The page with its pieces."""
    if not path.exists():
        return html
    pieces = read_json(path)
    return MARK.sub(lambda m: pieces[int(m[1])], html)
