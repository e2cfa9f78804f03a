"""The same paced pipelines in this tree and in earlier ones: what all changes since then cost together.

Run: python -m tests.benchmarks.releases [--rounds 6] [--commits 2b8f1f3d,5a4aa15a]
Calls: `tests.benchmarks.paced` of each tree, in processes of its own.

Each change costs little, and nobody adds it up; here it is added up. The trees take turns, each round
in another order, so that a busy machine is busy for all. What a tree measures is its own excess over
the ideal (`paced`). Earlier trees come out of this repository's history; where it lacks one, as in a
shallow clone, that tree is left out.
"""

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks import results

ROOT = Path(__file__).parents[2]
EARLIER = {"2b8f1f3d": "round 1", "5a4aa15a": "with a wire of its own"}
"""Commits that are compared with, and what they are."""
NOW, AGAIN = "this tree", "this tree, once more"


class Kind(NamedTuple):
    """One of `paced`'s cases, and the way of ours that is timed."""

    label: str
    way: str


KINDS = (
    Kind("p=4 v=1 M=8 10/20 ms 0.5 KiB", "ours"),
    Kind("p=4 v=2 M=8 10/20 ms 0.5 KiB", "ours-overlap"),
    Kind("p=4 v=2 M=8 20/40 ms 4 MiB", "ours-overlap"),
)
LEAST_NOISE = 0.002
COLUMNS = {
    "case": ("case", ""),
    "tree": ("tree", ""),
    "excess": ("excess", ".1%"),
    "lowest": ("lowest", ".1%"),
    "highest": ("highest", ".1%"),
    "more": ("this tree's is more by", ".1%"),
}
NOTE = (
    "Medians over the rounds. The gap between this tree and itself is the noise; by so much the excess "
    "of this tree may be above an earlier one's and mean nothing."
)


def tree_of(commit: str, folder: Path) -> Path | None:
    """The files of a commit, below `folder`; None where the history lacks it."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    if packed.returncode:
        return None
    tree = folder / commit
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(tree, filter="data")
    return tree


def measured(tree: Path, kind: Kind, repetitions: int) -> float:
    """The excess over the ideal, by the tree's own benchmark. Raises RuntimeError if it cannot run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "paced.json"
        command = [sys.executable, "-m", "tests.benchmarks.paced", "--json", str(path)]
        command += ["--implementations", kind.way, "--only", kind.label]
        command += ["--repetitions", str(repetitions)]
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(f"{tree.name}: {ran.stderr[-2000:]}")
        (row,) = json.loads(path.read_text())["tables"][0]["rows"]
    return row["excess"]


def take_turns(
    trees: dict[str, Path], kinds: Sequence[Kind], num_rounds: int, repetitions: int
) -> dict[tuple[Kind, str], list[float]]:
    """By case and tree, the excess of each round."""
    found: dict[tuple[Kind, str], list[float]] = {
        (kind, name): [] for kind in kinds for name in trees
    }
    for number in range(num_rounds):
        names = list(trees)
        turn = number % len(names)
        for kind in kinds:
            for name in names[turn:] + names[:turn]:
                found[kind, name].append(measured(trees[name], kind, repetitions))
            words = ", ".join(f"{name} {found[kind, name][-1]:.1%}" for name in names)
            print(f"  {kind.label:<30} {words}", flush=True)
    return found


def rows_of(found: dict[tuple[Kind, str], list[float]], kind: Kind) -> list[dict]:
    """One row per tree."""
    now = statistics.median(found[kind, NOW])
    rows = []
    for (of, name), excesses in found.items():
        if of == kind:
            excess = statistics.median(excesses)
            rows.append(
                {
                    "case": kind.label,
                    "tree": name,
                    "excess": excess,
                    "lowest": min(excesses),
                    "highest": max(excesses),
                    "more": None if name in (NOW, AGAIN) else now - excess,
                }
            )
    return rows


def noise_of(rows: list[dict]) -> float:
    """The gap between this tree and itself."""
    excess = {row["tree"]: row["excess"] for row in rows}
    return max(LEAST_NOISE, abs(excess[NOW] - excess[AGAIN]))


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=6)
    arguments.add_argument("--repetitions", type=int, default=5, help="steps of each run")
    arguments.add_argument("--commits", default=",".join(EARLIER), help="separated by commas")
    report = results.Report("releases", __doc__, arguments, argv)
    options = report.options
    commits = [] if options.quick else options.commits.split(",")
    rounds, repetitions = (1, 1) if options.quick else (options.rounds, options.repetitions)
    kinds = KINDS[:1] if options.quick else KINDS
    with tempfile.TemporaryDirectory() as folder:
        trees = {NOW: ROOT, AGAIN: ROOT}
        for commit in commits:
            if (tree := tree_of(commit, Path(folder))) is None:
                print(f"the history here has no commit {commit}")
            else:
                trees[f"{commit}, {EARLIER[commit]}" if commit in EARLIER else commit] = tree
        found = take_turns(trees, kinds, rounds, repetitions)
    rows_by_kind = [rows_of(found, kind) for kind in kinds]
    report.table("Excess over the ideal", COLUMNS, [r for rows in rows_by_kind for r in rows], NOTE)
    for rows in rows_by_kind:
        noise = noise_of(rows)
        for row in rows:
            if row["more"] is not None:
                report.claim(
                    f"{row['case']}: not above {row['tree']}, beyond the noise",
                    f"{row['more']:+.1%}, noise {noise:.1%}",
                    row["more"] <= noise,
                )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
