"""Each section of the two walk-throughs has a row, and each row leads to what is there."""

import importlib
import re
from pathlib import Path

import pytest

macros_module = importlib.import_module("macros")

PAGE = Path(__file__).parents[2] / "docs/walkthroughs.md"
FROM_A_LAUNCH_SCRIPT = [
    *("1.1", "1.2", "1.2.1", "1.2.2", "1.2.3", "1.2.3.1", "2", "3.1", "3.2", "3.3"),
    *("4.1", "4.2.1", "4.2.2", "4.2.3", "4.2.3.1", "4.2.3.2", "4.3"),
    *("5.1", "5.2", "5.2.1", "5.2.2", "5.2.3", "5.2.4", "5.2.5", "6.1", "6.2", "6.3"),
]
THROUGH_A_SCHEDULE = [
    *("1", "2", "3.1", "3.2", "3.3", "4.1", "4.2", "4.3", "5.1", "5.2", "6.1", "6.2"),
    *("Why 1:", "Why 2:", "Why 3:", "Why 4:", "Before 1:"),
]


def rows(part: str) -> list[list[str]]:
    lines = re.findall(r"^\| (?!section|---)(.*) \|$", part, re.M)
    return [re.split(r" \| (?![^{]*\}\})", line) for line in lines]


@pytest.fixture(scope="module")
def parts() -> list[str]:
    _, *parts = PAGE.read_text().split("\n## ")
    return parts


def test_every_section_has_a_row(parts):
    for part, sections in zip(parts, (FROM_A_LAUNCH_SCRIPT, THROUGH_A_SCHEDULE), strict=True):
        found = [re.match(r"(?:Why |Before )?[\d.]+:?", row[0])[0] for row in rows(part)]
        assert found == sections


def test_every_row_leads_to_a_symbol_and_says_what_has_changed(parts, package):
    macros = macros_module.Macros(package, "walkthroughs.md", set())
    for section, here, changed in (row for part in parts for row in rows(part)):
        links = re.findall(r"\{\{ link ([\w.]+)", here)
        assert links and all(package.find(name).symbol for name in links), section
        assert changed.endswith("."), section
    assert "source/minimegatron.pretrain_bert" in macros.expand(PAGE.read_text())
    assert macros.faults == []
