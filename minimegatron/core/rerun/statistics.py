"""How far results of two runs of a step lie apart, over many steps.

Torch-free. Counterpart: `QuickStats` of `megatron.core.rerun_state_machine`.
"""

import statistics
from collections.abc import Sequence


class QuickStats:
    """Relative differences: how many were 0, and the first `max_size` of the others."""

    def __init__(self, max_size: int = 100_000):
        self.max_size = max_size
        self.reset()

    def reset(self) -> None:
        """Forgets all."""
        self.samples: list[float] = []
        self.zero_cnt = 0
        self.max = 0.0

    def record(self, data: float) -> None:
        """Counts one difference."""
        if data == 0.0:
            self.zero_cnt += 1
            return
        if len(self.samples) < self.max_size:
            self.samples.append(data)
        self.max = max(self.max, data)

    def combine(self, others: Sequence["QuickStats"]) -> None:
        """Counts what other ranks have counted."""
        for other in others:
            self.samples += other.samples[: self.max_size - len(self.samples)]
            self.zero_cnt += other.zero_cnt
            self.max = max(self.max, other.max)

    def print_stats(self) -> str:
        """In words. Zeros count in the mean and in the median.

        >>> found = QuickStats()
        >>> found.record(0.0), found.record(0.25), found.print_stats()
        (None, None, '2 results, 1 identical; relative difference: mean 1.250E-01, p50 1.250E-01, \
max 2.500E-01')
        """
        if not self.samples:
            return f"{self.zero_cnt} results, all identical"
        total = self.zero_cnt + len(self.samples)
        everything = [0.0] * self.zero_cnt + sorted(self.samples)
        return (
            f"{total} results, {self.zero_cnt} identical; relative difference: mean "
            f"{sum(self.samples) / total:.3E}, p50 {statistics.median(everything):.3E}, "
            f"max {self.max:.3E}"
        )
