"""The plan of a step: what every rank does, in order, without doing it.

Called by: the simulator, the renderers, `minimegatron plan`, tests (a run's trace must equal its
plan), the documentation. Calls: `registry` and through it a schedule function, once per stage.
Megatron has no counterpart.

>>> step = plan("1f1b", pp=2, num_microbatches=3)
>>> print(*[f"{a.kind[0].upper()}{a.microbatch}" for a in step.work(rank=0)])
F0 F1 B0 F2 B1 B2
>>> print(*[a for a in step.ranks[1][:3]], sep=" -> ")
recv_forward(receive activation of microbatch 0, chunk 0 from rank 0) -> forward of microbatch 0, \
chunk 0 -> send_forward_recv_backward()
>>> step.peak_in_flight(0), step.peak_in_flight(1), step.message_counts()
(2, 1, {'activation': 3, 'gradient': 3})
"""

import dataclasses
import gc
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from minimegatron.core.json_text import check_depth
from minimegatron.core.pipeline_parallel.schedule_table import check_interleaving
from minimegatron.planner import schedules
from minimegatron.planner.actions import (
    ACTIVATION,
    BACKWARD,
    COMMUNICATE,
    FORWARD,
    GRADIENT,
    SEND,
    Action,
    timeline_from_json,
    timeline_to_json,
)
from minimegatron.planner.registry import ScheduleFunction, get_schedule
from minimegatron.planner.stage import PlanConfig, Stage


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Holds the cycle collector back while millions of actions, none in a cycle, are made.

    It would look through all of them again and again: half of the time of a large plan.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def plan_config_to_json(config: PlanConfig) -> dict[str, Any]:
    """The config as a dict for `json.dumps`."""
    return dataclasses.asdict(config)


@dataclass(frozen=True)
class Plan:
    """`ranks[r]` is everything that stage r does in one step, in order."""

    config: PlanConfig
    ranks: list[list[Action]]

    def work(self, rank: int) -> Iterator[Action]:
        """The forwards and backwards of one rank, without its communication."""
        return (action for action in self.ranks[rank] if action.kind != COMMUNICATE)

    def in_flight(self, rank: int) -> list[int]:
        """After each forward or backward of the rank: microbatches whose activations it holds.

        A microbatch counts once per chunk. In a forward-only step nothing is held.

        >>> plan("1f1b", pp=2, num_microbatches=3).in_flight(0)
        [1, 2, 1, 2, 1, 0]
        """
        held, history = 0, []
        for action in self.work(rank):
            if not self.config.forward_only:
                held += 1 if action.kind == FORWARD else -1
            history.append(held)
        return history

    def peak_in_flight(self, rank: int) -> int:
        """The largest of `in_flight`: how many microbatches' activations the rank needs room for."""
        return max(self.in_flight(rank), default=0)

    def message_counts(self) -> dict[str, int]:
        """Messages sent in the whole pipeline, by payload."""
        counts = {ACTIVATION: 0, GRADIENT: 0}
        for rank in range(len(self.ranks)):
            for payload, count in self.messages_sent(rank).items():
                counts[payload] += count
        return counts

    def messages_sent(self, rank: int) -> dict[str, int]:
        """Messages that one rank sends, by payload."""
        counts = {ACTIVATION: 0, GRADIENT: 0}
        for action in self.ranks[rank]:
            for message in action.messages:
                if message.direction == SEND:
                    counts[message.payload] += 1
        return counts

    def bytes_sent(self, rank: int | None = None) -> int:
        """Bytes that one rank sends, or all of them: those of one pipeline, that is, per
        tensor-, context- and data-parallel rank."""
        ranks = self.ranks if rank is None else [self.ranks[rank]]
        return sum(
            message.num_bytes
            for actions in ranks
            for action in actions
            for message in action.messages
            if message.direction == SEND
        )

    def to_json(self) -> dict[str, Any]:
        """The plan in the schema of `actions`."""
        return timeline_to_json(self.ranks, "plan", plan_config_to_json(self.config))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Plan":
        """The inverse of `to_json`; also reads a simulation or a run, leaving its times behind.

        Raises ValueError for anything else.
        """
        check_depth(data, "the plan")
        ranks = timeline_from_json(data)
        try:
            config = PlanConfig(**data["config"])
        except (TypeError, KeyError) as error:
            raise ValueError(f"the timeline's config is not that of a plan: {error}") from error
        actions = [[getattr(x, "action", x) for x in rank] for rank in ranks]
        kinds = (FORWARD, BACKWARD, COMMUNICATE)
        return cls(config, [[a for a in rank if a.kind in kinds] for rank in actions])


def plan(
    schedule: str | ScheduleFunction | None,
    pp: int,
    num_microbatches: int,
    vpp: int | None = None,
    group_size: int | None = None,
    forward_only: bool = False,
    overlap_p2p_comm: bool = False,
    batch_p2p_comm: bool | None = None,
    message_bytes: int = 0,
) -> Plan:
    """The plan of one step of one pipeline.

    Args:
        schedule: a registered name ("no-pipelining", "gpipe", "1f1b", "interleaved", ...), a
            schedule function, or None for the one that `get_forward_backward_func` would choose.
        pp: stages.
        num_microbatches: microbatches in the step.
        vpp: chunks per stage; None for schedules that have one.
        group_size: interleaving, `microbatch_group_size_per_vp_stage`; None for `pp`.
        forward_only: plan an evaluation step.
        overlap_p2p_comm: interleaving, messages travel while the stage computes.
        batch_p2p_comm: each call gives the transport one batch instead of separate messages. None
            for True, except where a run could not do that: with overlap, and for interleaving
            over two stages, where a batch can take gradients for activations. `check.check` finds
            those when True is asked for.
        message_bytes: size of one message between stages.

    Raises ValueError, with the numbers and the remedy, for what no run could do.
    """
    name = schedule if isinstance(schedule, str) else None
    if schedule is None:
        name = _choose(pp, vpp)
    function = get_schedule(name) if name is not None else schedule
    is_interleaved = function is schedules.interleaved
    _check_sizes(pp, num_microbatches, vpp, message_bytes)
    _check_fits(function, name, pp, vpp, group_size, overlap_p2p_comm)
    if group_size is None and vpp is not None:
        group_size = pp
    if is_interleaved:
        check_interleaving(pp, num_microbatches, group_size)
    if overlap_p2p_comm and batch_p2p_comm:
        raise ValueError(
            "overlap_p2p_comm needs separate sends and receives; set batch_p2p_comm=False"
        )
    if batch_p2p_comm is None:
        batch_p2p_comm = not overlap_p2p_comm and not (pp == 2 and (vpp or 1) > 1)
    config = PlanConfig(
        schedule=name or getattr(function, "__name__", "schedule"),
        pp_size=pp,
        num_microbatches=num_microbatches,
        num_model_chunks=vpp or 1,
        microbatch_group_size_per_vp_stage=group_size,
        forward_only=forward_only,
        overlap_p2p_comm=overlap_p2p_comm,
        batch_p2p_comm=batch_p2p_comm,
        message_bytes=message_bytes,
    )
    with without_garbage_collection():
        return Plan(config, [_plan_rank(function, config, rank) for rank in range(pp)])


def _choose(pp: int, vpp: int | None) -> str:
    if pp == 1:
        return schedules.NO_PIPELINING
    return schedules.ONE_F_ONE_B if vpp is None else schedules.INTERLEAVED


def _check_sizes(pp: int, num_microbatches: int, vpp: int | None, message_bytes: int) -> None:
    for name, value, least in (
        ("pp", pp, 1),
        ("num_microbatches", num_microbatches, 1),
        ("vpp", 1 if vpp is None else vpp, 1),
        ("message_bytes", message_bytes, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} is {value!r}; give an integer of {least} or more")
        if value < least:
            raise ValueError(f"{name} is {value}; give {least} or more")


def _check_fits(
    function: ScheduleFunction,
    name: str | None,
    pp: int,
    vpp: int | None,
    group_size: int | None,
    overlap_p2p_comm: bool,
) -> None:
    if function is schedules.no_pipelining and pp > 1:
        raise ValueError(
            f"no-pipelining runs on one stage, but pp is {pp}; use pp 1, or schedule 1f1b"
        )
    if vpp is not None and pp == 1:
        raise ValueError(f"vpp={vpp} needs a pipeline, but pp is 1; use 2 or more stages")
    if function is schedules.interleaved and vpp is None:
        raise ValueError("interleaving needs the number of chunks per stage; set vpp to 2 or more")
    has_chunks = function not in (
        schedules.no_pipelining,
        schedules.gpipe,
        schedules.one_forward_one_backward,
    )
    if not has_chunks and vpp is not None:
        raise ValueError(
            f"schedule {name} runs one chunk per stage, but vpp is {vpp}; leave vpp out, or use "
            "schedule interleaved"
        )
    if group_size is not None and vpp is None:
        raise ValueError(
            f"group_size={group_size} orders the chunks of interleaving; set vpp, or leave it out"
        )
    if overlap_p2p_comm and not has_chunks:
        raise ValueError(
            f"overlap_p2p_comm is on, but schedule {name} sends and receives in one exchange; "
            "turn it off, or use interleaving (vpp)"
        )


def _plan_rank(function: ScheduleFunction, config: PlanConfig, rank: int) -> list[Action]:
    stage = Stage(config, rank)
    try:
        inspect.signature(function).bind(stage)
    except TypeError:
        raise ValueError(
            f"schedule {config.schedule} must be a function of one argument, the stage"
        ) from None
    yielded = function(stage)
    if not isinstance(yielded, Iterable):
        raise ValueError(f"schedule {config.schedule} returned {yielded!r}; it must yield actions")
    actions = list(yielded)
    for action in actions:
        if not isinstance(action, Action):
            raise ValueError(
                f"schedule {config.schedule} yielded {action!r} on rank {rank}; yield what the "
                "stage's methods return, such as stage.forward(0)"
            )
    return actions
