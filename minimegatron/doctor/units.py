"""Which microbatch the n-th message of a step carries: told by the plan of the rank's schedule.

Called by: `situation`. Calls: `planner` (torch-free). Megatron has no counterpart.

A rank that waits to receive cannot know what will come; its schedule says what should. Messages of
one payload and direction travel in order, so the plan's n-th is the run's n-th.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minimegatron.doctor.records import RECEIVING, SENDING, OpenCall, RankRecord, Unit
from minimegatron.planner import schedules
from minimegatron.planner.actions import BACKWARD, COMMUNICATE, FORWARD, RECEIVE, SEND, Action
from minimegatron.planner.registry import get_schedule
from minimegatron.planner.stage import PlanConfig, Stage

UNKNOWN: Unit = (None, None)
KIND_OF_WORK = {"forward-compute": FORWARD, "backward-compute": BACKWARD}
DIRECTIONS = {SENDING: SEND, RECEIVING: RECEIVE}

# The built-in schedules register themselves when they are imported.
assert schedules.ONE_F_ONE_B


class StepUnits:
    """The microbatches and chunks of one rank's latest step, in the order of its plan."""

    def __init__(self, record: RankRecord):
        self._work: dict[str, list[Unit]] = {}
        self._messages: dict[tuple[str, str], list[Unit]] = {}
        step = record.step or {}
        # Without a plan: a stage of one chunk takes its microbatches in turn, whatever its schedule.
        self._count = 0 if step.get("num_model_chunks") != 1 else step.get("num_microbatches") or 0
        for action in _planned_actions(record):
            if action.kind != COMMUNICATE:
                self._work.setdefault(action.kind, []).append((action.microbatch, action.chunk))
            for message in action.messages:
                kind = (message.direction, message.payload)
                unit = (message.microbatch, message.chunk)
                self._messages.setdefault(kind, []).append(unit)

    def of_work(self, name: str | None, number: int | None) -> Unit:
        """Of the n-th "forward-compute" or "backward-compute" of the step."""
        return self._get(self._work, KIND_OF_WORK.get(name or ""), number)

    def of_message(self, call: OpenCall) -> Unit:
        """Of the message that a call starts or waits for."""
        payload = (call.payload or "").removesuffix(" shape")
        return self._get(self._messages, (DIRECTIONS[call.doing], payload), call.number)

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
    try:
        config = PlanConfig(**record.step)
        stage = Stage(config, record.pipeline.index(record.rank))
        return list(get_schedule(config.schedule)(stage))
    except (TypeError, ValueError, ArithmeticError, LookupError):
        # A schedule this process does not know, or sizes that no plan has: then there is no plan.
        return ()


def unit_in_words(unit: Unit, record: RankRecord) -> str:
    """ "microbatch 2", and its chunk where the rank has several; empty if it is not known."""
    microbatch, chunk = unit
    if microbatch is None:
        return ""
    has_chunks = (record.step or {}).get("num_model_chunks", 1) > 1 or (chunk or 0) > 0
    return f"microbatch {microbatch}" + (f", chunk {chunk}" if has_chunks else "")
