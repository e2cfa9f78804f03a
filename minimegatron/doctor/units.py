"""Which microbatch the n-th message of a step carries: told by the plan of the rank's schedule.

Megatron has no counterpart.

A rank that waits to receive cannot know what will come; its schedule says what should. Messages of
one payload and direction travel in order between two ranks, so the plan's n-th is the run's n-th.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minimegatron.core.orders import orders
from minimegatron.core.orders.lowering import lowered_step
from minimegatron.core.orders.orders import TAGGED
from minimegatron.core.orders.placement import Placement
from minimegatron.doctor.records import RECEIVING, SENDING, OpenCall, RankRecord, Unit
from minimegatron.planner.actions import COMMUNICATE, RECEIVE, SEND, Action, parts_of
from minimegatron.planner.links import KIND_OF_LINK, placement_of_run
from minimegatron.planner.plan import plan_config_from_json, plan_rank
from minimegatron.planner.stage import PlanConfig

UNKNOWN: Unit = (None, None)
DIRECTIONS = {SENDING: SEND, RECEIVING: RECEIVE}


class StepUnits:
    """The microbatches and chunks of one rank's latest step, in the order of its plan."""

    def __init__(self, record: RankRecord):
        self._work: dict[str, list[Unit]] = {}
        self._messages: dict[tuple[str, str, int | None], list[Unit]] = {}
        step = record.step or {}
        # Without a plan: a stage of one chunk takes its microbatches in turn, whatever its schedule.
        self._count = 0 if step.get("num_model_chunks") != 1 else step.get("num_microbatches") or 0
        for action in _planned_actions(record):
            for part in parts_of(action):
                if part.kind != COMMUNICATE:
                    self._work.setdefault(part.kind, []).append((part.microbatch, part.chunk))
            for message in action.messages:
                unit = (message.microbatch, message.chunk)
                # A call that names no neighbour of its own is looked up among all of them.
                for peer in (record.pipeline[message.peer], None):
                    kind = (message.direction, message.payload, peer)
                    self._messages.setdefault(kind, []).append(unit)

    def of_work(self, name: str | None, number: int | None) -> Unit:
        """Of the n-th link of this name, such as "forward-compute", in the step."""
        return self._get(self._work, KIND_OF_LINK.get(name or ""), number)

    def of_message(self, call: OpenCall) -> Unit:
        """Of the message that a call starts or waits for."""
        payload = (call.payload or "").removesuffix(" shape")
        kind = (DIRECTIONS[call.doing], payload, call.peer)
        if kind not in self._messages:
            kind = (*kind[:2], None)
        return self._get(self._messages, kind, call.number)

    def of_call(self, call: OpenCall) -> Unit:
        """Of any call that itself has a microbatch, as far as it is known."""
        if call.microbatch is not None:
            return call.microbatch, call.chunk
        if call.doing is not None:
            return self.of_message(call)
        return self.of_work(call.name, call.number)

    def _get(self, planned: Mapping, kind: Any, number: int | None) -> Unit:
        if number is None or number < 0 or kind is None:
            return UNKNOWN
        units = planned.get(kind, ())
        if number < len(units):
            return units[number]
        return (number, 0) if not self._work and number < self._count else UNKNOWN


def _planned_actions(record: RankRecord) -> Sequence[Action]:
    if record.step is None or record.rank not in record.pipeline:
        return ()
    rank = record.pipeline.index(record.rank)
    try:
        config = recorded_config(record.step)
        schedule = orders.get_schedule(config.schedule)
        if config.pp_size != len(record.pipeline):
            return ()
        if config.wire is None and schedule.messages is not None:
            return plan_rank(schedule.messages, config, rank)
        return lowered_step(replace(config, wire=config.wire or TAGGED)).ranks[rank]
    except (TypeError, ValueError, ArithmeticError, LookupError):
        # A schedule this process does not know, or sizes that no plan has: then there is no plan.
        return ()


def recorded_config(step: Mapping[str, Any]) -> PlanConfig:
    """The config of a recorded step. Raises TypeError or ValueError for what is none."""
    config = plan_config_from_json(dict(step))
    if step.get("placement") is not None:
        return config
    placement = placement_of_run(config.schedule, config.pp_size, config.num_model_chunks)
    return config if placement is None else replace(config, placement=placement)


def placement_of(record: RankRecord) -> Placement | None:
    """Where the stages of a rank's latest step are; None where it is not known."""
    try:
        placement = None if record.step is None else recorded_config(record.step).placement
    except (TypeError, ValueError):
        return None
    fits = placement is not None and placement.pp_size == len(record.pipeline)
    return placement if fits else None


def unit_in_words(unit: Unit, record: RankRecord) -> str:
    """ "microbatch 2", and its chunk where the rank has several; empty if it is not known."""
    microbatch, chunk = unit
    if microbatch is None:
        return ""
    has_chunks = (record.step or {}).get("num_model_chunks", 1) > 1 or (chunk or 0) > 0
    return f"microbatch {microbatch}" + (f", chunk {chunk}" if has_chunks else "")
