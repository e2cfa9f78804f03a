"""Does a grade depend on the hidden seed? `python -m tests.exercises.ten_seeds LOG [ex04 ...]`.

Every known mistake is checked with the public seed and with ten hidden ones. It must fail with all of
them: a file that passes with one seed and fails with another gets another grade for another seed. The
log gets a line for each mistake; those that are in it already are not checked again. This takes hours.
"""

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from minimegatron.exercises.check import engine
from minimegatron.exercises.check.engine import check_file
from minimegatron.exercises.exercise import exercises, find
from minimegatron.exercises.room import on_ranks, verdict
from tests.exercises.wrong_solutions import WrongSolution, wrong_solutions

PUBLIC = 0
HIDDEN = (1, 2, 3, 4, 5, 41, 12345, 20261121, 7 * 10**8, 2**31 - 2)
PATIENCE = 5.0
FAILURES = (verdict.WRONG, verdict.HANG, verdict.RAISED, verdict.DIED)
"""How a mistake may end. A check that takes too long, or fails itself, is no grade."""


def kinds_of(wrong: WrongSolution, folder: Path, seeds: Iterable[int]) -> list[str]:
    """How the check ends with each seed: "wrong", "hang", "passed", ..."""
    path = wrong.write(folder)
    on_ranks.HANG_SECONDS = 1.0 if wrong.hangs else 2.5
    return [check_file(wrong.exercise, path, seed, patience=PATIENCE).kind for seed in seeds]


def main(argv: Sequence[str] | None = None) -> int:
    """Checks those that the log lacks; ends with 1 if the log has one that did not always fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("exercises", nargs="*", help="ex04 ...; all without")
    parser.add_argument("--seeds", type=int, default=len(HIDDEN), help="how many hidden ones")
    args = parser.parse_args(argv)
    engine.AGAIN_SECONDS = 0.0
    args.log.touch()
    done = {line.partition(":")[0] for line in args.log.read_text().splitlines()}
    for exercise in [find(name) for name in args.exercises] or exercises():
        for wrong in wrong_solutions(exercise):
            name = f"{exercise.number} {wrong.name}"
            if name not in done:
                line = f"{name}: {_line(wrong, HIDDEN[: args.seeds])}"
                print(line, flush=True)
                with args.log.open("a") as log:
                    log.write(line + "\n")
    lines = args.log.read_text().splitlines()
    odd = [line for line in lines if not line.endswith("one grade, 0 points")]
    print(f"{len(lines)} mistakes, {len(odd)} of them not always 0 points", *odd, sep="\n")
    return int(bool(odd))


def _line(wrong: WrongSolution, hidden: Sequence[int]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        public, *others = kinds_of(wrong, Path(folder), (PUBLIC, *hidden))
    have_failed = all(kind in FAILURES for kind in (public, *others))
    grade = "one grade, 0 points" if have_failed else "NOT one grade"
    return f"public {public}; hidden, {len(hidden)} seeds: {' '.join(others)}; {grade}"


if __name__ == "__main__":
    raise SystemExit(main())
