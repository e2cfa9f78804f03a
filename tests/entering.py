"""Records which files of this repository each test enters or reads, into entered.json, for `chosen`.

    make test-map
    python -m tests.entering tests/core/test_collectives.py    # the others stay as they are recorded

Every Python process of such a run notes the file of each function that it calls and each file that it
opens, with the test for which it works: ranks, programs, exercise rooms too, since a `.pth` file starts
the notes in each interpreter of `.venv`. To import a file is not to enter it. What a test's fixtures
enter counts for all tests of its file: the first one alone has set them up.
"""

import argparse
import json
import os
import sys
import sysconfig
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "entered.json"
FOLDER = "MINIMEGATRON_ENTERED"
"""The variable with the folder of the notes; without it nothing is noted."""
TIMES, NOTES = "times", "notes"
SECONDS_APART = 10.0
"""Cases of one function stand apart in the record if they take more than this together."""


class Notes:
    """What this process has noted, with the test that runs in its worker of pytest."""

    def __init__(self, folder: str):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(os.path.join(folder, NOTES), flags, 0o666)
        self._folder = folder
        self._own = f"{ROOT}/"
        not_ours = (".venv", ".git", ".hypothesis", "build", "site")
        self._not_ours = tuple(f"{ROOT}/{name}/" for name in not_ours)
        self._codes: set[int] = set()
        self._paths: set[str] = set()
        self._test = ""

    def enter(self, frame: FrameType, event: str, argument: Any) -> None:
        """For `sys.settrace`: a function begins. None: its lines are not traced."""
        code = frame.f_code
        if id(code) not in self._codes and code.co_name != "<module>":
            self.note(code.co_filename)
            self._codes.add(id(code))

    def hear(self, event: str, arguments: tuple) -> None:
        """For `sys.addaudithook`."""
        if event == "open" and isinstance(arguments[0], str):
            self.note(os.path.abspath(arguments[0]))

    def note(self, path: str) -> None:
        """Once for each test."""
        is_ours = path.startswith(self._own) and not path.startswith(self._not_ours)
        if not is_ours or "/__pycache__/" in path:
            return
        test = self._current()
        if test != self._test:
            self._codes.clear()
            self._paths.clear()
            self._test = test
        if test and path not in self._paths:
            self._paths.add(path)
            os.write(self._file, f"{test}\t{path.removeprefix(self._own)}\n".encode())

    def _current(self) -> str:
        """From a file: in the environment, the server that forks ranks would keep its first test's."""
        try:
            with open(place_of_test(self._folder)) as file:
                return file.read()
        except OSError:
            return ""

    def forget(self) -> None:
        """The next test enters its files itself; the one before may have traced something else."""
        self._codes.clear()
        sys.settrace(self.enter)


def place_of_test(folder: str) -> str:
    """The file that says what runs in the worker of pytest that started this process, or is it."""
    return os.path.join(folder, f"runs-in-{os.environ.get('PYTEST_XDIST_WORKER', 'one')}")


def start() -> Callable[[], None] | None:
    """Begins the notes of this process, if a run asks for them; returns what forgets them."""
    folder = os.environ.get(FOLDER)
    if not folder or not os.path.isdir(folder):
        return None
    notes = Notes(folder)
    sys.addaudithook(notes.hear)
    sys.settrace(notes.enter)
    threading.settrace(notes.enter)
    return notes.forget


# -- In each worker of pytest --


class Plugin:
    """Says which test runs, and how long each took.

    pytest is imported by the command alone: every process that it starts imports this file.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._forget = start() or (lambda: None)

    def pytest_runtest_setup(self, item: Any) -> None:
        self._begins(item, "setup")

    def pytest_runtest_call(self, item: Any) -> None:
        self._begins(item, "call")

    def _begins(self, item: Any, phase: str) -> None:
        with open(place_of_test(self._folder), "w") as file:
            file.write(f"{item.nodeid} ({phase})")
        self._forget()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if os.environ.get("PYTEST_XDIST_WORKER"):
            with open(os.path.join(self._folder, TIMES), "a") as file:
                file.write(f"{report.nodeid}\t{report.duration:.3f}\n")


def pytest_configure(config: Any) -> None:
    """This module is a plugin: `-p tests.entering`."""
    if folder := os.environ.get(FOLDER):
        config.pluginmanager.register(Plugin(folder))


# -- The record --


def without_phase(test: str) -> str:
    """As pytest names the test, without what it adds in the environment.

    >>> without_phase("tests/test_a.py::test_b[x (call)] (setup)")
    'tests/test_a.py::test_b[x (call)]'
    """
    return test.rpartition(" (")[0]


def anywhere(test: str) -> str:
    """The same in every clone: a case may be a path below this one's folder."""
    return test.replace(str(ROOT), "ROOT")


def function_of(test: str) -> str:
    """The test without its case.

    >>> function_of("tests/test_a.py::test_b[x[0]]")
    'tests/test_a.py::test_b'
    """
    return test.partition("[")[0]


def made_of(notes: Path, times: Path) -> dict[str, Any]:
    """The record: each test's seconds and files, the files as numbers in a list.

    Cases of one function stand apart if they take more than `SECONDS_APART` together.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in times.read_text().splitlines():
        test, _, took = line.rpartition("\t")
        seconds[anywhere(test)] += float(took)
    together: defaultdict[str, float] = defaultdict(float)
    for test, took in seconds.items():
        together[function_of(test)] += took

    def named(test: str) -> str:
        function = function_of(test)
        return test if together[function] > SECONDS_APART else function

    entered: defaultdict[str, set[str]] = defaultdict(set)
    fixtures: defaultdict[str, set[str]] = defaultdict(set)
    for line in notes.read_text(errors="replace").splitlines():
        at, _, path = anywhere(line).rpartition("\t")
        if at and (ROOT / path).is_file():
            test = named(without_phase(at))
            entered[test].add(path)
            if at.endswith("(setup)"):
                fixtures[test.partition("::")[0]].add(path)
    took_of: defaultdict[str, float] = defaultdict(float)
    for test, took in seconds.items():
        took_of[named(test)] += took
    return numbered(
        {
            name: (took_of[name], entered[name] | fixtures[name.partition("::")[0]])
            for name in took_of
        }
    )


def numbered(tests: dict[str, tuple[float, set[str]]]) -> dict[str, Any]:
    """The record of tests, each with its seconds and its files."""
    files = sorted({path for _, paths in tests.values() for path in paths})
    number = {path: place for place, path in enumerate(files)}
    rows = {
        name: [round(took, 2), sorted(number[path] for path in paths)]
        for name, (took, paths) in sorted(tests.items())
    }
    return {"files": files, "tests": rows}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old record, with each file of tests that is in the new one as it is there."""
    again = {name.partition("::")[0] for name in new["tests"]}
    tests = {}
    for record in (old, new):
        for name, (took, paths) in record["tests"].items():
            if record is new or name.partition("::")[0] not in again:
                tests[name] = (took, {record["files"][number] for number in paths})
    return numbered(tests)


def written(record: dict[str, Any]) -> str:
    """As JSON, a line per file and per test; of a file of tests first what all its tests enter."""
    by_file: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, row in record["tests"].items():
        file, _, test = name.partition("::")
        by_file[file][test] = row
    lines = []
    for file, rows in by_file.items():
        common = set.intersection(*(set(paths) for _, paths in rows.values()))
        lines.append(f"{json.dumps(file)}: {json.dumps(sorted(common), separators=(',', ':'))}")
        for test, (took, paths) in rows.items():
            row = [took, sorted(set(paths) - common)]
            name = json.dumps(f"{file}::{test}")
            lines.append(f"{name}: {json.dumps(row, separators=(',', ':'))}")
    files = ",\n".join(json.dumps(path) for path in record["files"])
    return f'{{"files": [\n{files}\n],\n"tests": {{\n' + ",\n".join(lines) + "\n}}\n"


def read(text: str) -> dict[str, Any]:
    """What `written` wrote, with all of each test."""
    said = json.loads(text)
    rows = {name: row for name, row in said["tests"].items() if "::" in name}
    common = said["tests"]
    return {
        "files": said["files"],
        "tests": {
            name: [took, sorted({*paths, *common[name.partition("::")[0]]})]
            for name, (took, paths) in rows.items()
        },
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    _, rest = parser.parse_known_args()
    import pytest

    start_file = Path(sysconfig.get_path("purelib")) / "minimegatron_entering.pth"
    with tempfile.TemporaryDirectory(prefix="entered-") as folder:
        os.environ[FOLDER] = folder
        call = f"__import__('runpy').run_path({str(Path(__file__))!r})['start']()"
        start_file.write_text(f"import os; os.environ.get({FOLDER!r}) and {call}\n")
        try:
            code = pytest.main(["-p", "tests.entering", *rest])
        finally:
            start_file.unlink()
        record = made_of(Path(folder, NOTES), Path(folder, TIMES))
    if any(word.startswith("tests/") for word in rest) and RECORD.exists():
        record = merged(read(RECORD.read_text()), record)
    RECORD.write_text(written(record))
    print(f"{len(record['tests'])} tests and {len(record['files'])} files, in {RECORD}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
