"""Which phase each action of a schedule belongs to: warm-up, steady state, cool-down.

Torch-free. Megatron has no counterpart. Of the schedules that are written as loops, arithmetic says how
many forwards warm up. A call that only receives belongs to what follows it; any other call, to what it
follows.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minimegatron.core.orders.plan_config import COMBINED, GPIPE, PlanConfig
from minimegatron.core.orders.work import (
    BACKWARD,
    COOLDOWN,
    FORWARD,
    INTERLEAVED,
    KINDS,
    NO_PIPELINING,
    ONE_F_ONE_B,
    PAIR,
    STEADY,
    WARMUP,
)
from minimegatron.core.pipeline_parallel.schedule_table import (
    count_rank_microbatches,
    get_num_warmup_microbatches,
)


class PhaseCounts(NamedTuple):
    """How many forwards of a stage warm up, and how many of its backwards come after a forward."""

    num_warmup: int
    num_remaining: int


def phase_counts(config: PlanConfig, rank: int) -> PhaseCounts | None:
    """Those of a written schedule; None for any other."""
    M = config.num_microbatches
    if config.schedule == NO_PIPELINING:
        return PhaseCounts(0, M)
    if config.schedule == GPIPE:
        return PhaseCounts(M, 0)
    if config.schedule == ONE_F_ONE_B:
        needed = get_num_warmup_microbatches(config.pp_size, rank, M)
        num_warmup = M if config.forward_only else needed
        return PhaseCounts(num_warmup, M - num_warmup)
    if config.schedule == COMBINED and config.pp_size == 1:
        return PhaseCounts(M if config.forward_only else 1, M - 1)
    if config.schedule not in (INTERLEAVED, COMBINED):
        return None
    counts = count_rank_microbatches(
        config.pp_size,
        rank,
        M,
        config.num_model_chunks,
        config.microbatch_group_size_per_vp_stage or config.pp_size,
        forward_only=config.forward_only,
        overlap_moe_expert_parallel_comm=config.schedule == COMBINED,
    )
    return PhaseCounts(counts.num_warmup, counts.num_remaining)


ONLY_RECEIVE = ("recv_forward", "recv_backward")


def phases_of(
    kinds: Sequence[str], counts: PhaseCounts, first_call_warms_up: bool
) -> list[str | None]:
    """The phase of each action of one stage, from kinds of work and names of calls.

    `first_call_warms_up` is for interleaving: its first call belongs to warm-up even on a stage that
    has nothing to warm up.
    """
    phases: list[str | None] = []
    before, waiting = None, []  # of calls, the places of those that belong to what follows
    num_warmup, num_remaining = counts
    for place, kind in enumerate(kinds):
        if kind == FORWARD:
            num_warmup -= 1
            before = WARMUP if num_warmup >= 0 else STEADY
        elif kind == BACKWARD:
            num_remaining -= 1
            before = STEADY if num_remaining >= 0 else COOLDOWN
        elif kind == PAIR:
            num_warmup, num_remaining, before = num_warmup - 1, num_remaining - 1, STEADY
        elif before is None or kind in ONLY_RECEIVE:
            waiting.append(place)
            phases.append(None)
            continue
        elif waiting:  # a call between one that only receives and the next work
            phases.append(before)
            continue
        for earlier in waiting:
            phases[earlier] = before
        waiting.clear()
        phases.append(before)
    for place in waiting:
        phases[place] = before
    if first_call_warms_up:
        phases = [
            WARMUP if kind == ONLY_RECEIVE[0] else x for x, kind in zip(phases, kinds, strict=True)
        ]
    return phases


def phases_of_loop(done: Sequence[tuple], config: PlanConfig, rank: int) -> list[str | None]:
    """The phases of what a loop has done.

    In a schedule of one's own, the steady state begins with the forward that a backward follows first,
    or with the first pair; it ends with the backward that follows the last forward.
    """
    kinds = [entry[0] for entry in done]
    counts = phase_counts(config, rank) or _counts_of([kind for kind in kinds if kind in KINDS])
    has_turns = config.schedule in (INTERLEAVED, COMBINED) and config.pp_size > 1
    return phases_of(kinds, counts, has_turns)


def _counts_of(work: list[str]) -> PhaseCounts:
    num_forwards, num_pairs = work.count(FORWARD), work.count(PAIR)
    if num_pairs:
        return PhaseCounts(work[: work.index(PAIR)].count(FORWARD), num_pairs)
    if BACKWARD not in work or not num_forwards:
        return PhaseCounts(num_forwards, 0)
    after_last = len(work) - work[::-1].index(FORWARD)
    num_warmup = max(work[: work.index(BACKWARD)].count(FORWARD) - 1, 0)
    return PhaseCounts(num_warmup, work[:after_last].count(BACKWARD) + 1)
