"""Closed forms to hold a simulation against: makespan, bubble, activations in flight, messages.

Megatron has no counterpart; sources are Narayanan et al. 2021 (arXiv:2104.04473), section 2.2,
Huang et al. 2019 (arXiv:1811.06965) and Lamy-Poirier 2023 (arXiv:2211.05953).

Each returns None for a schedule that has no closed form here: a user's own, and the breadth-first
one where there are fewer microbatches than stages. The first two assume that every chunk takes equally
long and that messages are free; combined 1F1B has none of these two, since its pairs take what their
all-to-alls leave them.
"""

from fractions import Fraction
from typing import NamedTuple

from minimegatron.core.orders.orders import (
    BREADTH_FIRST,
    COMBINED,
    GPIPE,
    INTERLEAVED,
    NO_PIPELINING,
    ONE_F_ONE_B,
    WRITTEN_HERE,
)
from minimegatron.core.pipeline_parallel.schedule_table import count_rank_microbatches
from minimegatron.planner.actions import Time
from minimegatron.planner.stage import PlanConfig


class Formula(NamedTuple):
    """A closed form and its value."""

    text: str
    value: Time


def makespan_formula(config: PlanConfig, forward: Time, backward: Time) -> Formula | None:
    """Length of a step. `forward` and `backward` are those of a whole stage, all chunks together.

    >>> makespan_formula(PlanConfig("1f1b", 4, 8), forward=1, backward=2)
    Formula(text='(M + p - 1)(f + b)', value=33)
    >>> makespan_formula(PlanConfig("interleaved", 4, 8, 2, 4), forward=1, backward=2)
    Formula(text='(M + (p - 1)/v)(f + b)', value=Fraction(57, 2))
    """
    p, M, v = config.pp_size, config.num_microbatches, config.num_model_chunks
    work, words = (forward, "f") if config.forward_only else (forward + backward, "(f + b)")
    if config.schedule == NO_PIPELINING:
        return Formula(f"M {words}" if config.forward_only else f"M{words}", M * work)
    if config.schedule in (GPIPE, ONE_F_ONE_B):
        return Formula(f"(M + p - 1){words}", (M + p - 1) * work)
    if is_looped(config):
        return Formula(f"(M + (p - 1)/v){words}", (M + Fraction(p - 1, v)) * work)
    return None


def bubble_formulas(config: PlanConfig) -> tuple[Formula, Formula] | None:
    """Idle time over ideal (computing) time, and idle time over total time.

    >>> bubble_formulas(PlanConfig("1f1b", 4, 8))[1]
    Formula(text='(p - 1)/(M + p - 1)', value=Fraction(3, 11))
    """
    p, M, v = config.pp_size, config.num_microbatches, config.num_model_chunks
    if config.schedule == NO_PIPELINING:
        return Formula("0", Fraction(0)), Formula("0", Fraction(0))
    if config.schedule in (GPIPE, ONE_F_ONE_B):
        over_ideal, over_total = "(p - 1)/M", "(p - 1)/(M + p - 1)"
    elif is_looped(config):
        over_ideal, over_total = "(p - 1)/(Mv)", "(p - 1)/(Mv + p - 1)"
    else:
        return None
    return (
        Formula(over_ideal, Fraction(p - 1, v * M)),
        Formula(over_total, Fraction(p - 1, v * M + p - 1)),
    )


def peak_in_flight_formula(config: PlanConfig, rank: int) -> Formula | None:
    """Microbatches (each counted once per chunk) whose activations a stage holds at its peak.

    Plain 1F1B: a stage's warm-up forwards and one more. Interleaving likewise; w, its warm-up, is
    2(p - r - 1) + (v - 1)G. Combined 1F1B warms up one forward more, and in its pairs a layer of the
    forward comes before one of the backward goes. GPipe and the breadth-first order: all.

    >>> [peak_in_flight_formula(PlanConfig("1f1b", 4, 8), rank).value for rank in range(4)]
    [4, 3, 2, 1]
    """
    p, M, v = config.pp_size, config.num_microbatches, config.num_model_chunks
    if config.schedule not in WRITTEN_HERE:
        return None
    if config.forward_only:
        return Formula("0", 0)
    if config.schedule == NO_PIPELINING:
        return Formula("1", 1)
    if config.schedule == GPIPE:
        return Formula("M", M)
    if config.schedule == BREADTH_FIRST:
        return Formula("Mv", M * v)
    if config.schedule == ONE_F_ONE_B:
        return Formula("min(M, p - r)", min(M, p - rank))
    if config.schedule == COMBINED and p == 1:
        return Formula("1 (+ a layer)" if M > 1 else "1", 1)
    counts = count_rank_microbatches(p, rank, M, v, config.microbatch_group_size_per_vp_stage)
    if config.schedule == COMBINED:
        is_paired = counts.num_warmup + 1 < M * v
        text = "warm-up (+ a layer)" if is_paired else "Mv"
        return Formula(text, min(M * v, counts.num_warmup + 1))
    return Formula("min(Mv, w + 1)", min(M * v, counts.num_warmup + 1))


def message_formula(config: PlanConfig) -> Formula | None:
    """Messages in one direction: one per microbatch and boundary between virtual stages.

    >>> message_formula(PlanConfig("interleaved", 4, 8, 2, 4))
    Formula(text='(pv - 1)M', value=56)
    >>> message_formula(PlanConfig("1f1b", 3, 8, message_sizes=((1,), (1, 1), (1, 1))))
    Formula(text='(2p - q - 2)M', value=24)
    """
    p, M, v = config.pp_size, config.num_microbatches, config.num_model_chunks
    if config.schedule == NO_PIPELINING or (config.schedule == COMBINED and p == 1):
        return Formula("0", 0)
    if config.schedule in (GPIPE, ONE_F_ONE_B):
        if config.message_sizes is None:
            return Formula("(p - 1)M", (p - 1) * M)
        return _with_two_stacks(config)
    if config.schedule in (INTERLEAVED, COMBINED, BREADTH_FIRST):
        return Formula("(pv - 1)M", (p * v - 1) * M)
    return None


def _with_two_stacks(config: PlanConfig) -> Formula:
    # Of the p - 1 boundaries, those after the decoder's first stage q carry two messages.
    p, M = config.pp_size, config.num_microbatches
    *numbers, _ = map(len, config.message_sizes)
    q, value = numbers.count(1), sum(numbers) * M
    if numbers == [1] * q + [2] * (p - 1 - q):
        return Formula("(2p - q - 2)M", value)
    return Formula(f"{sum(numbers)}M", value)  # those of a model of one's own


def first_stage_with_two_messages(config: PlanConfig) -> int | None:
    """From it on all stages send two, as T5's decoder does; None if the plan is of another kind.

    >>> first_stage_with_two_messages(PlanConfig("1f1b", 3, 8, message_sizes=((1,), (1, 1), (1, 1))))
    1
    """
    numbers = [len(sizes) for sizes in config.message_sizes or ()]
    q = numbers.count(1)
    is_two_stacks = 0 < q < len(numbers) and numbers == [1] * q + [2] * (len(numbers) - q)
    return q if is_two_stacks else None


def is_looped(config: PlanConfig) -> bool:
    """Several chunks per stage, and none waits for a microbatch that comes round the loop."""
    if config.schedule == BREADTH_FIRST:
        return config.num_microbatches >= config.pp_size or config.num_model_chunks == 1
    return config.schedule == INTERLEAVED
