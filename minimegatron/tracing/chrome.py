"""A trace for Perfetto and chrome://tracing: a process per rank, nested calls, arrows for messages.

Torch-free. Megatron has no counterpart. Format: "Trace Event Format" (Google, 2016), JSON object
form.

Each rank is a process with two threads: its calls, and what they waited for. An all-to-all, or a hop
of attention's ring, is an asynchronous slice from its start to the end of the wait for it. On GPUs over
NCCL there is one thread more per communicator, with what it did. A message is an arrow from where its
sender started it to where its receiver had it.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

from minimegatron.core.datasets.atomic_file import write_atomically
from minimegatron.core.orders.work import HIDDEN
from minimegatron.planner.actions import COMMUNICATE, KINDS, Event
from minimegatron.tracing.lanes import COLLECTIVE, communications, exposed_of, in_flight
from minimegatron.tracing.rank_trace import RankTrace
from minimegatron.tracing.run import Run
from minimegatron.tracing.step import Step, Transfer
from minimegatron.tracing.trace_words import (
    action_name,
    event_title,
    function_name,
    message_words,
    moved_words,
    pace_words,
)

CALLS, WAITS, FIRST_COMMUNICATOR = 0, 1, 2
"""Thread ids within each process."""


def write_chrome(run: Run, path: str | os.PathLike) -> None:
    """Writes all ranks and steps of a run."""
    text = json.dumps(chrome_trace(run), separators=(",", ":"))
    write_atomically(path, text.encode(), makes_folder=False)


def chrome_trace(run: Run) -> dict[str, Any]:
    """The whole as a dict for `json.dumps`."""
    steps = [
        run.step(number, **pipeline)
        for pipeline in run.pipelines()
        for number in range(run.num_steps)
        if run.is_whole(**pipeline)
    ]
    refined: dict[int, dict[int, Event]] = {rank.rank: {} for rank in run.ranks}
    for step in steps:
        for stage, events in zip(step.stages, step.events, strict=True):
            refined[stage.rank].update(events)
    events = [
        line
        for rank in run.ranks
        for part in (_process, _calls, _lanes)
        for line in part(rank, refined[rank.rank])
    ]
    first_id = 0
    for step in steps:
        events += _arrows(step, first_id)
        first_id += len(step.transfers)
    paces = {pace_words(rank.pace) for rank in run.ranks} - {""}
    other = {"made by": "minimegatron", "clocks": run.clock_words}
    if paces:
        other["paced"] = ", ".join(sorted(paces))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _process(rank: RankTrace, refined: dict[int, Event]) -> Iterator[dict[str, Any]]:
    where = ", ".join(
        f"{axis} {rank.coordinates[axis]}" for axis in ("tp", "dp", "cp") if rank.sizes[axis] > 1
    )
    name = f"rank {rank.rank}: stage {rank.coordinates['pp']}" + (f", {where}" if where else "")
    if rank.pace is not None:
        name += f" ({pace_words(rank.pace)})"
    for kind, tid, arguments in (
        ("process_name", CALLS, {"name": name}),
        ("process_sort_index", CALLS, {"sort_index": rank.rank}),
        ("thread_name", CALLS, {"name": "calls"}),
        ("thread_name", WAITS, {"name": "waiting and transfer"}),
    ):
        yield {"ph": "M", "name": kind, "pid": rank.rank, "tid": tid, "ts": 0, "args": arguments}


def _calls(rank: RankTrace, refined: dict[int, Event]) -> Iterator[dict[str, Any]]:
    num_chunks = 1 + max((event.action.chunk or 0 for event in rank.events), default=0)
    for index, event in enumerate(rank.events):
        event = refined.get(index, event)
        yield {
            "ph": "X",
            "name": _name(event, num_chunks),
            "cat": event.action.kind,
            "pid": rank.rank,
            "tid": CALLS,
            **_span(event.start, event.end),
            "args": _arguments(rank, event, num_chunks),
        }
        if event.name == "p2p-wait":
            yield from _wait_parts(rank, event)


def _lanes(rank: RankTrace, refined: dict[int, Event]) -> Iterator[dict[str, Any]]:
    yield from _in_flight(rank)
    of_communicators = communications(refined.get(i, event) for i, event in enumerate(rank.events))
    for tid, name in enumerate(sorted(of_communicators), FIRST_COMMUNICATOR):
        place = {"pid": rank.rank, "tid": tid}
        yield {"ph": "M", "name": "thread_name", **place, "ts": 0, "args": {"name": name}}
        for bar in of_communicators[name]:
            is_collective = bar.kind == COLLECTIVE
            yield {
                "ph": "X",
                "name": bar.events[0].name if is_collective else bar.label,
                "cat": bar.kind,
                **place,
                **_span(bar.start, bar.end),
                "args": {"moves": [moved_words(event) for event in bar.events]},
            }


def _in_flight(rank: RankTrace) -> Iterator[dict[str, Any]]:
    """All-to-alls and hops between start and the end of the wait: they may overlap each other."""
    place = {"pid": rank.rank, "tid": CALLS}
    events = dict(enumerate(rank.events))
    bars = (bar for lane in HIDDEN for bar in in_flight(events, lane))
    for number, bar in enumerate(bars):
        start, end = exposed_of(bar)
        lane = bar.events[0].name
        begin = {
            "name": f"{lane} in flight",
            "cat": lane,
            "id": f"{rank.rank}.{number}",
            **place,
        }
        args = {"moves": moved_words(bar.events[0]), "exposed us": round(end - start, 3)}
        yield {"ph": "b", "ts": round(bar.start, 3), "args": args, **begin}
        yield {"ph": "e", "ts": round(bar.end, 3), **begin}


def _name(event: Event, num_chunks: int) -> str:
    action = event.action
    if action.kind in KINDS:
        return action_name(action, num_chunks)
    return action.call if action.kind == COMMUNICATE else function_name(event)


def _arguments(rank: RankTrace, event: Event, num_chunks: int) -> dict[str, Any]:
    action = event.action
    arguments: dict[str, Any] = {
        "call": event_title(event, num_chunks),
        "symbol": event.symbol,
        "source": f"{event.file}:{event.line}",
        "coordinates": rank.coordinates,
    }
    for key, value in (
        ("phase", action.phase),
        ("microbatch", action.microbatch),
        ("chunk", action.chunk),
        ("messages", [message_words(m, num_chunks) for m in action.messages] or None),
        ("waiting us", round(event.wait, 3) or None),
    ):
        if value is not None:
            arguments[key] = value
    for key, value in event.attributes.items():
        if key not in ("stack", "config"):
            arguments[key] = value
    return arguments


def _wait_parts(rank: RankTrace, event: Event) -> Iterator[dict[str, Any]]:
    middle = event.start + event.wait
    for name, start, end in (("waiting", event.start, middle), ("transfer", middle, event.end)):
        if end - start > 0.002:
            yield {
                "ph": "X",
                "name": f"{name}: {event.attributes['payload']} {event.action.microbatch}",
                "cat": name,
                "pid": rank.rank,
                "tid": WAITS,
                **_span(start, end - 0.002 if end == middle else end),
                "args": {"peer stage": event.attributes["peer"]},
            }


def _span(start: float, end: float) -> dict[str, float]:
    # Whole nanoseconds. Where one ends as the next begins, a viewer's sums must not overlap.
    return {"ts": round(start, 3), "dur": round(round(end, 3) - round(start, 3), 3)}


def _arrows(step: Step, first_id: int) -> Iterator[dict[str, Any]]:
    for number, message in enumerate(step.transfers, first_id):
        if message.arrived_at is None:
            continue
        arrival = message.waited[-1] if message.waited else message.received_by
        ends = (
            ("s", message.sender, message.sent_by, message.sent_at),
            ("f", message.receiver, arrival, message.arrived_at),
        )
        for phase, stage, place, time in ends:
            # A viewer hangs an end on the call that encloses its time; a call's very end is outside.
            event = step.event(place)
            last = event.end - min((event.end - event.start) / 2, 0.01)
            yield {
                "ph": phase,
                "id": number,
                "name": _arrow_name(message),
                "cat": "message",
                "pid": step.stages[stage].rank,
                "tid": CALLS,
                "ts": min(max(time, event.start), last),
                **({"bp": "e"} if phase == "f" else {}),
            }


def _arrow_name(message: Transfer) -> str:
    return f"{message.payload} of microbatch {message.sent_unit[0]}"
