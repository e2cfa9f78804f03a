"""`make test-full`: every test, also those with the mark `full`; and one line about it in a log.

    python -m tests.full [--log FILE] [arguments of pytest]

The line says which commit, when, on what, how many tests of each file passed, which failed, and how
long it took. The exit code is pytest's.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import pytest

from tests.checkout import git

LOG = Path(__file__).with_name("full_log.jsonl")


class Counts:
    """A plugin of pytest that counts how tests ended. With workers, what they report comes here."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has a report for its set-up, itself and its end; the worst counts."""
        worse = {"passed": 0, "skipped": 1, "failed": 2}
        before = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = max(before, report.outcome, key=worse.__getitem__)

    def summary(self) -> dict:
        """How many ended how; the failed by name; the passed by file."""
        of_files: Counter[str] = Counter()
        for test, outcome in self.outcomes.items():
            of_files[test.split("::")[0]] += outcome == "passed"
        counts = Counter(self.outcomes.values())
        return {
            **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
            "failures": sorted(test for test, how in self.outcomes.items() if how == "failed"),
            "files": dict(sorted(of_files.items())),
        }


def main(words: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--log", type=Path, default=LOG)
    args, rest = parser.parse_known_args(words)
    system = f"{platform.system()}, Python {platform.python_version()}"
    line = {
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} processors, {system}",
        "torch": metadata.version("torch"),
    }
    counts, began = Counts(), time.monotonic()
    code = pytest.main(["-v", "-m", "full or not full", *rest], plugins=[counts])
    line |= {"exit_code": int(code), "seconds": round(time.monotonic() - began, 1)}
    line |= counts.summary()
    with open(args.log, "a") as log:
        log.write(json.dumps(line) + "\n")
    print(f"{line['passed']} passed, {line['failed']} failed; noted in {args.log}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
