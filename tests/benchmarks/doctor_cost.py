"""What it costs to be watched by the hang doctor: one training step with a record kept, and without.

Run: python -m tests.benchmarks.doctor_cost [--rounds 60]. Calls: the step of `tracing_cost`.

As there, the two take turns in the same two processes, and the median of the rounds' ratios counts.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

import minimegatron
from minimegatron.core import tracing
from minimegatron.core.tracing import Call
from minimegatron.doctor.folders import make_folder, remove_folder
from minimegatron.doctor.observer import RecordingObserver
from minimegatron.doctor.shared_record import RECORD_BYTES, RecordWriter, read_record
from tests.benchmarks import results
from tests.benchmarks.tracing_cost import (
    BATCH,
    COLUMNS,
    NUM_STAGES,
    QUICK,
    STEPS_PER_TURN,
    build_step,
    claim_bounds,
    ratio_rows,
    take_rounds,
    timed,
)

BOUND = 1.03


@contextmanager
def watched(observer: RecordingObserver) -> Iterator[None]:
    """Keeps the record during one step."""
    tracing.add_observer(observer)
    try:
        yield
    finally:
        tracing.remove_observer(observer)


def measure(
    rounds: int, batch: int, num_steps: int
) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """(wall, processor) seconds of every round by way; calls per step."""
    torch.manual_seed(dist.get_rank())
    step = build_step(batch)
    folder = make_folder("minimegatron-benchmark-")
    path = folder / "record"
    observer = RecordingObserver(RecordWriter(path, dist.get_rank(), dist.get_world_size()))
    ways = {"off": nullcontext, "on": lambda: watched(observer)}
    for surround in ways.values():
        timed(step, surround, num_steps)
    before = read_record(path).num_events
    times = take_rounds(step, ways, rounds, num_steps)
    num_calls = (read_record(path).num_events - before) / 2 / (num_steps + 1) / rounds
    remove_folder(folder)
    return times, num_calls


def cost_of_a_call(num_calls: int = 2000, repetitions: int = 10) -> float:
    """Microseconds of processor time to note the beginning and end of one call, at best."""
    with tempfile.TemporaryDirectory() as folder:
        observer = RecordingObserver(RecordWriter(Path(folder) / "record", 0, 2))
        call = Call("forward-compute", "a.b", "", 1, {"microbatch": 3, "chunk": 0})
        best = float("inf")
        for _ in range(repetitions):
            began = time.process_time()
            for _ in range(num_calls):
                observer.start(call)
                observer.stop(call)
            best = min(best, (time.process_time() - began) / num_calls)
    return best * 1e6


def main(argv: list[str] | None = None) -> int:
    """Prints the ratios; exit code 1 if the bound on processor time is broken."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=60, metavar="N")
    report = results.Report("doctor_cost", __doc__, arguments, argv)
    sizes = QUICK if report.options.quick else (report.options.rounds, BATCH, STEPS_PER_TURN)
    options = {"backend": "gloo", "device": "cpu"}
    times, num_calls = minimegatron.launch(measure, NUM_STAGES, *sizes, **options)[0]
    note = (
        f"{cost_of_a_call():.1f} us per call at best, {num_calls:.0f} calls per step on rank 0, "
        f"{RECORD_BYTES} bytes per rank."
    )
    rows = ratio_rows("watched", BOUND, times["on"], times["off"])
    report.table("A step, as a ratio to one that is not watched", COLUMNS, rows, note)
    claim_bounds(report, rows)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
