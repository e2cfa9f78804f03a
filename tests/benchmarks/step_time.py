"""Step time of a pipeline of real transformer blocks, all implementations side by side.

Run: python -m tests.benchmarks.step_time [--implementations ours,megatron,torch,minimal]
Calls: `measure.benchmark_main`.

8 blocks split over p = 2 and p = 4 stages, M = 8 microbatches, messages of 256 KiB and of 16 KiB.
The ideal is measured in the same run: every rank computes all its microbatches at once, without
communication, times (M v + p - 1) / (M v). With more ranks than cores, ranks that wait leave their
core to the others, so that an excess below zero is possible.
"""

import sys

from tests.benchmarks.measure import benchmark_main
from tests.benchmarks.stages import Case

_SHAPES = {"256 KiB": (256, 256), "16 KiB": (64, 64)}

CASES = [
    Case(f"p={p} M=8 {size}", p, 1, 8, *shape, num_blocks=8)
    for p in (2, 4)
    for size, shape in _SHAPES.items()
]


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    return benchmark_main("step_time", __doc__, CASES, lambda case: 25, argv)


if __name__ == "__main__":
    sys.exit(main())
