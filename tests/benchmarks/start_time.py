"""How long it takes to import the package, and to come to the end of a first training step.

Run: python -m tests.benchmarks.start_time. Calls: fresh interpreters, and `first_step` in them.

Imports are timed inside the interpreter; "without torch" means that torch cannot be imported there. A
first step is timed from the start of the process that a reader types, on two ranks: by
`minimegatron.launch`, which forks ranks from a process that has imported torch, by
`torch.multiprocessing.spawn`, and by torchrun. All of one table take turns.
"""

import os
import statistics
import subprocess
import sys
import time

from tests.benchmarks import results
from tests.benchmarks.first_step import NUM_RANKS, by_launch

LARGEST_SECONDS = 0.2
WITHOUT_TORCH = "import minimegatron, torch not installed"

_NO_TORCH = "import sys; sys.modules['torch'] = None"
IMPORTS = {
    WITHOUT_TORCH: (_NO_TORCH, "import minimegatron"),
    "import minimegatron.planner.plan, torch not installed": (
        _NO_TORCH,
        "import minimegatron.planner.plan, minimegatron.planner.simulator",
    ),
    "import torch": ("", "import torch"),
    "import minimegatron.pretrain_gpt, after torch": (
        "import torch",
        "import minimegatron.pretrain_gpt",
    ),
    "import megatron.core's GPT and schedules, after torch": (
        "import torch, warnings; warnings.simplefilter('ignore')",
        "import megatron.core.models.gpt.gpt_model, megatron.core.pipeline_parallel.schedules",
    ),
}

_MODULE = "tests.benchmarks.first_step"
_TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
STARTS = {
    "minimegatron.launch": ["-m", _MODULE, "launch"],
    "torch.multiprocessing.spawn": ["-m", _MODULE, "spawn"],
    "torchrun": ["-m", *_TORCHRUN, "-m", _MODULE],
}
AGAIN = "minimegatron.launch, again in the same process"


def import_seconds(before: str, statement: str) -> float | None:
    """In a fresh interpreter; None where it cannot be imported."""
    code = (
        f"{before}\nimport time\nbegun = time.perf_counter()\n{statement}\n"
        "print(time.perf_counter() - begun)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def start_seconds(arguments: list[str]) -> dict[str, float]:
    """ "end": seconds to the end of the first step; "again": of a second one, if there was one."""
    begun = time.time()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr}")
    words = dict(
        line.split() for line in done.stdout.splitlines() if line.startswith(("end", "ag"))
    )
    found = {"end": float(words["end"]) - begun}
    if "again" in words:
        found["again"] = float(words["again"])
    return found


def time_imports(repetitions: int) -> list[dict]:
    """A row per statement."""
    found: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(repetitions):
        for name, (before, statement) in IMPORTS.items():
            seconds = import_seconds(before, statement)
            if seconds is not None:
                found[name].append(seconds)
    return [_row(name, seconds) for name, seconds in found.items() if seconds]


def time_starts(repetitions: int) -> list[dict]:
    """A row per way of starting."""
    found: dict[str, list[float]] = {name: [] for name in [*STARTS, AGAIN]}
    for _ in range(repetitions):
        for name, arguments in STARTS.items():
            seconds = start_seconds(arguments)
            found[name].append(seconds["end"])
            if "again" in seconds:
                found[AGAIN].append(seconds["again"])
    return [_row(name, seconds) for name, seconds in found.items()]


def _row(name: str, seconds: list[float]) -> dict:
    return {"what": name, "seconds": statistics.median(seconds), "repetitions": len(seconds)}


COLUMNS = {"what": ("what", ""), "seconds": ("median s", ".3f")}


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--repetitions", type=int, default=5)
    report = results.Report("start_time", __doc__, arguments, argv)
    repetitions = 1 if report.options.quick else report.options.repetitions
    if report.options.quick:
        rows = [_row(WITHOUT_TORCH, [import_seconds(*IMPORTS[WITHOUT_TORCH])])]
        begun = time.time()
        starts = [_row(AGAIN, [by_launch() - begun])]
    else:
        rows, starts = time_imports(repetitions), time_starts(repetitions)
    report.table("Imports", COLUMNS, rows)
    report.table("To the end of the first step, two ranks", COLUMNS, starts)
    seconds = rows[0]["seconds"]
    text = f"import minimegatron takes less than {LARGEST_SECONDS:g} s without torch"
    report.claim(text, f"{seconds:.3f} s", seconds < LARGEST_SECONDS)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
