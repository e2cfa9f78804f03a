"""README.md beside this file names every file of tests, and no other."""

import re
from pathlib import Path

from tests.conftest import LEFT_TO_FULL, files_met, patterns_met

TESTS = Path(__file__).parent
REQUIRED = {
    *(f"A{i}" for i in range(1, 13)),
    *("B4", "B5", "B6", "B7", "B8"),
    *(f"I{i}" for i in (1, 2, 3, 4, 5, 6, 7)),
    *(f"{letter}{i}" for letter, last in zip("BCDEFGH", (3, 5, 7, 6, 8, 3, 4), strict=True)
      for i in range(1, last + 1)),
}  # fmt: skip


def rows() -> dict[str, list[str]]:
    """By requirement: its cells, one for each layer."""
    lines = (TESTS / "README.md").read_text().splitlines()
    split = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return {cells[0]: cells[2:] for cells in split[2:]}


def files() -> set[str]:
    """Files of tests, without those of exercises, whose tests are run by other tests."""
    found = (str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py"))
    return {path for path in found if not re.match(r"exercises/\w+/", path)}


def named() -> set[str]:
    return {name for cells in rows().values() for cell in cells for name in cell.split("`")[1::2]}


def test_every_requirement_has_a_row_and_every_row_a_layer():
    assert set(rows()) == REQUIRED | {"own"}
    for requirement, cells in rows().items():
        assert len(cells) == 4, requirement
        assert any(cells), requirement


def test_every_file_of_the_table_exists_and_every_file_is_in_it():
    assert named() - files() == set()
    assert files() - named() == set()


def test_what_is_left_to_make_test_full_exists(request):
    """Of files whose tests this run has collected: by each name there is a test."""
    for file, row in LEFT_TO_FULL.items():
        assert (TESTS / file).is_file() and row["instead"], file
    named = [(file, pattern) for file, row in LEFT_TO_FULL.items() for pattern in row["tests"]]
    gone = [one for one in named if one[0] in files_met and one not in patterns_met]
    assert not gone or any("::" in words for words in request.config.args), gone
