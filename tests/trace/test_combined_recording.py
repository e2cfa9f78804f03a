"""Recordings of combined 1F1B: pairs, nodes of layers, all-to-alls in flight and exposed.

Played before a `Recorder` on one stage, in the order of a program that waits where it must; a clock
that jumps stands in for computing. Real ranks are in test_paced_overlap.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minimegatron.core.collectives import Done, Pending
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.tracing import observed_by, traced
from minimegatron.planner.actions import BACKWARD, FORWARD, PAIR
from minimegatron.planner.layer_plan import Half, LayerCosts, Node, one_stage, step_nodes
from minimegatron.tracing.chrome import chrome_trace
from minimegatron.tracing.clock import Alignment
from minimegatron.tracing.compare import compare_with_plan
from minimegatron.tracing.html import page_data
from minimegatron.tracing.lanes import exposure, in_flight, lanes_of
from minimegatron.tracing.node_order import wrong_nodes
from minimegatron.tracing.rank_trace import RankTrace
from minimegatron.tracing.recorder import Recorder
from minimegatron.tracing.recording_shape import check_recording
from minimegatron.tracing.step import Step
from minimegatron.tracing.to_events import to_rank_trace
from minimegatron.tracing.trace_view import Trace
from tests.trace.fake_run import MS, Clock

M, LAYERS = 3, [LayerCosts(2, 2, 3, 1)] * 2
"""Milliseconds: the dispatch does not fit behind everything."""
PACE = {"forward_ms": 8.0, "backward_ms": 16.0, "attention_ms": 2.0, "mlp_ms": 2.0}


def _describe_node(arguments):
    node = arguments["node"]
    names = ("kind", "layer", "lane", "microbatch", "chunk")
    told = {name: getattr(node, name) for name in names}
    return {"node": node.name, "direction": told.pop("kind"), **told}


class Program:
    """Runs combined steps as the runtime does."""

    def __init__(self):
        self.clock, self.wire_is_free, self.arrives = Clock(), 0, {}

    # -- The links --

    @traced("combined-step", lambda a: a["of"])
    def step(self, of, nodes, input_tensor=None, b_output_tensor_grad=None):
        flights: dict[tuple, Pending] = {}
        by_kind = {kind: [n for n in nodes if n.kind == kind] for kind in (FORWARD, BACKWARD)}
        for layer in range(len(LAYERS)):
            f = by_kind[FORWARD][4 * layer : 4 * layer + 4]
            b = by_kind[BACKWARD][4 * layer : 4 * layer + 4]
            # start 1, run 2, start 4, wait 1, run 3, start 6, wait 4, run 7, start 8, wait 6, run 9
            for what, half, number in (
                *[("start", b, 0), ("run", f, 0), ("start", f, 1), ("wait", b, 0), ("run", b, 1)],
                *[("start", b, 2), ("wait", f, 1), ("run", f, 2), ("start", f, 3)],
                *[("wait", b, 2), ("run", b, 3), ("wait", f, 3)],
            ):
                if not half:
                    continue
                node = half[number]
                if what == "run":
                    self.run(node)
                elif what == "start":
                    (flights[node],) = self.start(node)
                else:
                    self.wait(flights[node])
        return torch.empty(1), None, None

    @traced("layer-node", _describe_node)
    def run(self, node: Node):
        self.clock.now += int(node.length * MS)

    @traced("layer-node", _describe_node)
    def start(self, node: Node):
        return [self.exchange(torch.empty(4, 2), node)]

    @traced(
        "all-to-all",
        lambda a: {"bytes": 32, "shape": (4, 2), "dtype": "float32", "group_size": 2},
    )
    def exchange(self, input, node: Node):
        handle = Pending(Done(), "all-to-all")
        self.wire_is_free = max(self.wire_is_free, self.clock.now) + int(node.length * MS)
        self.arrives[handle] = self.wire_is_free
        return handle

    @traced("collective-wait", lambda a: {"collective": "all-to-all"})
    def wait(self, handle: Pending):
        self.clock.now = max(self.clock.now, self.arrives[handle])


def _half(kind: str, number: int | None) -> Half | None:
    return None if number is None else Half(kind, number, 0, LAYERS)


@pytest.fixture(scope="module")
def recorded() -> RankTrace:
    program = Program()
    config = ModelParallelConfig(overlap_moe_expert_parallel_comm=True)
    config.hidden_size = 2
    model = SimpleNamespace(config=config)

    @traced("forward-backward", lambda a: {})
    def forward_backward_no_pipelining(model, num_microbatches, forward_only, p2p_communicator):
        for f, b in zip([*range(M), None], [None, *range(M)], strict=True):
            of = {"f_microbatch": f, "f_chunk": None if f is None else 0}
            of |= {"b_microbatch": b, "b_chunk": None if b is None else 0}
            program.step(of, step_nodes(_half(FORWARD, f), _half(BACKWARD, b)))

    recorder = Recorder(program.clock.read)
    with observed_by(recorder):
        forward_backward_no_pipelining(
            model=model, num_microbatches=M, forward_only=False, p2p_communicator=None
        )
    recorder.close()
    return to_rank_trace(recorder, Alignment(), None)


@pytest.fixture(scope="module")
def step(recorded) -> Step:
    return Trace([recorded]).step(0)


def close(microseconds: float) -> object:
    """Every reading of the clock takes one."""
    return pytest.approx(microseconds, rel=0.02)


EXPECTED = one_stage(M, LAYERS, joined=True)


def test_steps_are_pairs_of_the_plan(step):
    assert step.config.schedule == "combined"
    assert [action.kind for action in step.actions(0)] == [FORWARD, PAIR, PAIR, BACKWARD]
    assert compare_with_plan(step) == []
    assert [[x.microbatch for x in action.parts] for action in step.actions(0)[1:3]] == [
        [1, 0],
        [2, 1],
    ]
    assert [action.phase for action in step.actions(0)] == [
        "warmup",
        "steady",
        "steady",
        "cooldown",
    ]
    assert all(x.phase == "steady" for x in step.actions(0)[1].parts)
    assert step.kinds == [FORWARD, BACKWARD]


def test_nodes_and_waits_are_of_their_own_microbatch(step):
    events = step.events[0].values()
    nodes = [event for event in events if event.name == "layer-node"]
    assert len(nodes) == M * 2 * 8
    for event in events:
        if event.name in ("all-to-all", "collective-wait"):
            index = event.attributes.get("begun")
            at = event if index is None else step.events[0][index]
            assert event.action.microbatch == step.events[0][at.parent].action.microbatch


def test_nodes_are_those_of_the_plan(recorded):
    assert wrong_nodes(Trace([recorded]).step(0)) == []
    # Two all-to-alls of a pair the other way round: the other ranks would wait for ever.
    nodes = [n for n, event in enumerate(recorded.events) if event.name == "layer-node"]
    exchanges = [n for n in nodes if recorded.events[n].attributes["lane"] == "all-to-all"]
    one, other = exchanges[4:6]
    events = list(recorded.events)
    for here, there in ((one, other), (other, one)):
        node = recorded.events[there]
        events[here] = replace(events[here], action=node.action, attributes=node.attributes)
    (problem,) = wrong_nodes(Trace([replace(recorded, events=events)]).step(0))
    assert problem == (
        "stage 0, all-to-all, node 4: expected combine of layer 1, backward of microbatch 0, chunk 0, "
        "found dispatch of layer 0, forward of microbatch 1, chunk 0"
    )
    report = Trace([replace(recorded, events=events)]).report()
    assert "plan: NOT followed" in report and problem in report


def test_what_is_exposed_is_what_the_lanes_say(step):
    found = exposure(step.events[0])
    assert found.number == M * 2 * 4
    assert found.exposed == close(1e3 * EXPECTED.exposed)
    assert step.makespan == close(1e3 * EXPECTED.total)
    assert found.in_flight > found.exposed
    assert float(step.simulation.makespan) == close(step.makespan)


def test_an_all_to_all_is_over_after_the_first_wait_for_it(step):
    """A program that waits at once and later once more has hidden nothing."""
    events = dict(step.events[0])
    waits = [event for event in events.values() if "begun" in event.attributes]
    for number, wait in enumerate(waits, max(events) + 1):
        events[number] = replace(wait, start=step.end, end=step.end + 1)
    spans = [[(bar.start, bar.end) for bar in in_flight(x)] for x in (step.events[0], events)]
    assert waits and spans[0] == spans[1]


def test_the_pace_of_nodes_gives_the_plan_its_costs(recorded):
    recorded = replace(recorded, pace=PACE | {"all_to_all_ms": 1.5})
    step = Trace([recorded]).step(0)
    lanes = one_stage(M, [LayerCosts(2, 2, 1.5, 1.5)] * 2, joined=True)
    assert float(step.simulation.makespan) == close(1e3 * lanes.total)
    assert step.num_late > 0  # it was played with a longer dispatch
    report = Trace([recorded]).report()
    assert "attention 2 ms, mlp 2 ms, all-to-all 1.5 ms" in report
    assert f"by the pace {float(lanes.exposed):.1f} ms" in report


def test_the_report_sums_what_is_exposed(recorded):
    line = Trace([recorded]).report().splitlines()[-1]
    assert line.startswith("  stage 0: 24, in flight ")
    assert line.split("exposed ")[1].startswith(f"{float(EXPECTED.exposed):.1f}"[:2])


def test_text_has_a_lane(step, recorded):
    compute, exchanges, *_ = lanes_of(step)[0]
    assert exchanges.name == "all-to-all" and len(exchanges.bars) == M * 2 * 4
    assert [bar.label for bar in compute.bars] == ["F0", "F1&B0", "F2&B1", "B2"]
    text = Trace([recorded]).lanes(width=120)
    line = next(line for line in text.splitlines() if line.startswith("  all-to-all"))
    assert "/" in line and "-" in line
    assert "/ it is waited for (exposed)" in " ".join(text.split())


def test_files_hold_pairs_and_flights(recorded, tmp_path):
    data = json.loads(json.dumps(recorded.to_json()))
    check_recording(data)
    assert Trace([RankTrace.from_json(data)]).step(0).actions(0) == Trace([recorded]).step(
        0
    ).actions(0)
    events = chrome_trace(Trace([recorded]))["traceEvents"]
    begun = [event for event in events if event["ph"] == "b"]
    assert len(begun) == len([e for e in events if e["ph"] == "e"]) == M * 2 * 4
    assert sum(e["args"]["exposed us"] for e in begun) == close(1e3 * EXPECTED.exposed)
    assert any(event["name"] == "F1 & B0" for event in events)
    page = page_data(Trace([recorded]))
    rank = page["steps"][0]["ranks"][0]
    assert len(rank["flights"]) == M * 2 * 4
    pairs = [event["q"] for event in rank["events"] if "q" in event]
    assert pairs == [
        [["forward", 1, 0], ["backward", 0, 0]],
        [["forward", 2, 0], ["backward", 1, 0]],
    ]
    Trace([recorded]).plot(tmp_path / "x.png", plan=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parts": []}, r"is a pair of parts \[\]"),
        ({"kind": "forward"}, r"is a forward of parts \['forward', 'backward'\]"),
        ({"parts": [{"kind": 1, "rank": 0}] * 2}, "kind is 1, not str"),
    ],
)
def test_pairs_that_no_run_makes_are_refused(recorded, change, says):
    data = json.loads(json.dumps(recorded.to_json()))
    pair = next(event for event in data["ranks"][0] if event["kind"] == PAIR)
    pair |= change
    with pytest.raises(ValueError, match=says):
        check_recording(data)
