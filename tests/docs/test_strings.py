"""The words of the widgets: all in one file per language, each used, none in a script."""

import json
import re
from pathlib import Path

import pytest

from tests.docs.conftest import ROOT

SCRIPTS = sorted((ROOT / "docs" / "javascripts").glob("*js"))
USE = re.compile(r"(?:say|sentence)\(((?:[^()]|\([^()]*\))*)")
NAME = re.compile(r'"([a-z]+(?:\.[\w-]+)+|goto|ends|span|needs|feeds)"')
FAMILY = re.compile(r"`([a-z]+(?:\.[\w-]+)*\.)\$\{")
CODE = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
SENTENCE = re.compile(r'"([A-Z][a-z]+(?: [a-z]+)+[^"]*)"|>([A-Z][a-z]+ [a-z]+[^<`]*)<')


@pytest.fixture(scope="module")
def strings() -> dict:
    return json.loads((ROOT / "docs" / "strings" / "en.json").read_text())


def script_text(path: Path) -> str:
    return CODE.sub("", path.read_text())


def test_every_name_has_words(strings):
    for path in SCRIPTS:
        for call in USE.findall(script_text(path)):
            for name in NAME.findall(call):
                assert name in strings, f"{path.name}: {name}"


def test_every_text_is_used(strings):
    """By a script, or by a page that is made with it."""
    tools = sorted((ROOT / "docs" / "tools").rglob("*.py"))
    text = "\n".join([*map(script_text, SCRIPTS), *(path.read_text() for path in tools)])
    names = {*NAME.findall(text), *re.findall(r"\bsay\('([\w.-]+)'", text)}  # within an f-string
    families = tuple(FAMILY.findall(text))
    assert not [name for name in strings if name not in names and not name.startswith(families)]


def test_no_script_has_words_of_its_own():
    for path in SCRIPTS:
        found = [a or b for a, b in SENTENCE.findall(script_text(path))]
        assert not found, f"{path.name}: {found}; put them into docs/strings/en.json"


def test_another_language_lacks_no_name(strings):
    """Each text of docs/strings/en.json is there, with the same places to fill in."""
    from player import strings as tool

    for path in sorted((ROOT / "docs" / "strings").glob("*.json")):
        if path.stem != tool.DEFAULT:
            own = json.loads(path.read_text())
            assert not (missing := sorted(strings.keys() - own.keys())), f"{path.name}: {missing}"
            tool.read_strings(path.stem)


def test_places_to_fill_in(strings, tmp_path: Path):
    """Another language may leave texts out, but fills in what the English one does."""
    from player import strings as tool

    (tmp_path / "en.json").write_text(json.dumps({"a.b": "{n} of {m}", "a.c": "one"}))
    (tmp_path / "zh.json").write_text(json.dumps({"a.b": "{m} 中的 {n}"}))
    assert tool.read_strings("zh", tmp_path) == {"a.b": "{m} 中的 {n}", "a.c": "one"}
    for bad in ({"a.b": "{n}"}, {"a.d": "two"}):
        (tmp_path / "zh.json").write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=r"zh\.json"):
            tool.read_strings("zh", tmp_path)
    for name, text in strings.items():
        forms = [text] if isinstance(text, str) else [*text.values()]
        assert isinstance(text, str) or {"one", "other"} <= text.keys(), name
        assert all(forms), name
