"""The plan of a step: what every rank does, in order, without doing it.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from minimegatron.core.json_text import check_depth
from minimegatron.core.orders.loop_recorder import is_loop, record_loop
from minimegatron.core.orders.lowering import lower
from minimegatron.core.orders.orders import (
    COMBINED,
    INTERLEAVED,
    NO_PIPELINING,
    ONE_F_ONE_B,
    TAGGED,
    UNTAGGED,
    OrderFunction,
    PlanConfig,
    Schedule,
    get_schedule,
    order_of_ranks,
    schedule_of,
)
from minimegatron.core.orders.placement import LINE, Placement, usual_placement
from minimegatron.core.pipeline_parallel.interleaving_checks import check_interleaving
from minimegatron.planner import written_loops as _with_messages  # noqa: F401 (registers them)
from minimegatron.planner.actions import (
    ACTIVATION,
    CALL,
    COMMUNICATE,
    GRADIENT,
    KINDS,
    SEND,
    Action,
    parts_of,
    timeline_from_json,
    timeline_to_json,
)
from minimegatron.planner.stage import Stage

TURNS = (INTERLEAVED, COMBINED)
"""Schedules in which chunks take turns, by the rules of interleaving."""


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
    """The config as a dict for `json.dumps`. A line and a loop need no table of stages."""
    data = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    placement = data.pop("placement")
    if placement != usual_placement(config.pp_size, config.num_model_chunks):
        data["placement"] = {"name": placement.name, "stages": [*map(list, placement.stages)]}
    for name in ("wire", "message_factors", "message_sizes"):
        if data[name] is None:
            del data[name]
    return data


def plan_config_from_json(data: dict[str, Any]) -> PlanConfig:
    """The inverse of `plan_config_to_json`. Raises TypeError or ValueError for anything else."""
    placement, factors = data.get("placement"), data.get("message_factors")
    read = {
        "placement": placement and Placement(**placement),
        "message_factors": factors and tuple(factors),
        "message_sizes": _as_sizes(data.get("message_sizes")),
    }
    config = PlanConfig(**(data | read))
    _check_factors(config)
    return config


def _check_factors(config: PlanConfig) -> None:
    factors, number = config.message_factors, config.num_virtual_stages
    if factors is not None and (len(factors) != number or min(factors) < 1):
        raise ValueError(
            f"message_factors {list(factors)} are for {number} virtual stages; give one of 1 or more "
            "for each"
        )
    sizes = config.message_sizes
    if sizes is not None and (len(sizes) != number or min(map(len, sizes)) < 1):
        raise ValueError(
            f"message_sizes are for {len(sizes)} virtual stages; give one or more sizes for each of "
            f"the {number}"
        )
    if sizes is not None and config.wire is not None:
        raise ValueError(
            f"message_sizes are for messages that {config.schedule} names itself, but these are "
            f"lowered for a wire that is {config.wire}; use 1f1b, and leave wire out"
        )


def _as_sizes(sizes: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    return None if sizes is None else tuple(map(tuple, sizes))


@dataclass(frozen=True)
class Plan:
    """`ranks[r]` is everything that stage r does in one step, in order."""

    config: PlanConfig
    ranks: list[list[Action]]

    def work(self, rank: int) -> Iterator[Action]:
        """The forwards and backwards of one rank, a pair in one, without its communication."""
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
                held += sum(KINDS[part.kind].held() for part in parts_of(action))
            history.append(held)
        return history

    @property
    def pairs_go_by_layers(self) -> bool:
        """Whether in a pair the backward frees layer after layer what the forward comes to hold."""
        return self.config.schedule == COMBINED

    def peak_in_flight(self, rank: int) -> int:
        """How many microbatches' activations the rank needs room for: in a pair both are held.

        Combined 1F1B needs room for one layer more in a pair, and not for a microbatch more.
        """
        held = peak = 0
        for action in self.work(rank) if not self.config.forward_only else ():
            changes = [KINDS[part.kind].held() for part in parts_of(action)]
            if self.pairs_go_by_layers:
                changes = [sum(changes)]
            peak = max(peak, held + sum(change for change in changes if change > 0))
            held += sum(changes)
        return peak

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
            config = plan_config_from_json(data["config"])
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"the timeline's config is not that of a plan: {error}") from error
        actions = [[getattr(x, "action", x) for x in rank] for rank in ranks]
        return cls(config, [[a for a in rank if a.kind != CALL] for rank in actions])


def plan(
    schedule: str | Callable[[Stage], Iterable[Action]] | OrderFunction | Schedule | None,
    pp: int,
    num_microbatches: int,
    vpp: int | None = None,
    group_size: int | None = None,
    forward_only: bool = False,
    overlap_p2p_comm: bool = False,
    batch_p2p_comm: bool | None = None,
    message_bytes: int = 0,
    wire: str | None = None,
    message_factors: Sequence[int] | None = None,
    message_sizes: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """The plan of one step of one pipeline.

    Args:
        schedule: a registered name ("no-pipelining", "gpipe", "1f1b", "interleaved", ...), a
            schedule function, or None for the one that `get_forward_backward_func` would choose.
        pp: stages.
        num_microbatches: microbatches in the step.
        vpp: chunks per stage; None for schedules that have one, or whose placement says how many.
        group_size: interleaving, `microbatch_group_size_per_vp_stage`; None for `pp`.
        forward_only: plan an evaluation step.
        overlap_p2p_comm: interleaving, messages travel while the stage computes. Those that are
            lowered from an order always do.
        batch_p2p_comm: each call gives the transport one batch instead of separate messages. None
            for True, except where a run could not do that: with overlap, and for interleaving
            over two stages, where a batch can take gradients for activations. `check.check` finds
            those when True is asked for.
        message_bytes: size of one message between stages.
        wire: "tagged" or "untagged", for messages lowered from the schedule's order; None for those
            that the schedule itself names or, if it names none, "tagged".
        message_factors: of each virtual stage, how many times that size it sends on; None for once.
        message_sizes: of each virtual stage, the sizes of all messages that it sends on, in place of
            one of `message_bytes`; plain 1F1B.

    Raises ValueError, with the numbers and the remedy, for what no run could do.
    """
    if schedule is None:
        schedule = _choose(pp, vpp)
    if isinstance(schedule, str):
        found = get_schedule(schedule)
    else:
        found = schedule if isinstance(schedule, Schedule) else schedule_of(schedule)
    if wire is None and found.messages is None:
        wire = TAGGED
    _check_sizes(pp, num_microbatches, vpp, message_bytes)
    _check_fits(found, pp, vpp, group_size, overlap_p2p_comm)
    _check_wire(found, wire)
    if group_size is None and vpp is not None:
        group_size = pp
    if found.name in TURNS and pp > 1:
        check_interleaving(pp, num_microbatches, group_size)
    if wire is not None:
        overlap_p2p_comm = False
        batch_p2p_comm = True if wire == TAGGED or batch_p2p_comm is None else batch_p2p_comm
    if overlap_p2p_comm and batch_p2p_comm:
        raise ValueError(
            "overlap_p2p_comm needs separate sends and receives; set batch_p2p_comm=False"
        )
    if batch_p2p_comm is None:
        batch_p2p_comm = not overlap_p2p_comm and not (pp == 2 and (vpp or 1) > 1)
    placement = found.placed(pp, vpp)
    config = PlanConfig(
        schedule=found.name,
        pp_size=pp,
        num_microbatches=num_microbatches,
        num_model_chunks=placement.num_model_chunks,
        microbatch_group_size_per_vp_stage=group_size,
        forward_only=forward_only,
        overlap_p2p_comm=overlap_p2p_comm,
        batch_p2p_comm=batch_p2p_comm,
        message_bytes=message_bytes,
        placement=placement,
        wire=wire,
        message_factors=message_factors and tuple(message_factors),
        message_sizes=_as_sizes(message_sizes),
    )
    _check_factors(config)
    with without_garbage_collection():
        if wire is not None:
            return Plan(config, lower(order_of_ranks(config, found), config))
        return Plan(config, [plan_rank(found.messages, config, rank) for rank in range(pp)])


def _choose(pp: int, vpp: int | None) -> str:
    if pp == 1:
        return NO_PIPELINING
    return ONE_F_ONE_B if vpp is None else INTERLEAVED


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
    found: Schedule,
    pp: int,
    vpp: int | None,
    group_size: int | None,
    overlap_p2p_comm: bool,
) -> None:
    name = found.name
    if name == NO_PIPELINING and pp > 1:
        raise ValueError(
            f"no-pipelining runs on one stage, but pp is {pp}; use pp 1, or schedule 1f1b"
        )
    if vpp is not None and pp == 1:
        raise ValueError(f"vpp={vpp} needs a pipeline, but pp is 1; use 2 or more stages")
    if name == INTERLEAVED and vpp is None:
        raise ValueError("interleaving needs the number of chunks per stage; set vpp to 2 or more")
    if name == COMBINED and vpp is None and pp > 1:
        raise ValueError(
            f"combined 1F1B over {pp} stages needs the number of chunks per stage; set vpp to 2 or "
            "more, or use 1 stage"
        )
    has_chunks = found.placement is not LINE and name != NO_PIPELINING
    has_chunks = has_chunks and not (name == COMBINED and pp == 1)
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


def _check_wire(found: Schedule, wire: str | None) -> None:
    if wire not in (None, TAGGED, UNTAGGED):
        raise ValueError(f"unknown wire {wire!r}; use {TAGGED!r} or {UNTAGGED!r}, or leave it out")
    if wire is not None and found.order is None:
        raise ValueError(
            f"schedule {found.name} names its own messages, so none can be lowered for a wire that "
            f"is {wire}; leave wire out, or register its order (register_order)"
        )


def plan_rank(function: Callable, config: PlanConfig, rank: int) -> list[Action]:
    """What one stage does by a schedule with its messages: a loop over actors, or a generator.

    Raises ValueError for a function that is neither, or that yields anything but actions.
    """
    if is_loop(function):
        return record_loop(function, config, rank)
    stage = Stage(config, rank)
    try:
        inspect.signature(function).bind(stage)
    except TypeError:
        raise ValueError(
            f"schedule {config.schedule} must be a function of one argument, the stage, or a loop of "
            "a chunk and a communicator (chunk, p2p, ...)"
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
