"""Makespan of pipelines whose forward and backward are sleeps, against the ideal.

Run: python -m tests.benchmarks.paced [--implementations ours,megatron,torch,minimal]
Calls: `measure.benchmark_main`.

Stages that sleep leave the cores free, as stages on their own devices would, so that eight ranks on
two cores show what a schedule and its communication cost, and nothing else. What little a stage
computes happens within the padded time, and the usual delay of a sleep's end is taken off. The
ideal is (M v + p - 1)(tF + tB), tF and tB being the times of one chunk.
"""

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
]

if __name__ == "__main__":
    names = "ours,ours',ours-overlap,megatron,megatron-overlap,megatron-flush,torch,minimal"
    benchmark_main(__doc__.splitlines()[0], CASES, names, 7)
