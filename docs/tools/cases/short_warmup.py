"""Interleaving with one forward of warm-up per stage: what the planner finds, for the tour and a test.

Called by: `cases`, `problem_cases`, `why_times_two`. Calls: the planner, with one number of
`schedule_table` changed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from unittest import mock

from minimegatron.core.pipeline_parallel import schedule_table
from minimegatron.core.pipeline_parallel.schedule_table import RankMicrobatches
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.simulator import Costs, simulate


@contextmanager
def one_step_per_stage() -> Iterator[None]:
    """Within it, interleaving warms up (p - r - 1) + (v - 1)G forwards."""
    count = schedule_table.count_rank_microbatches

    def shorter(pp_size: int, pp_rank: int, *args: int, **kwargs: bool) -> RankMicrobatches:
        found = count(pp_size, pp_rank, *args, **kwargs)
        if found.are_all_in_warmup:
            return found
        num_warmup = found.num_warmup - (pp_size - pp_rank - 1)
        return found._replace(num_warmup=num_warmup, num_remaining=found.total - num_warmup)

    with mock.patch.object(schedule_table, "count_rank_microbatches", shorter):
        yield


def both_warmups(pp: int, m: int, vpp: int, overlap: bool) -> tuple[Plan, Plan]:
    """The plan with two forwards per stage, as it is, and with one."""
    usual = plan("interleaved", pp, m, vpp, overlap_p2p_comm=overlap)
    with one_step_per_stage():
        return usual, plan("interleaved", pp, m, vpp, overlap_p2p_comm=overlap)


def makespan(planned: Plan, message: object) -> Fraction | None:
    """With a forward of 1 and a backward of 2 per stage; None if some rank waits for ever."""
    chunks = planned.config.num_model_chunks
    costs = Costs.of_stages(Fraction(1), Fraction(2), chunks, None, Fraction(message), None)
    try:
        return simulate(planned, costs).makespan
    except ValueError:
        return None
