"""Starts plain torchrun runs beside busy loops and counts how they end.

    python -m tests.stress_exits --runs 200 --busy 4 --at-once 3

A run is a student's file (right, wrong, on the wrong number of ranks, one that Python cannot read)
or a short `pretrain_gpt`. It must end with the exit code that belongs to it and say nothing of a
signal. The exit code is 1 if a run ended otherwise; its output is then shown.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from minimegatron.exercises.exercise import find
from tests.busy import busy_loops

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 300
PRETRAIN = (
    "--hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3 --eval-iters 1 "
    "--num-layers 2 --pipeline-model-parallel-size 2"
)


@dataclass(frozen=True)
class Kind:
    """A sort of run: which exercise's file, with what in it, and how it must end."""

    name: str
    exercise: str = ""
    text: str = "solution.py"
    num_ranks: int = 2
    code: int = 0


KINDS = (
    Kind("right: ex07", "ex07"),
    Kind("pretrain_gpt"),
    Kind("right: ex09", "ex09"),
    Kind("right: ex01", "ex01", num_ranks=1),
    Kind("wrong: ex07", "ex07", "stub.py", code=1),
    Kind("right: ex07 again", "ex07"),
    Kind("pretrain_gpt again"),
    Kind("right: ex06", "ex06", num_ranks=4),
    Kind("wrong number of ranks", "ex07", num_ranks=1, code=1),
    Kind("unreadable", "ex07", "hints.md", code=1),
)


def run(kind: Kind, folder: Path, deadline: float) -> tuple[Kind, int, str] | None:
    """One run of torchrun: its exit code and all it printed. None if it is too late for it."""
    if time.monotonic() > deadline:
        return None
    if kind.exercise:
        exercise = find(kind.exercise)
        file = folder / f"{exercise.name}.py"
        file.write_text((exercise.folder / kind.text).read_text())
        if kind.text == "hints.md":
            tail = "\n".join((exercise.folder / "stub.py").read_text().splitlines()[-4:])
            file.write_text(f"{tail}\n")
        what = [str(file)]
    else:
        what = ["-m", "minimegatron.pretrain_gpt", *PRETRAIN.split()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(kind.num_ranks), *what]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    return kind, done.returncode, done.stdout


def is_well(kind: Kind, code: int, output: str) -> bool:
    """Whether a run ended as its kind must."""
    return code == kind.code and "SIGABRT" not in output and "terminate called" not in output


def main(words: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--busy", type=int, default=4, help="how many busy loops run beside")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--kinds", help="only kinds whose name contains this")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no run after these")
    args = parser.parse_args(words)
    kinds = [kind for kind in KINDS if not args.kinds or args.kinds in kind.name]
    ends: Counter = Counter()
    began = time.monotonic()
    with (
        busy_loops(args.busy),
        tempfile.TemporaryDirectory(prefix="minimegatron-exits-") as top,
        ThreadPoolExecutor(args.at_once) as pool,
    ):
        jobs = []
        for number, kind in enumerate(itertools.islice(itertools.cycle(kinds), args.runs)):
            folder = Path(top) / str(number)
            folder.mkdir()
            jobs.append(pool.submit(run, kind, folder, began + 60 * args.minutes))
        for job in jobs:
            if (result := job.result()) is None:
                continue
            kind, code, output = result
            well = is_well(kind, code, output)
            ends[kind.name, code, "well" if well else "NOT WELL"] += 1
            if not well:
                print(f"--- {kind.name} ended with {code} ---\n{output}", flush=True)
    for (name, code, word), count in sorted(ends.items()):
        print(f"{count:4}  {name}: exit code {code}, {word}")
    print(f"{ends.total()} runs, {args.busy} busy loops, {time.monotonic() - began:.0f} s")
    return int(any(word != "well" for _, _, word in ends))


if __name__ == "__main__":
    sys.exit(main())
