"""Makespan of pipelines whose forward and backward are sleeps, against the ideal.

Run: python -m tests.benchmarks.paced [--implementations ours,megatron,torch,minimal]
Calls: `measure.benchmark_main`.

Stages that sleep leave the cores free, as stages on their own devices would, so that eight ranks on
two cores show what a schedule and its communication cost, and nothing else. What little a stage
computes happens within the padded time; by how much a stage alone is late (a sleep ends late,
autograd takes its time) is measured before, and taken off. So a stage alone has no excess, and what
is left is the schedule's and its messages'. The ideal is (M v + p - 1)(tF + tB), tF and tB being
the times of one chunk.
"""

import sys

from tests.benchmarks.measure import benchmark_main
from tests.benchmarks.stages import Case

# label: (forward ms, backward ms, seq_length, hidden_size)
_PACES = {
    "40/80 ms 0.5 KiB": (40, 80, 2, 64),
    "10/20 ms 0.5 KiB": (10, 20, 2, 64),
    "20/40 ms 4 MiB": (20, 40, 1024, 1024),
}
# (p, v, M)
_PIPELINES = ((2, 1, 8), (4, 1, 8), (4, 2, 8), (8, 1, 32), (8, 2, 32))
_SLOW = "40/80 ms 0.5 KiB"  # of these, eight stages would take minutes

CASES = [
    Case(
        f"p={p} v={v} M={m} {pace}",
        p,
        v,
        m,
        seq_length,
        hidden_size,
        forward_seconds=forward * 1e-3,
        backward_seconds=backward * 1e-3,
    )
    for p, v, m in _PIPELINES
    for pace, (forward, backward, seq_length, hidden_size) in _PACES.items()
    if not (pace == _SLOW and p == 8)
]


def repetitions(case: Case) -> int:
    """As many as about ten minutes for all cases allow; long ones vary less."""
    return 4 if case.paced_ideal_seconds > 2 else 7


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    return benchmark_main("paced", __doc__, CASES, repetitions, argv)


if __name__ == "__main__":
    sys.exit(main())
