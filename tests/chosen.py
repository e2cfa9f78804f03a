"""Runs the tests that a change needs: `make test FILE=...`, `make test CHANGED=1`; two minutes at most.

    python -m tests.chosen --file minimegatron/core/pipeline_parallel/schedules.py
    python -m tests.chosen --changed HEAD

Which tests enter a file is in entered.json (`entering` records it). First come tests whose own file
has changed, then those of the file that is named after a changed one (or, if no test enters that one,
of files that name it), then known mistakes in it, then tests that enter the fewest other files: they
say most about it. When the time is full, the rest is left to `make test`. The command prints how many
tests enter the files, and how many of those it runs.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkout import git
from tests.entering import RECORD, ROOT, anywhere, function_of, read

SECONDS = 300.0
"""Of all chosen tests together, as recorded: slowly, with notes of each call. A minute or so now."""
SECONDS_OF_A_FAULT = 1.5
"""To make one known mistake and run its probe."""
SECONDS_OF_THE_SITE = 270.0
"""To build it, once for all tests that look at it, in the same measure."""
PLACE = "MINIMEGATRON_CHOSEN"
"""The variable with the file that says what is chosen."""
ALWAYS = ("tests/test_house.py", "tests/test_table.py")


@dataclass(frozen=True)
class Chosen:
    """Which tests, of how many in all."""

    names: list[str]
    """Of tests, with or without their case; of files, for what of them is not recorded."""
    num_entering: int
    seconds: float


def changed_files(since: str) -> list[str]:
    """Files that differ from a commit, with those that git does not know yet.

    From `HEAD`, where nothing differs: what the last commit changed.
    """
    differ = git("diff", "--name-only", since).splitlines()
    new = git("ls-files", "--others", "--exclude-standard").splitlines()
    if since == "HEAD" and not differ + new:
        differ = git("diff", "--name-only", "HEAD~1").splitlines()
    return sorted({*differ, *new})


def is_named_after(test_file: str, path: str) -> bool:
    """Whether `tests/core/test_steps.py` is there for `minimegatron/core/steps.py`.

    >>> is_named_after("tests/planner/test_plan.py", "minimegatron/planner/plan.py")
    True
    """
    return Path(test_file).stem == f"test_{Path(path).stem}"


def choose(files: list[str], record: dict, seconds: float = SECONDS) -> Chosen:
    """The tests to run for changed files, most telling first, as many as the time allows."""
    number = {path: place for place, path in enumerate(record["files"])}
    wanted = {number[path] for path in files if path in number}
    tests_changed = {path for path in files if re.search(r"tests/.*test_\w+\.py$", path)}
    known = {name.partition("::")[0] for name in record["tests"]}
    telling = {path for path in known if any(is_named_after(path, other) for other in files)}
    telling |= naming([path for path in files if path not in number], known)
    of_site = {path for path in known if needs_the_site(path)}
    is_of_site = any(path.startswith("docs/") or path == "mkdocs.yml" for path in files)
    faults = set(faults_in(files))
    found = [(True, True, 0, SECONDS_OF_A_FAULT, name) for name in faults]
    for name, (takes, entered) in record["tests"].items():
        file = name.partition("::")[0]
        if name in faults:
            continue
        if file in tests_changed | telling or not wanted.isdisjoint(entered):
            found.append(
                (file not in tests_changed, file not in telling, len(entered), takes, name)
            )
    names, total = [], SECONDS_OF_THE_SITE if is_of_site else 0.0
    for is_of_another, *_, takes, name in sorted(found):
        is_left = name.partition("::")[0] in of_site and not is_of_site and is_of_another
        if total + takes <= seconds and not is_left:
            names.append(name)
            total += takes
    # Of a changed file of tests, those that are not recorded yet: the file, as a name.
    changed = [path for path in tests_changed if (ROOT / path).is_file()]
    return Chosen([*changed, *names], len(found), total)


def needs_the_site(test_file: str) -> bool:
    """Whether its tests look at the built site: they are chosen for a change in docs/ alone."""
    if not test_file.startswith("tests/docs/") or not (ROOT / test_file).is_file():
        return False
    text = (ROOT / test_file).read_text()
    return re.search(r"\bdef \w+\([^)]*\b(site|address)\b", text) is not None


def naming(files: list[str], tests: Iterable[str]) -> set[str]:
    """Files of tests with the name of one of `files`, which no test enters: tables, new files."""
    names = {Path(path).stem if path.endswith(".py") else Path(path).name for path in files}
    if not (names := names - {"__init__"}):
        return set()
    word = re.compile(rf"\b({'|'.join(map(re.escape, sorted(names)))})\b")
    there = (path for path in tests if (ROOT / path).is_file())
    return {path for path in there if word.search((ROOT / path).read_text())}


def faults_in(files: list[str]) -> Iterator[str]:
    """The mutation tests whose mistake is made in one of the files."""
    from minimegatron.exercises.labs.faults import FAULTS

    for fault in FAULTS:
        if f"minimegatron/{fault.file}" in files:
            yield f"tests/test_mutations.py::test_the_fault_is_noticed[{fault.name}]"


def main(words: list[str] | None = None) -> int:
    """The command; what it does not know goes to pytest."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--file", action="append", default=[], help="a file that has changed")
    parser.add_argument("--changed", metavar="COMMIT", help="files that differ from this commit")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--list", action="store_true", help="print the tests, run none")
    args, rest = parser.parse_known_args(words)
    given = [os.path.relpath(ROOT / path, ROOT) for path in args.file]  # ./a.py is a.py
    files = [*given, *(changed_files(args.changed) if args.changed else [])]
    missing = [path for path in args.file if not (ROOT / path).is_file()]
    if missing or not files:
        print(f"no such file: {', '.join(missing)}" if missing else "nothing has changed")
        return 2
    record = read(RECORD.read_text())
    chosen = choose(files, record, args.seconds)
    num_run = sum("::" in name for name in chosen.names)
    print(
        f"Changed files: {len(files)}. Tests that enter them: {chosen.num_entering}. "
        f"This runs {num_run} of those tests, and the rules of the house; `make test` runs all."
    )
    names = [*chosen.names, *ALWAYS]
    if args.list:
        print("\n".join(names))
        return 0
    there = sorted({path for name in names if (ROOT / (path := name.partition("::")[0])).is_file()})
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"names": names, "recorded": [*record["tests"]]}, file)
        file.flush()
        os.environ[PLACE] = file.name
        os.environ.pop("MAKEFLAGS", None)  # a test that runs `make` would hand it FILE and CHANGED
        return int(pytest.main(["-v", "-p", "tests.chosen", *rest, *there]))


# -- In each worker of pytest. Names of tests that are gone are passed over --


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """This module is a plugin: `-p tests.chosen`. Leaves what has been chosen."""
    if place := os.environ.get(PLACE):
        said = json.loads(Path(place).read_text())
        chosen, recorded = set(said["names"]), set(said["recorded"])
        kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            kept[is_chosen(anywhere(item.nodeid), chosen, recorded)].append(item)
        config.hook.pytest_deselected(items=kept[False])
        items[:] = kept[True]


def is_chosen(test: str, chosen: set[str], recorded: set[str]) -> bool:
    """Whether a test is meant by its name, or by its file if nothing is recorded of it.

    >>> is_chosen("tests/test_a.py::test_b[1]", {"tests/test_a.py::test_b"}, set())
    True
    """
    names = {test, function_of(test)}
    is_new = names.isdisjoint(recorded) or test.partition("::")[0] in ALWAYS
    return not names.isdisjoint(chosen) or is_new and test.partition("::")[0] in chosen


if __name__ == "__main__":
    sys.exit(main())
