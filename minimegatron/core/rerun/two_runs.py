"""Mode `report_determinism_stats`: each step runs twice, and differences are printed.

Counterpart: that mode of `megatron.core.rerun_state_machine`, which in 0.16 raises at its first report.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from minimegatron.core.rerun.judge import kept, rank
from minimegatron.core.rerun.states import Call
from minimegatron.core.rerun.statistics import QuickStats


class TwoRuns:
    """Results of a step's first run, and statistics over all steps, by message."""

    def __init__(self) -> None:
        self.saved_results: dict[Call, Any] = {}
        self.stats: dict[str, QuickStats] = {}

    def keep(self, call: Call, result: Any) -> None:
        """The first run's."""
        self.saved_results[call] = kept(result)

    def compare(self, call: Call, result: Any, differs: Callable[[Any, Any], float]) -> None:
        """The second run's. Raises KeyError where the first run made no such call."""
        stats = self.stats.setdefault(call.caller.message, QuickStats())
        stats.record(differs(self.saved_results[call], result))

    def report(self, iteration: int) -> None:
        """Prints, on rank 0, the statistics of all ranks. Every rank must call it."""
        self.saved_results = {}
        everyones: list[Any] = [self.stats]
        if dist.is_initialized():
            everyones = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, self.stats)
        if rank() != 0:
            return
        print(f"> two runs of each step, up to iteration {iteration}:", flush=True)
        for message in sorted({message for stats in everyones for message in stats}):
            found = QuickStats()
            found.combine([stats[message] for stats in everyones if message in stats])
            print(f">   {message}: {found.print_stats()}", flush=True)
