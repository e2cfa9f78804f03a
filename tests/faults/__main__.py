"""All faults in one command: kills, damaged files, failing disks, random input; then a table.

    python -m tests.faults                        about ten minutes on two cores
    python -m tests.faults --runs 6 --launcher ranks    a few minutes

Runs: `tests.faults.kill`, and through pytest every test below `tests/faults` and the ones of corrupt
`.idx` files and overflow. The exit code is 1 if anything of it fails. The same seed gives the same
victims; at which instruction a rank dies is the machine's choice.
"""

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.kill import JOBS, LAYOUTS, Outcome, kill_runs, undisturbed

ROWS = {
    # what goes wrong -> tests of it, by a part of their names
    "damaged, truncated or missing checkpoint files": r"test_damage|test_a_flip|damage_to_what",
    "corrupt or missing checkpoint marker": r"_marker\b|test_a_folder_to_begin_in",
    "checkpoint of another model or schedule": r"test_other_",
    "pickle planted in a checkpoint": r"test_nothing_is_executed",
    "disk full and other failing saves; leftovers": r"test_saves_that_fail|test_leftovers",
    "corrupt .idx and .bin": r"test_corrupt_files|test_any_damage_to_the_index|test_missing_files",
    "dataset writer killed, or its disk full": r"test_killed_while|test_a_full_disk|test_nothing_app",
    "overflow on one rank": r"test_overflow",
    "random arguments": r"test_fuzz_arguments",
    "random layouts, plans, recordings": r"test_fuzz_inputs",
    "killed ranks, a few": r"test_kill\b",
}
FILES = ("faults", "core/datasets/test_indexed_dataset.py", "training/test_overflow.py")


class Results:
    """A pytest plugin that keeps what became of every test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has a report for its set-up, itself and its end; the worst counts."""
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def rows(self) -> list[tuple[str, str, float]]:
        """(what went wrong, how it ended, seconds) of every row."""
        table = []
        for what, pattern in ROWS.items():
            names = [name for name in self.outcomes if re.search(pattern, name)]
            counts = Counter(self.outcomes[name] for name in names)
            words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            table.append((what, words or "no test ran", sum(self.seconds[name] for name in names)))
        return table


def kill_rows(outcomes: list[Outcome], seconds: float) -> list[tuple[str, str, float]]:
    """One row per kind of moment."""
    table = []
    for moment in sorted({outcome.moment for outcome in outcomes}):
        of_moment = [outcome for outcome in outcomes if outcome.moment == moment]
        equal = sum(not outcome.problems for outcome in of_moment)
        share = seconds * len(of_moment) / len(outcomes)
        words = f"{equal} of {len(of_moment)} bit-identical"
        table.append((f"rank killed {moment}", words, share))
    return table


def main(words: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--launcher", choices=JOBS, default="torchrun")
    parser.add_argument("--ranks", type=int, choices=LAYOUTS, default=2)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args(words)
    results = Results()
    tests = [str(Path(__file__).parents[1] / name) for name in FILES]
    code = int(pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[results]))
    table = results.rows()
    folder = Path(tempfile.mkdtemp(prefix="minimegatron-kill-"))
    begin = time.monotonic()
    expected = undisturbed(folder, args.ranks)
    outcomes = kill_runs(args.runs, args.launcher, args.ranks, args.seed, folder, expected)
    table += kill_rows(outcomes, time.monotonic() - begin)
    width = max(len(what) for what, _, _ in table)
    print()
    for what, words_of_it, seconds in table:
        print(f"{what:{width}}  {words_of_it:28}{seconds:8.1f} s")
    if any(outcome.problems for outcome in outcomes):
        print(f"what the killed runs left is in {folder}")
        return 1
    shutil.rmtree(folder)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
