"""The monthly check notes what a run with another torch has shown, and the page shows it."""

import json
import sys
from pathlib import Path

import pytest

from cases import held_against
from tests import torch_check

ROOT = Path(__file__).parents[2]
LOG = """... [100%]
=== short test summary ===
FAILED tests/a/test_b.py::c[d] - AssertionError
== {} in 61.2s (0:01:01) ==

real 1m
"""
ROW = {
    "passed": 10,
    "failed": 0,
    "skipped": 0,
    "seconds": 61,
    "torch": "2.14.1+cu130",
    "Python": "3.11.7",
    "megatron-core": "0.16.1",
    "transformers": "5.0",
    "system": "Linux, 2 processors",
    "missing": [],
    "failures": [],
    "date": "2026-11-26",
    "commit": "abc",
}


@pytest.mark.parametrize(
    "words, passed, failed, skipped",
    [
        ("6447 passed", 6447, 0, 0),
        ("2 failed, 6440 passed, 5 skipped, 1 warning", 6440, 2, 5),
        ("1 failed, 3 passed, 2 errors", 3, 3, 0),
        ("3 errors", 0, 3, 0),
    ],
)
def test_what_a_log_says(words, passed, failed, skipped):
    found = torch_check.counts_in(LOG.format(words))
    assert found.pop("failures") == ["a/test_b.py::c[d]"]
    wanted = {"passed": passed, "failed": failed, "skipped": skipped, "seconds": 61}
    assert found == wanted


def test_the_last_result_of_a_log_counts():
    """A test may print what pytest printed in another process."""
    log = LOG.format("1 passed") + LOG.format("7 passed")
    assert torch_check.counts_in(log)["passed"] == 7


@pytest.mark.parametrize("log", ["", "make: *** Error 1", "Killed", "== 3 pas"])
def test_a_run_that_did_not_end_has_no_result(log, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch_check, "RECORD", tmp_path / "record.json")
    (tmp_path / "log").write_text(log)
    assert torch_check.main(["--record", str(tmp_path / "log"), "--python", sys.executable]) == 1
    assert "nothing is noted" in capsys.readouterr().err
    assert not (tmp_path / "record.json").exists()


@pytest.mark.processes
def test_a_run_is_noted_with_the_versions_it_had(tmp_path, monkeypatch, capsys):
    record = tmp_path / "record.json"
    monkeypatch.setattr(torch_check.note, "__defaults__", (record,))
    (tmp_path / "log").write_text(LOG.format("10 passed"))
    arguments = ["--record", str(tmp_path / "log"), "--python", sys.executable]
    assert torch_check.main(arguments) == 0
    (row,) = json.loads(record.read_text())
    assert row.keys() == ROW.keys() and row["passed"] == 10
    assert row["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert f"Python {row['Python']}" in capsys.readouterr().out


def test_a_newer_run_of_the_same_versions_takes_the_place(tmp_path):
    record = tmp_path / "record.json"
    for change in (
        {},
        {"torch": "2.9.1", "commit": "old"},
        {"torch": "2.13.0+cpu"},
        {"torch": "2.9.1", "commit": "new"},
    ):
        torch_check.note(ROW | change, record)
    kept = [(row["torch"], row["commit"]) for row in json.loads(record.read_text())]
    assert kept == [("2.9.1", "new"), ("2.13.0+cpu", "abc"), ("2.14.1+cu130", "abc")]


def test_any_torch_can_be_installed_in_the_clone():
    project = (ROOT / "pyproject.toml").read_text()
    changed = torch_check.any_torch(project)
    assert '"torch>=2.9"' in changed and changed != project
    with pytest.raises(ValueError, match="has 0 ranges"):
        torch_check.any_torch(changed)


def test_the_page_shows_each_run(tmp_path):
    record = tmp_path / "record.json"
    torch_check.note(ROW, record)
    torch_check.note(ROW | {"torch": "2.15", "failed": 3, "missing": ["torch._dynamo"]}, record)
    shown = held_against.held_runs(record)
    assert "| 2.14.1+cu130 | 3.11.7 | 0.16.1 | 5.0 | 10 passed | 2026-11-26 | `abc` |" in shown
    assert "10 passed, **3 failed**" in shown
    said = held_against.names_not_there(record)
    assert said.endswith("with an exception: `torch._dynamo` not in 2.15.")


def test_each_name_has_one_row_with_all_its_files():
    rows = [
        line for line in held_against.held_internals().splitlines() if "`torch._dynamo`" in line
    ]
    (row,) = rows
    assert "`launcher.py`, `runner.py`, `torchrun.py`, `ahead.py`" in row


def test_the_range_is_what_was_run():
    """The newest torch of the record is within the range, and no newer one is let in unseen."""
    newest = held_against.runs()[-1]["torch"].split("+")[0]
    major, minor = map(int, newest.split(".")[:2])
    assert held_against.torch_range() == f"2.9 or newer, and older than {major}.{minor + 1}"


def test_each_failure_of_the_record_is_explained_and_the_newest_torch_has_none():
    runs = held_against.runs()
    assert not runs[-1]["failed"]
    for run in runs:
        unknown = [one for one in run["failures"] if not held_against.is_known(one, run["torch"])]
        assert unknown == [] and len(run["failures"]) == run["failed"], run["torch"]


def test_each_explanation_is_about_a_failure_of_the_record():
    """Of a version that was run: one that was not has no explanations on the page."""
    for known in held_against.known_failures():
        failures = held_against.failures_with(known["torch"])
        for name in known["tests"] if failures else []:
            assert any(failure.startswith(name) for failure in failures), name


def test_what_an_older_torch_does_not_keep_is_shown_once_it_was_run(tmp_path):
    known = held_against.known_failures()[0]
    record = tmp_path / "record.json"
    torch_check.note(ROW, record)
    assert known["why"] not in held_against.older_torch(record)
    torch_check.note(ROW | {"torch": known["torch"] + "1", "failures": ["x::y"]}, record)
    assert known["why"] in held_against.older_torch(record)
    assert held_against.is_known(known["tests"][0], known["torch"] + "1")
    assert not held_against.is_known(known["tests"][0], "2.15.0")
