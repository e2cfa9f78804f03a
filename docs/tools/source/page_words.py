"""The words that tools write into pages and around them, in the language of the page being made.

Called by: `macros`, which says whose page it is; `tour_frame` and others, for each word of theirs.
Calls: `places`. The words stand beside those of the widgets: docs/strings/LANGUAGE.json, names that
begin with "page.". A language may leave some out: English stands in for them.
"""

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from source.places import DOCS, read_json

STRINGS = DOCS / "strings"
DEFAULT = "en"
LANGUAGES = ("zh",)
"""Folders of docs/ that hold translations."""
PLACE = re.compile(r"\{(\w+)\}")
HAN = re.compile("[\u3400-\u9fff]")
"""A Chinese sign."""

_language = ContextVar("language", default=DEFAULT)


def language_of(page: str) -> str:
    """
    >>> language_of("glossary.md"), language_of("zh/glossary.md")
    ('en', 'zh')
    """
    folder = page.partition("/")[0]
    return folder if folder in LANGUAGES else DEFAULT


def bare(page: str) -> str:
    """The page's place among those of its language.

    >>> bare("tour/p2p.md"), bare("zh/tour/p2p.md")
    ('tour/p2p.md', 'tour/p2p.md')
    """
    return page.removeprefix(f"{language_of(page)}/")


def translated(page: str, language: str) -> str:
    """The same page in that language, whether or not it is there.

    >>> translated("zh/tour/p2p.md", "en"), translated("tour/p2p.md", "zh")
    ('tour/p2p.md', 'zh/tour/p2p.md')
    """
    return bare(page) if language == DEFAULT else f"{language}/{bare(page)}"


def is_there(page: str, docs: Path = DOCS) -> bool:
    """Whether somebody has written it."""
    return (docs / page).is_file()


@contextmanager
def speaking(language: str) -> Iterator[None]:
    """Inside the `with` block `say` speaks this language."""
    before = _language.set(language)
    try:
        yield
    finally:
        _language.reset(before)


def spoken() -> str:
    """The language of the page that is being made."""
    return _language.get()


def say(name: str, /, **values: object) -> str:
    """The words of this name, filled in. Of plural forms, the one for the value called `n`.

    >>> say("page.minutes", n=1), say("page.minutes", n=2)
    ('1 minute', '2 minutes')
    """
    text = _texts(_language.get())[name]
    if not isinstance(text, str):
        text = text["one" if values["n"] == 1 and "one" in text else "other"]
    return PLACE.sub(lambda place: str(values[place[1]]), text)


def own_anchor(name: str) -> str:
    """Of a heading in another language: that of the English one, which links name. "" in English."""
    return "" if spoken() == DEFAULT else f"#{name} "


@cache
def _texts(language: str) -> dict[str, str | dict[str, str]]:
    return read_json(STRINGS / f"{DEFAULT}.json") | own_texts(language)


def own_texts(language: str, folder: Path = STRINGS) -> dict[str, str | dict[str, str]]:
    """What the language's file has; {} if it has none."""
    path = folder / f"{language}.json"
    return read_json(path) if path.exists() else {}


@cache
def terms(language: str) -> dict[str, str]:
    """Entry of the glossary -> the one word for it in this language; {} for English."""
    path = STRINGS / f"{language}_terms.toml"
    return tomllib.loads(path.read_text()) if path.exists() else {}
