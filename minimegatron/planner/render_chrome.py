"""A timeline for https://ui.perfetto.dev and chrome://tracing: the trace-event format.

Megatron has no counterpart.

One process per rank, with one track for forwards and backwards and one for communication calls; an
arrow for each message, from the work that made the tensor to the work that needs it; a counter of
microbatches in flight. The two parts of a pair are slices of one length, which viewers draw one
below the other. Format: "Trace Event Format" of the Chromium project, its JSON object form.
"""

import json
from collections.abc import Iterator
from typing import Any

from minimegatron.planner.actions import (
    COMMUNICATE,
    KINDS,
    SCHEMA,
    Action,
    Time,
    describe_message,
    parts_of,
    version_of,
)
from minimegatron.planner.imagined_transport import Place, Side, match_messages
from minimegatron.planner.layer_costs import has_lanes, lanes_of
from minimegatron.planner.layer_plan import ALL_TO_ALL, COMPUTE, RING_HOP, TimedNode
from minimegatron.planner.memory import activation_timeline
from minimegatron.planner.plan import plan_config_to_json
from minimegatron.planner.plan_report import gap_words, title
from minimegatron.planner.simulator import Simulation

COMPUTE_TRACK, MESSAGE_TRACK = 0, 1
TRACKS = {COMPUTE_TRACK: "forward and backward", MESSAGE_TRACK: "communication"}
NODE_TRACKS = {COMPUTE: 2, ALL_TO_ALL: 3, RING_HOP: 4}
"""By the lane of a node; only where the costs have nodes of layers."""


def render_chrome(simulation: Simulation, microseconds_per_unit: float = 1000.0) -> str:
    """The timeline as JSON text. One unit of simulated time is drawn as a millisecond."""
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {
            "schema": SCHEMA,
            "version": version_of(a for actions in simulation.plan.ranks for a in actions),
            "title": title(simulation),
            "source": "simulation",
            "config": plan_config_to_json(simulation.plan.config),
            "summary": simulation.summary(),
        },
        "traceEvents": list(_Trace(simulation, microseconds_per_unit).events()),
    }
    return json.dumps(trace, separators=(",", ":")) + "\n"


class _Trace:
    def __init__(self, simulation: Simulation, microseconds_per_unit: float):
        self.simulation = simulation
        self.factor = microseconds_per_unit
        self.lanes = []
        if has_lanes(simulation):
            self.lanes = [lanes_of(simulation, x) for x in range(len(simulation.plan.ranks))]

    def _us(self, time: Time) -> float:
        return round(float(time) * self.factor, 3)

    def events(self) -> Iterator[dict[str, Any]]:
        for rank in range(len(self.simulation.plan.ranks)):
            yield from self._names(rank)
            yield from self._slices(rank)
            if self.lanes:
                yield from self._nodes(rank)
            yield from self._counter(rank)
        yield from self._arrows()

    def _names(self, rank: int) -> Iterator[dict[str, Any]]:
        names = [
            ("process_name", 0, {"name": f"rank {rank}"}),
            ("process_sort_index", 0, {"sort_index": rank}),
        ]
        tracks = TRACKS
        if self.lanes:
            shown = [COMPUTE, *self.lanes[rank].hidden_lanes]
            tracks = TRACKS | {NODE_TRACKS[lane]: f"layers: {lane}" for lane in shown}
        for tid, name in tracks.items():
            names.append(("thread_name", tid, {"name": name}))
            names.append(("thread_sort_index", tid, {"sort_index": tid}))
        for name, tid, args in names:
            yield {"ph": "M", "pid": rank, "tid": tid, "name": name, "args": args}

    def _slices(self, rank: int) -> Iterator[dict[str, Any]]:
        simulation = self.simulation
        gaps = {gap.before: gap for gap in simulation.gaps(rank)}
        for index, action in enumerate(simulation.plan.ranks[rank]):
            for part in parts_of(action):
                event, args = self._slice(rank, index, part)
                if index in gaps:
                    args["idle before"] = gap_words(simulation, gaps[index])
                if action.phase:
                    args["phase"] = action.phase
                yield event | {"args": args}

    def _slice(self, rank: int, index: int, action: Action) -> tuple[dict, dict]:
        """The slice of a call, or of single work, and its arguments."""
        simulation = self.simulation
        start = self._us(simulation.starts[rank][index])
        event = {
            "ph": "X",
            "pid": rank,
            "tid": MESSAGE_TRACK if action.kind == COMMUNICATE else COMPUTE_TRACK,
            "ts": start,
            "dur": round(self._us(simulation.ends[rank][index]) - start, 3),
        }
        if action.kind == COMMUNICATE:
            args: dict[str, Any] = {"messages": [describe_message(m) for m in action.messages]}
            args["waiting_us"] = self._us(simulation.waits[rank][index])
            return event | {"name": action.call, "cat": "communication"}, args
        args = {"microbatch": action.microbatch, "chunk": action.chunk}
        name = f"{KINDS[action.kind].words} {action.microbatch}"
        return event | {"name": name, "cat": action.kind}, args

    def _nodes(self, rank: int) -> Iterator[dict[str, Any]]:
        lanes = self.lanes[rank]
        exposed: dict[TimedNode, float] = {}
        for timed, start, end in lanes.exposed_parts():
            exposed[timed] = exposed.get(timed, 0) + self._us(end) - self._us(start)
        for timed in lanes.nodes:
            node, start = timed.node, self._us(timed.start)
            args = {"microbatch": node.microbatch, "chunk": node.chunk, "layer": node.layer}
            if timed in exposed:
                args["exposed_us"] = round(exposed[timed], 3)
            yield {
                "ph": "X",
                "pid": rank,
                "tid": NODE_TRACKS[node.lane],
                "ts": start,
                "dur": round(self._us(timed.end) - start, 3),
                "name": f"{node.name} {KINDS[node.kind].letter}{node.microbatch}",
                "cat": node.kind,
                "args": args,
            }

    def _counter(self, rank: int) -> Iterator[dict[str, Any]]:
        if self.simulation.plan.config.forward_only:
            return
        for time, held in activation_timeline(self.simulation, rank):
            yield {
                "ph": "C",
                "pid": rank,
                "ts": self._us(time),
                "name": "microbatches in flight",
                "args": {"held": held},
            }

    def _arrows(self) -> Iterator[dict[str, Any]]:
        makers, takers = {}, {}
        for rank, actions in enumerate(self.simulation.plan.ranks):
            for index, action in enumerate(actions):
                if action.kind != COMMUNICATE:
                    for part in parts_of(action):
                        unit, kind = (rank, part.microbatch, part.chunk), KINDS[part.kind]
                        makers[kind.gives, *unit] = takers[kind.takes, *unit] = (rank, index)
        number = 0
        for sends, receives in match_messages(self.simulation.plan).values():
            for send, receive in zip(sends, receives, strict=False):
                source, target = makers.get(_tensor(send)), takers.get(_tensor(receive))
                if source is not None and target is not None:
                    yield from self._arrow(number, send.message.payload, source, target)
                    number += 1

    def _arrow(
        self, number: int, payload: str, source: Place, target: Place
    ) -> Iterator[dict[str, Any]]:
        # Viewers bind an arrow's ends to the slices around these moments, so its start lies just
        # inside the slice that made the tensor.
        begin = self.simulation.starts[source[0]][source[1]]
        end = self.simulation.ends[source[0]][source[1]]
        common = {"cat": "message", "name": payload, "id": number, "tid": COMPUTE_TRACK}
        inside = self._us(begin) + 0.999 * (self._us(end) - self._us(begin))
        yield {"ph": "s", "pid": source[0], "ts": round(inside, 3)} | common
        arrival = self._us(self.simulation.starts[target[0]][target[1]])
        yield {"ph": "f", "bp": "e", "pid": target[0], "ts": arrival} | common


def _tensor(side: Side) -> tuple[str, int, int, int]:
    """What is moved, as the work of this end knows it: payload, rank, microbatch, chunk."""
    message = side.message
    return message.payload, side.place[0], message.microbatch, message.chunk
