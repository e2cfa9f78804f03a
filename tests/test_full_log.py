"""The log of `make test-full`: what it notes, and that its last line is about this repository."""

import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from tests.full import LOG, git

ROOT = Path(__file__).parents[1]
EXAMPLE = """
import pytest

def test_good(): pass
@pytest.mark.full
def test_large(): pass
def test_wrong(): assert False
def test_later(): pytest.skip("not here")
@pytest.fixture
def broken(): raise ValueError
def test_unprepared(broken): pass
"""


def check_line(line: dict) -> None:
    assert re.fullmatch(r"[0-9a-f]{40}|", line["commit"])
    assert datetime.fromisoformat(line["began"]).tzinfo is not None
    assert isinstance(line["changed"], bool) and line["seconds"] > 0
    assert line["machine"] and line["torch"]
    assert len(line["failures"]) == line["failed"]
    assert sum(line["files"].values()) == line["passed"]
    assert line["skipped"] >= 0 and (line["exit_code"] == 0) == (line["failed"] == 0)


def test_a_run_is_noted(tmp_path):
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers = full: more\naddopts = -m 'not full'\n"
    )
    log = tmp_path / "log.jsonl"
    for number in range(2):
        command = [sys.executable, "-m", "tests.full", "--log", str(log), str(tmp_path)]
        command += ["--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 1, done.stdout + done.stderr
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert len(lines) == number + 1
    check_line(lines[-1])
    assert lines[-1]["commit"] == git("rev-parse", "HEAD")
    assert (lines[-1]["passed"], lines[-1]["skipped"], lines[-1]["failed"]) == (2, 1, 2)
    failed = [test.split("::")[1] for test in lines[-1]["failures"]]
    assert failed == ["test_unprepared", "test_wrong"]


def test_the_last_line_is_about_this_repository():
    """The last that is committed: a run that failed adds a line, and the next must not fail for it."""
    text = git("show", f"HEAD:tests/{LOG.name}") or LOG.read_text()
    line = json.loads(text.splitlines()[-1])
    check_line(line)
    assert line["failed"] == 0, "a failed run of make test-full is committed"
    assert line["commit"], "it was made without git: the version of the code is unknown"
    assert len(line["files"]) > 100, "it ran a part of the tests"
    has_history = git("rev-parse", "--show-toplevel") == str(ROOT.resolve())
    if not has_history or git("rev-parse", "--is-shallow-repository") == "true":
        print("no history here to look for the commit in; the line is well-formed")
        return
    assert git("cat-file", "-t", line["commit"]) == "commit", f"unknown here: {line['commit']}"
    assert git("merge-base", line["commit"], "HEAD") == line["commit"]
