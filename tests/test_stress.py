"""`python -m tests.stress` on a small folder of tests, and the mark that it goes by."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import process_mark, stress
from tests.busy import busy_loops
from tests.process_mark import names_processes
from tests.rank_programs import ROOT

SETTINGS = "[pytest]\nmarkers = processes\n"
GOOD = """
import pytest

@pytest.mark.processes
@pytest.mark.parametrize("x", [1, 2])
def test_good(x):
    with open("count", "a") as file:
        file.write("x")

def test_without_the_mark():
    raise AssertionError
"""
FLAKY = """
import os, pytest

@pytest.mark.processes
def test_flaky():
    with open("flaky", "a+") as file:
        file.write("x")
        file.seek(0)
        assert file.read() != "xx", "words about the failure"
"""
SLOW = """
import pathlib, pytest, time

@pytest.mark.processes
def test_slow():
    if pathlib.Path("begun").exists():
        return
    pathlib.Path("begun").touch()
    time.sleep(600)
"""


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """A folder of tests, as a repository without commits."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each pytest starts sooner
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_good.py").write_text(GOOD)
    return tmp_path


def run(sample: Path, *words: str) -> tuple[int, dict[str, dict]]:
    code = stress.main(["--times", "3", "--busy", "1", "--workers", "2", *words], sample)
    about, *files = [json.loads(line) for line in (sample / stress.LOG).read_text().splitlines()]
    assert about["times"] == 3 and about["busy"] == 1
    return code, {one["file"]: one for one in files}


def test_every_marked_test_is_run_the_times_asked_for_and_not_again(sample, capsys):
    code, files = run(sample)
    assert code == 0
    assert files["tests/test_good.py"]["passed"] == {"test_good[1]": 3, "test_good[2]": 3}
    assert (sample / "count").read_text() == "xxxxxx"
    assert "1 files, 2 tests, 3 rounds, 1 busy loops: 6 passed, 0 failed" in capsys.readouterr().out
    assert run(sample)[0] == 0
    assert "0 of 3 runs of a file are left to do" in capsys.readouterr().out
    assert (sample / "count").read_text() == "xxxxxx"


def test_a_failure_is_named_with_its_output_and_kept(sample, capsys):
    (sample / "tests" / "test_flaky.py").write_text(FLAKY)
    code, files = run(sample, "--workers", "1")  # else rounds of one file may run side by side
    assert code == 1
    flaky = files["tests/test_flaky.py"]
    assert flaky["passed"] == {"test_flaky": 2}
    (failure,) = flaky["failures"]
    assert failure["round"] == 2
    assert "words about the failure" in (sample / failure["output"]).read_text()
    out = capsys.readouterr().out
    assert f"{failure['output']}: tests/test_flaky.py::test_flaky failed in round 2" in out
    assert run(sample, "--workers", "1")[0] == 1, "a failure is not forgotten by a second call"


@pytest.mark.full
def test_files_of_one_run_are_told_apart(sample):
    for number in (1, 2):
        name = sample / "tests" / f"test_good_{number}.py"
        name.write_text(GOOD.replace("test_good", f"test_good_{number}"))
    (sample / "tests" / "test_flaky.py").write_text(FLAKY)
    code, files = run(sample, "--together", "3", "--workers", "1")
    assert code == 1
    flaky = files.pop("tests/test_flaky.py")
    assert flaky["passed"] == {"test_flaky": 2} and flaky["rounds"] == [1, 2, 3]
    assert [one["test"] for one in flaky["failures"]] == ["test_flaky"]
    assert len(files) == 3
    for file, one in files.items():
        name = Path(file).stem
        assert one["passed"] == {f"{name}[1]": 3, f"{name}[2]": 3} and not one["failures"]


def test_a_process_that_dies_is_a_failure(sample):
    text = "import os, pytest\n\n@pytest.mark.processes\ndef test_dies():\n    os._exit(3)\n"
    (sample / "tests" / "test_good.py").write_text(text)
    code, files = run(sample)
    assert code == 1
    failures = files["tests/test_good.py"]["failures"]
    assert [one["test"] for one in failures] == ["(pytest itself, exit code 3)"] * 3


@pytest.mark.full
def test_other_code_begins_a_new_log_unless_told_otherwise(sample, monkeypatch, capsys):
    monkeypatch.setattr(stress, "commit_of", lambda root: "one")
    assert run(sample)[0] == 0
    monkeypatch.setattr(stress, "commit_of", lambda root: "another")
    assert run(sample, "--continue")[0] == 0
    assert (sample / "count").read_text() == "x" * 6
    about = json.loads((sample / stress.LOG).read_text().splitlines()[0])
    assert about["commit"] == "one"
    assert [later["commit"] for later in about["went_on"]] == ["another"]
    assert "commit one, then another: 1 files" in capsys.readouterr().out
    assert run(sample)[0] == 0
    assert (sample / "count").read_text() == "x" * 6
    assert json.loads((sample / stress.LOG).read_text().splitlines()[0]) == about
    monkeypatch.setattr(stress, "commit_of", lambda root: "a third")
    assert run(sample)[0] == 0
    assert (sample / "count").read_text() == "x" * 12
    assert json.loads((sample / stress.LOG).read_text().splitlines()[0])["commit"] == "a third"


@pytest.mark.full
def test_after_an_interruption_it_goes_on(sample):
    (sample / "tests" / "test_slow.py").write_text(SLOW)
    code = (
        "import signal, sys\nfrom pathlib import Path\nfrom tests import stress\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "words = ['--times', '3', '--busy', '1', '--workers', '1', '--together', '1']\n"
        f"sys.exit(stress.main(words, Path({str(sample)!r})))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=sample)
    deadline = time.monotonic() + 200
    while not (sample / "begun").exists():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 130
    assert (sample / "count").read_text() == "xx", "the first round of the other file"
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=sample, timeout=200)
    assert done.returncode == 0
    assert (sample / "count").read_text() == "xxxxxx"


def test_the_commit_counts_changes_but_not_the_log(tmp_path):
    def git(*words: str) -> None:
        name = ("-c", "user.name=x", "-c", "user.email=x@x")
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)

    assert stress.commit_of(tmp_path).startswith("no commit")
    (tmp_path / "tests").mkdir()
    (tmp_path / "a.py").write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    clean = stress.commit_of(tmp_path)
    assert len(clean) == 12
    (tmp_path / stress.LOG).write_text("{}")
    assert stress.commit_of(tmp_path) == clean
    (tmp_path / "a.py").write_text("2")
    changed = stress.commit_of(tmp_path)
    (tmp_path / "b.py").write_text("3")
    assert len({clean, changed, stress.commit_of(tmp_path)}) == 3


@pytest.mark.processes
def test_busy_loops_end_with_who_started_them():
    code = (
        "import os, signal\nfrom tests.busy import busy_loops\n"
        "with busy_loops(2) as loops:\n"
        "    print(*[loop.pid for loop in loops], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    pids = done.stdout.split()
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with busy_loops(1) as (loop,):
        assert loop.poll() is None
    assert loop.poll() is not None


# -- The mark --


def starts_one() -> None:
    subprocess.run(["true"], check=True)


def starts_one_through_another() -> None:
    starts_one()


class Starter:
    def start(self) -> None:
        starts_one()


def starts_one_by_a_method() -> None:
    Starter().start()


def starts_one_in_a_lambda() -> None:
    (lambda: os.fork())()


def starts_none() -> None:
    json.dumps(os.getcwd())


def test_the_mark_is_set_by_what_the_code_names():
    for function in (
        starts_one,
        starts_one_through_another,
        starts_one_by_a_method,
        starts_one_in_a_lambda,
    ):
        assert names_processes(function), function.__name__
    assert not names_processes(starts_none)


UNMARKED = """
import importlib, pytest

@pytest.fixture(scope="module")
def hidden_start():
    importlib.import_module("sub" + "process").run(["true"], check=True)

def test_in_a_fixture(hidden_start):
    pass

def test_in_its_body():
    importlib.import_module("o" + "s").system("true")

def test_that_only_follows():
    pass

@pytest.mark.processes
def test_with_the_mark():
    importlib.import_module("o" + "s").system("true")
"""


def test_a_test_that_starts_a_process_unmarked_fails(tmp_path):
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "test_it.py").write_text(UNMARKED)
    command = [sys.executable, "-m", "pytest", "-p", process_mark.__name__, "-rA", "test_it.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ERROR test_it.py::test_in_a_fixture" in done.stdout
    assert "FAILED test_it.py::test_in_its_body" in done.stdout
    for name in ("test_that_only_follows", "test_with_the_mark"):
        assert f"PASSED test_it.py::{name}" in done.stdout
    assert "starts a process (os.system) in its call and has no mark `processes`" in done.stdout
