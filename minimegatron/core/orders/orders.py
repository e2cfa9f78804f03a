"""In which order each rank does its work: schedules as data, without their messages.

Torch-free. Counterpart: the order that Megatron's `forward_backward_*` functions follow; GPipe and
the breadth-first order have none there.

An order is a generator of one `Rank`. This one holds a microbatch for as short a time as it can:

>>> @register_order("one-at-a-time")
... def one_at_a_time(rank):
...     for i in range(rank.num_microbatches):
...         yield rank.forward(i)
...         yield rank.backward(i)
>>> " ".join(map(str, order_of_ranks(PlanConfig("one-at-a-time", 2, 2))[1]))
'F0 B0 F1 B1'
>>> unregister("one-at-a-time")

An order says nothing of messages, of a step without backwards, or of what a rank holds: its forwards
alone are the order of an evaluation, and the rest follows.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from minimegatron.core.orders.loop_recorder import work_of_loop
from minimegatron.core.orders.placement import (
    LINE,
    LOOP,
    Placement,
    PlacementRule,
    usual_placement,
)
from minimegatron.core.orders.plan_config import (  # noqa: F401  offered here too
    BREADTH_FIRST,
    COMBINED,
    GPIPE,
    TAGGED,
    UNTAGGED,
    WRITTEN_HERE,
    PlanConfig,
    PlannedRank,
)
from minimegatron.core.orders.work import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COOLDOWN,
    FORWARD,
    INTERLEAVED,
    KINDS,
    NO_PIPELINING,
    ONE_F_ONE_B,
    STEADY,
    WARMUP,
    Work,
    pair,
)
from minimegatron.core.pipeline_parallel.interleaving_checks import check_interleaving
from minimegatron.core.pipeline_parallel.loops import no_pipelining as loop_without_pipeline
from minimegatron.core.pipeline_parallel.loops import one_f_one_b
from minimegatron.core.pipeline_parallel.schedule_table import (
    InterleavedOrder,
)

# -- What an order sees --


class Rank(PlannedRank):
    """One rank of a pipeline; its methods make the work to yield.

    Set `phase` to name what the following work belongs to: `WARMUP`, `STEADY`, `COOLDOWN`.
    """

    def forward(self, microbatch: int, chunk: int = 0) -> Work:
        """The forward of one microbatch through one chunk."""
        return Work(FORWARD, microbatch, chunk, (), self.phase)

    def backward(self, microbatch: int, chunk: int = 0) -> Work:
        """Its backward: both gradients."""
        return Work(BACKWARD, microbatch, chunk, (), self.phase)

    def backward_input(self, microbatch: int, chunk: int = 0) -> Work:
        """Its backward, the input's gradient alone; `backward_weight` must follow."""
        return Work(BACKWARD_INPUT, microbatch, chunk, (), self.phase)

    def backward_weight(self, microbatch: int, chunk: int = 0) -> Work:
        """The weight gradients that `backward_input` has left."""
        return Work(BACKWARD_WEIGHT, microbatch, chunk, (), self.phase)


OrderFunction = Callable[[Rank], Iterable[Work]]
"""Yields everything that one rank computes in a step, in order.

It depends on the rank that it is given, and on nothing else. In a run, stage 0 asks it for all ranks;
who plans that run elsewhere must get the same answer.
"""


# -- Schedules by name --


@dataclass(frozen=True)
class Schedule:
    """What is known of a schedule. At least one of `order` and `messages` is given."""

    name: str
    order: OrderFunction | None = None
    placement: PlacementRule | None = None
    """From p and v to the placement; None for a line or a loop, whatever v is."""
    smallest: Callable[[int], int] | None = None
    """From p to the smallest number of microbatches."""
    messages: Callable | None = None
    """The schedule with its messages: a function of `planner.stage.Stage`."""
    make_step: Callable | None = None
    """From the schedule and the sizes to a `lowering.Step` with its messages: the planner's."""

    def placed(self, pp_size: int, num_model_chunks: int | None = None) -> Placement:
        """Where its stages are. Raises ValueError where that number of chunks does not fit."""
        if self.placement is None:
            return usual_placement(pp_size, num_model_chunks)
        try:
            placement = self.placement(pp_size, num_model_chunks)
        except TypeError as error:
            raise ValueError(
                f"schedule {self.name}: its placement is not a function of p and v, or fails for p = "
                f"{pp_size} and v = {num_model_chunks}: {error}"
            ) from error
        if not isinstance(placement, Placement):
            raise ValueError(
                f"schedule {self.name}: its placement rule returned {placement!r}; return a "
                "Placement(name, table)"
            )
        return placement


_SCHEDULES: dict[str, Schedule] = {}


def register_order(
    name: str,
    placement: PlacementRule = LINE,
    smallest: Callable[[int], int] | None = None,
) -> Callable[[OrderFunction], OrderFunction]:
    """Makes an order known as `name`: to the planner, `--pipeline-schedule`, the runtime.

    Args:
        placement: `LINE`, `LOOP`, `V`, or any function of p and v that returns a `Placement`; v is
            None where nobody has asked for a number of chunks.
        smallest: from p to the smallest number of microbatches that the order can do.

    A function that is defined again, as when a notebook's cell runs twice, takes its own place. Raises
    ValueError when another function has the name.
    """
    if not isinstance(name, str):
        raise ValueError('write @register_order("NAME") before the order: the name is missing')

    def register(function: OrderFunction) -> OrderFunction:
        add_schedule(Schedule(name, function, placement, smallest))
        return function

    return register


def add_schedule(schedule: Schedule) -> None:
    """Registers it. Raises ValueError when another function has its name."""
    known, function = _SCHEDULES.get(schedule.name), schedule.order or schedule.messages
    if known is not None:
        taken_by = known.order or known.messages
        if (taken_by.__module__, taken_by.__qualname__) != (
            function.__module__,
            function.__qualname__,
        ):
            raise ValueError(
                f"the schedule name {schedule.name!r} is taken by "
                f"{taken_by.__module__}.{taken_by.__qualname__}; choose another"
            )
    _SCHEDULES[schedule.name] = schedule


def written_as(name: str) -> Callable[[Callable], Callable]:
    """Gives the registered order `name` the messages that its written schedule sends."""

    def register(function: Callable) -> Callable:
        _SCHEDULES[name] = replace(_SCHEDULES[name], messages=function)
        return function

    return register


def schedule_of(function: Callable) -> Schedule:
    """What is registered with this order; for any other function, a schedule with its messages."""
    for known in _SCHEDULES.values():
        if known.order is function:
            return known
    return Schedule(getattr(function, "__name__", "schedule"), messages=function)


def unregister(name: str) -> None:
    """Forgets a name again; for tests and notebooks. Raises ValueError for an unknown one."""
    get_schedule(name)
    del _SCHEDULES[name]


def get_schedule(name: str) -> Schedule:
    """What is registered under `name`. Raises ValueError, listing all names, if nothing is."""
    if name not in _SCHEDULES:
        raise ValueError(
            f"unknown schedule {name!r}; known are {', '.join(schedule_names())}, and "
            "@register_order or @register_schedule adds one"
        )
    return _SCHEDULES[name]


def require_own_name(name: str) -> None:
    """Raises ValueError for an order that a flag chooses, and that a run therefore cannot name."""
    if name == COMBINED:
        raise ValueError(
            f"pipeline_schedule {name} is an order that one can plan by name, but not train with; set "
            "overlap_moe_expert_parallel_comm, which runs it, and leave pipeline_schedule out"
        )


def schedule_names() -> list[str]:
    """All registered names, in the order of registration."""
    return list(_SCHEDULES)


def placement_of(config: Any) -> Placement:
    """The placement that a model's config asks for: that of its `pipeline_schedule`.

    Args:
        config: a `ModelParallelConfig`, or anything with its pipeline sizes.
    """
    sizes = (config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size)
    name = config.pipeline_schedule
    return usual_placement(*sizes) if name is None else get_schedule(name).placed(*sizes)


def require_usual_placement(config: Any) -> None:
    """Raises ValueError for a model that was built for another placement than Megatron's."""
    p, v = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    placement = placement_of(config)
    if placement.stages != usual_placement(p, v).stages:
        raise ValueError(
            f"the model was built for schedule {config.pipeline_schedule}, which places its stages as "
            f"{[list(chunks) for chunks in placement.stages]}; run it with "
            f"get_forward_backward_func(pipeline_schedule={config.pipeline_schedule!r})"
        )


# -- The orders of all ranks --


def order_of_ranks(config: PlanConfig, schedule: Schedule | None = None) -> list[list[Work]]:
    """What each rank computes in a step, in order; the forwards alone in a forward-only step.

    `schedule` has the order; None for the one registered under `config.schedule`. Raises ValueError,
    with the numbers, for sizes that the order cannot do, and for what yields no work.
    """
    schedule = schedule or get_schedule(config.schedule)
    if schedule.smallest is not None:
        least = schedule.smallest(config.pp_size)
        if config.num_microbatches < least:
            raise ValueError(
                f"schedule {schedule.name} needs {least} or more microbatches on "
                f"{config.pp_size} ranks, but there are {config.num_microbatches}; use more "
                "microbatches, or another schedule"
            )
    return [_order_of(config, rank, schedule.order) for rank in range(config.pp_size)]


def _order_of(config: PlanConfig, pp_rank: int, function: OrderFunction) -> list[Work]:
    name, rank = config.schedule, Rank(config, pp_rank)
    try:
        inspect.signature(function).bind(rank)
    except TypeError:
        raise ValueError(f"order {name} must be a function of one argument, the rank") from None
    yielded = function(rank)
    if not isinstance(yielded, Iterable) or isinstance(yielded, Work | str):
        raise ValueError(f"order {name} returned {yielded!r}; it must yield its work")
    # Of each microbatch and chunk: a forward, and a backward in one piece or in two.
    most = 3 * config.num_microbatches * config.num_model_chunks
    order: list[Work] = []
    for number, work in enumerate(yielded):
        if not isinstance(work, Work) or not (
            all(map(_is_work, work.parts)) if work.parts else _is_work(work)
        ):
            raise ValueError(
                f"order {name} yielded {work!r} on rank {pp_rank}; yield what the rank's methods "
                "return for whole numbers, such as rank.forward(0)"
            )
        if number >= most:
            raise ValueError(
                f"order {name} has yielded more than {most} pieces of work on rank {pp_rank}, but "
                f"{config.num_microbatches} microbatches and {config.num_model_chunks} chunks need "
                "no more; let it end"
            )
        if config.forward_only:
            order += _forwards(work)
        else:
            order.append(work)
    return order


def _is_work(part: Work) -> bool:
    microbatch, chunk = part.microbatch, part.chunk
    return part.kind in KINDS and type(microbatch) is type(chunk) is int


def _forwards(work: Work) -> list[Work]:
    return [part for part in work.parts or (work,) if part.kind == FORWARD]


# -- The orders of the written schedules, and two more --


@register_order(NO_PIPELINING, placement=None)
def no_pipelining(rank: Rank) -> list[Work]:
    """Gradient accumulation on one stage: what `loops.no_pipelining` does."""
    return work_of_loop(
        loop_without_pipeline, replace(rank.config, schedule=NO_PIPELINING), rank.pp_rank
    )


@register_order(GPIPE)
def gpipe(rank: Rank) -> Iterator[Work]:
    """All forwards, then all backwards. Source: Huang et al. 2019 (arXiv:1811.06965)."""
    rank.phase = WARMUP
    for i in range(rank.num_microbatches):
        yield rank.forward(i)
    rank.phase = COOLDOWN
    for i in range(rank.num_microbatches):
        yield rank.backward(i)


@register_order(ONE_F_ONE_B)
def one_forward_one_backward(rank: Rank) -> list[Work]:
    """Warm-up forwards, forward and backward in turn, then the rest: what `loops.one_f_one_b` does.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1.
    """
    return work_of_loop(one_f_one_b, replace(rank.config, schedule=ONE_F_ONE_B), rank.pp_rank)


@register_order(INTERLEAVED, placement=LOOP)
def interleaved(rank: Rank) -> Iterator[Work]:
    """1F1B over v chunks per rank. Source: Narayanan et al. 2021, section 2.2.2."""
    forwards, backwards, num_warmup = _in_turns(rank)
    num_remaining = len(forwards) - num_warmup
    rank.phase = WARMUP
    for unit in forwards[:num_warmup]:
        yield rank.forward(*unit)
    rank.phase = STEADY
    for k in range(num_remaining):
        yield rank.forward(*forwards[num_warmup + k])
        yield rank.backward(*backwards[k])
    rank.phase = COOLDOWN
    for unit in backwards[num_remaining:]:
        yield rank.backward(*unit)


@register_order(COMBINED, placement=LOOP)
def combined(rank: Rank) -> Iterator[Work]:
    """Forwards in pairs with backwards of other microbatches, so that either hides the other's
    all-to-alls: on one stage, and with several chunks per stage in the order of interleaving.

    One more forward warms up than there. Without it the last stage would pair a forward with its own
    backward. Megatron's combined 1F1B; `--overlap-moe-expert-parallel-comm` chooses it.
    """
    if rank.pp_size == 1:
        forwards = backwards = [(i, 0) for i in range(rank.num_microbatches)]
        num_warmup = 1
    else:
        forwards, backwards, num_warmup = _in_turns(rank, overlap_moe_expert_parallel_comm=True)
    num_remaining = len(forwards) - num_warmup
    rank.phase = WARMUP
    for unit in forwards[:num_warmup]:
        yield rank.forward(*unit)
    rank.phase = STEADY
    for k in range(num_remaining):
        yield pair(rank.forward(*forwards[num_warmup + k]), rank.backward(*backwards[k]))
    rank.phase = COOLDOWN
    for unit in backwards[num_remaining:]:
        yield rank.backward(*unit)


def _in_turns(
    rank: Rank, overlap_moe_expert_parallel_comm: bool = False
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    """(microbatch, chunk) of all forwards, of all backwards, and how many forwards warm up."""
    group_size = rank.config.microbatch_group_size_per_vp_stage or rank.pp_size
    check_interleaving(rank.pp_size, rank.num_microbatches, group_size)
    table = InterleavedOrder(
        rank.pp_size,
        rank.pp_rank,
        rank.num_microbatches,
        rank.num_model_chunks,
        group_size,
        overlap_moe_expert_parallel_comm=overlap_moe_expert_parallel_comm,
    )
    last = rank.num_model_chunks - 1
    backwards = [(microbatch, last - chunk) for microbatch, chunk in table.table]
    return table.table, backwards, table.counts.num_warmup


@register_order(BREADTH_FIRST, placement=LOOP)
def breadth_first(rank: Rank) -> Iterator[Work]:
    """All microbatches through chunk 0, then all through chunk 1, ...; backwards mirrored.

    As short as interleaving, and each chunk's weights are needed in one stretch; but a rank holds all
    microbatches. Source: Lamy-Poirier 2023 (arXiv:2211.05953), section 4.
    """
    rank.phase = WARMUP
    for chunk in range(rank.num_model_chunks):
        for i in range(rank.num_microbatches):
            yield rank.forward(i, chunk)
    rank.phase = COOLDOWN
    for chunk in reversed(range(rank.num_model_chunks)):
        for i in range(rank.num_microbatches):
            yield rank.backward(i, chunk)
