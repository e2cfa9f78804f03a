"""Mode `report_determinism_stats`: each step runs twice, and differences are printed.

Counterpart: that mode of `megatron.core.rerun_state_machine`, which in 0.16 raises at its first report.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from minimegatron.core.rerun.states import JudgedCall, RerunState
from minimegatron.core.rerun.statistics import QuickStats
from minimegatron.core.rerun.verdicts import kept, rank


class TwoRuns:
    """Results of a step's first run, and statistics over all steps, by message."""

    def __init__(self) -> None:
        self.saved_results: dict[JudgedCall, Any] = {}
        self.stats: dict[str, QuickStats] = {}

    def look(
        self,
        call: JudgedCall,
        result: Any,
        differs: Callable[[Any, Any], float],
        state: RerunState,
    ) -> None:
        """In the first run it keeps the result; in the second it compares.

        Raises KeyError where the first run made no such call.
        """
        if state is RerunState.INITIAL_RUN:
            self.saved_results[call] = kept(result)
            return
        stats = self.stats.setdefault(call.message, QuickStats())
        stats.record(differs(self.saved_results[call], result))

    def report(self, iteration: int, interval: int) -> None:
        """After a step: each `interval` steps rank 0 prints the statistics of all ranks.

        Every rank must call it.
        """
        self.saved_results = {}
        if iteration % interval:
            return
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
