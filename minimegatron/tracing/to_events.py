"""From what was kept while recording to events: names, phases, one clock, lines of source.

Megatron has no counterpart.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from minimegatron.core.orders.orders import COMBINED, GPIPE, INTERLEAVED
from minimegatron.core.orders.phases import phase_counts
from minimegatron.core.orders.phases import phases_of as phases_of_actions
from minimegatron.planner.actions import (
    CALL,
    COMMUNICATE,
    PAIR,
    Action,
    Event,
    Message,
    parts_of,
)
from minimegatron.planner.links import KIND_OF_LINK
from minimegatron.planner.plan import Plan, plan_config_from_json
from minimegatron.planner.registry import schedule_names
from minimegatron.planner.stage import PlanConfig
from minimegatron.tracing.clock import Alignment, to_rank_0
from minimegatron.tracing.identity import CALLS, SeenMessage
from minimegatron.tracing.rank_trace import ClockFigures, RankTrace
from minimegatron.tracing.recorded_source import SourceTexts, module_name, short_path
from minimegatron.tracing.step import plan_of

PlanOf = Callable[[PlanConfig], Plan]


def to_rank_trace(recorder: Any, begin: Alignment, end: Alignment | None) -> RankTrace:
    """A `Recorder`'s records as a `RankTrace`, in microseconds since the recording began."""
    surroundings = recorder.surroundings
    # Without `end` the block raised, and the GPU may never come to an end of what it waits for.
    converter = _Converter(recorder, _clock(recorder, begin, end), wait_for_gpu=end is not None)
    events = _with_phases([converter.event(record) for record in recorder.records])
    lines = None if recorder.lines is None else recorder.lines.step_lines(converter.texts)
    ends = [begin] if end is None else [begin, end]
    of_device = 0 if recorder.device_clock is None else recorder.device_clock.residual
    return RankTrace(
        rank=surroundings.rank,
        world_size=surroundings.world_size,
        coordinates=surroundings.coordinates,
        sizes=surroundings.sizes,
        device="cpu" if recorder.device_clock is None else "cuda",
        clock=ClockFigures(
            begin.offset / 1e3,
            (max(alignment.residual for alignment in ends) + of_device) / 1e3,
            (max(alignment.worst_residual for alignment in ends) + of_device) / 1e3,
            begin.is_shared,
        ),
        pace=None if surroundings.pace is None else surroundings.pace.lengths(),
        is_cut=recorder.is_cut or (recorder.lines is not None and recorder.lines.is_cut),
        events=events,
        stacks=converter.texts.stacks,
        sources=converter.texts.sources,
        lines=lines,
    )


def _clock(recorder: Any, begin: Alignment, end: Alignment | None) -> Callable[[int], float]:
    """Nanoseconds of this rank's clock -> microseconds since rank 0 began recording."""

    def read(when: int) -> float:
        return (to_rank_0(when, begin, end) - begin.at_rank_0) / 1e3

    return read


class _Converter:
    """Makes the events of one rank, one after the other."""

    def __init__(self, recorder: Any, read: Callable[[int], float], wait_for_gpu: bool):
        self.texts = SourceTexts(recorder.codes)
        self._events: list[Event] = []
        self._read, self._ended = read, recorder.ended
        clock = recorder.device_clock
        self._time_of = None if clock is None else clock.times(wait=wait_for_gpu)
        self._spans = {} if clock is None else recorder.communicator_clock.spans(self._time_of)
        self._pp_rank = recorder.surroundings.coordinates["pp"]
        self._step = -1

    def event(self, record: Any) -> Event:
        """The event of the next record."""
        symbol, file = record.symbol, record.file
        if symbol.startswith("__main__."):
            symbol = module_name(file) + symbol.removeprefix("__main__")
        parent = None if record.parent is None else self._events[record.parent.index]
        attributes = self._attributes(record, parent)
        start, end = self._times(record, attributes)
        event = Event(
            self._action(record, parent, attributes),
            start,
            end,
            name=record.name,
            symbol=symbol,
            file=short_path(file),
            line=record.line,
            parent=None if record.parent is None else record.parent.index,
            attributes=attributes,
        )
        self.texts.add_function(file, record.line, symbol)
        self._events.append(event)
        return event

    def _attributes(self, record: Any, parent: Event | None) -> dict[str, Any]:
        attributes = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in record.attributes.items()
            if key not in ("microbatch", "chunk", "stage")
        }
        if "config" in attributes:
            self._step += 1
            attributes["step"] = self._step
        elif parent is not None and "step" in parent.attributes:
            attributes["step"] = parent.attributes["step"]
        if record.frames:
            attributes["stack"] = self.texts.add_stack(record.frames)
        finding = record.finding
        if finding is not None and finding.messages:
            attributes["shape"] = list(finding.messages[0].shape)
            attributes["dtype"] = finding.messages[0].dtype
        if finding is not None and finding.ordinal is not None:
            attributes.pop("number", None)
            attributes["ordinal"] = finding.ordinal
        return attributes

    def _times(self, record: Any, attributes: dict[str, Any]) -> tuple[float, float]:
        host_end = record.end
        if host_end is None:
            attributes["unfinished"] = True
            host_end = self._ended
        start, end = self._read(record.start), self._read(host_end)
        if self._time_of is not None and record.marks is not None and len(record.marks) == 2:
            times = [self._time_of(mark) for mark in record.marks]
            if None in times:
                attributes["unfinished"] = True  # on the GPU; the program went on
            else:
                attributes["host_start"], attributes["host_end"] = start, end
                start, end = map(self._read, times)
        if record.index in self._spans:
            communicator, *times = self._spans[record.index]
            attributes["communicator"] = communicator
            attributes["device_start"], attributes["device_end"] = map(self._read, times)
        return start, end

    def _action(self, record: Any, parent: Event | None, attributes: dict[str, Any]) -> Action:
        finding = record.finding
        if record.name in CALLS and finding is not None:
            return Action(
                COMMUNICATE,
                self._pp_rank,
                call=record.symbol.rpartition(".")[2],
                messages=tuple(map(_message, finding.messages_as_started())),
                overlap=finding.overlap,
            )
        if finding is not None and finding.halves:
            parts = tuple(Action(kind, self._pp_rank, None, *unit) for kind, unit in finding.halves)
            return parts[0] if len(parts) == 1 else Action(PAIR, *parts[0][1:5], parts=parts)
        microbatch, chunk = record.attributes.get("microbatch"), record.attributes.get("chunk")
        if finding is not None and finding.unit is not None:
            microbatch, chunk = finding.unit
        elif "begun" in record.attributes:  # the wait for a collective is of what began it
            begun = self._events[record.attributes["begun"]].action
            microbatch, chunk = begun.microbatch, begun.chunk
        elif (
            parent is not None
            and parent.action.kind not in (COMMUNICATE, PAIR)
            and microbatch is None
        ):
            microbatch, chunk = parent.action.microbatch, parent.action.chunk
        kind = KIND_OF_LINK.get(record.name, CALL)
        return Action(kind, self._pp_rank, None, microbatch, chunk)


def _message(seen: SeenMessage) -> Message:
    microbatch, chunk = seen.unit if seen.unit is not None else (None, None)
    return Message(seen.direction, seen.payload, seen.peer, microbatch, chunk, seen.num_bytes)


# -- Phases --


def _with_phases(events: list[Event]) -> list[Event]:
    """Says of every action whether it belongs to warm-up, steady state or cool-down."""
    events = list(events)
    steps: dict[int, list[int]] = {}
    configs: dict[int, dict[str, Any]] = {}
    for index, event in enumerate(events):
        step = event.attributes.get("step")
        if "config" in event.attributes:
            steps[step], configs[step] = [], event.attributes["config"]
        elif event.action.kind != CALL and step in steps:
            steps[step].append(index)
    planned = lru_cache(maxsize=4)(plan_of)  # most steps of a recording have one plan
    for step, indices in steps.items():
        actions = [events[index].action for index in indices]
        phases = phases_of(actions, plan_config_from_json(configs[step]), planned)
        for index, phase in zip(indices, phases, strict=True):
            event = events[index]
            parts = tuple(part._replace(phase=phase) for part in event.action.parts)
            events[index] = replace(event, action=event.action._replace(phase=phase, parts=parts))
    return events


def phases_of(
    actions: list[Action], config: PlanConfig, planned: PlanOf = plan_of
) -> list[str | None]:
    """The phase of each action of one rank's step.

    Of the written schedules, arithmetic gives it (`core.orders.phases`). Other schedules, and those
    whose messages were lowered, say it in their plan (`planned`).
    """
    counts = phase_counts(config, actions[0].rank if actions else 0)
    # Of combined turns the pairs must be known, and their plan knows them.
    if counts is None or config.wire is not None or config.schedule in (GPIPE, COMBINED):
        return _planned_phases(actions, config, planned)
    kinds = [action.call or action.kind for action in actions]
    return phases_of_actions(kinds, counts, config.schedule == INTERLEAVED)


def _planned_phases(actions: list[Action], config: PlanConfig, planned: PlanOf) -> list[str | None]:
    """The phases that the plan gives its actions, where the run did just these."""
    unknown: list[str | None] = [None] * len(actions)
    if config.schedule not in schedule_names() or not actions:
        return unknown
    try:
        plan = planned(config)
    except ValueError:  # a run that no plan has is still worth its recording
        return unknown
    in_plan = [part for action in plan.ranks[actions[0].rank] for part in parts_of(action)]
    # A run does a pair's two parts one after the other, or both in a combined turn.
    done = [(number, part) for number, action in enumerate(actions) for part in parts_of(action)]
    if [action._replace(phase=None) for action in in_plan] != [part for _, part in done]:
        return unknown
    phases = unknown
    for (number, _), planned_part in zip(done, in_plan, strict=True):
        phases[number] = planned_part.phase
    return phases
