"""Inside a step: the order of nodes, the two lanes, and what a plan with such costs says."""

import json
from fractions import Fraction
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from minimegatron.planner.actions import BACKWARD, BACKWARD_WEIGHT, FORWARD
from minimegatron.planner.layer_costs import LayeredCosts, lanes_of, node_events, ways_of
from minimegatron.planner.layer_plan import (
    Half,
    LayerCosts,
    LayerTimeline,
    Node,
    one_stage,
    run_lanes,
    step_nodes,
)
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.render import render
from minimegatron.planner.render_layers import render_layers
from minimegatron.planner.simulator import Costs, simulate
from tests.planner.known_orders import registered, split_1f1b

TABLE = [
    ((2, 2, 1, 1), {1: (64, 64, 48), 4: (256, 206, 192), 16: (1024, 782, 768)}),
    ((2, 2, 2, 2), {1: (80, 80, 48), 4: (320, 222, 192), 16: (1280, 798, 768)}),
    ((2, 2, 3, 3), {1: (96, 96, 48), 4: (384, 261, 192), 16: (1536, 921, 768)}),
]
"""(attention, mlp, dispatch, combine), and by M: one after the other, combined, compute alone; of four
layers on one stage, with a backward's computation twice a forward's, and ends that take no time."""

LETTERS = {FORWARD: "f", BACKWARD: "b", BACKWARD_WEIGHT: "w"}


def words(nodes: list[Node]) -> str:
    return " ".join(f"{LETTERS[n.kind]}.{n.name}{n.layer}" for n in nodes)


def half(kind: str, *layers: LayerCosts, microbatch: int = 0) -> Half:
    return Half(kind, microbatch, 0, layers)


MOE, DENSE = LayerCosts(2, 2, 1, 1), LayerCosts(2, 3)


# -- The order of nodes --


def test_a_pair_of_layers():
    pair = half(FORWARD, MOE, microbatch=1), half(BACKWARD, MOE)
    assert words(step_nodes(*pair)) == (
        "b.combine0 f.attention0 b.mlp0 f.dispatch0 b.dispatch0 f.mlp0 f.combine0 b.attention0"
    )
    assert words(step_nodes(*pair, delay_wgrad=True)) == (
        "b.combine0 f.attention0 b.mlp0 f.dispatch0 w.mlp0 b.dispatch0 f.mlp0 f.combine0 "
        "b.attention0 w.attention0"
    )


def test_layers_pair_from_both_ends_and_what_is_left_comes_alone():
    forward, backward = half(FORWARD, MOE, microbatch=1), half(BACKWARD, MOE, MOE)
    assert words(step_nodes(forward, backward)) == (
        "b.combine1 f.attention0 b.mlp1 f.dispatch0 b.dispatch1 f.mlp0 f.combine0 b.attention1 "
        "b.combine0 b.mlp0 b.dispatch0 b.attention0"
    )
    longer = step_nodes(half(FORWARD, MOE, MOE, microbatch=1), half(BACKWARD, MOE))
    assert words(longer).endswith("f.attention1 f.dispatch1 f.mlp1 f.combine1")
    assert words(step_nodes(half(FORWARD, MOE))) == "f.attention0 f.dispatch0 f.mlp0 f.combine0"
    assert words(step_nodes(None, half(BACKWARD, MOE))) == (
        "b.combine0 b.mlp0 b.dispatch0 b.attention0"
    )


def test_a_dense_layer_has_no_all_to_alls():
    nodes = step_nodes(half(FORWARD, DENSE, microbatch=1), half(BACKWARD, MOE))
    assert words(nodes) == "b.combine0 f.attention0 b.mlp0 b.dispatch0 f.mlp0 b.attention0"
    # No dispatch of a forward to hide: the backward's own hides behind the dense forward.
    assert run_lanes([nodes]).total == 2 + 4 + 3 + 4


# -- The clock --


@pytest.mark.parametrize(("costs", "by_size"), TABLE)
def test_the_two_stream_table(costs, by_size):
    layers = [LayerCosts(*costs)] * 4
    for M, (one_after_the_other, combined, compute) in by_size.items():
        ordinary, found = one_stage(M, layers, overlap=False), one_stage(M, layers)
        assert (ordinary.total, found.total, found.compute) == (
            one_after_the_other,
            combined,
            compute,
        )
        for lanes in (ordinary, found):
            assert lanes.exposed == lanes.total - lanes.compute
            assert lanes.communication == M * 4 * 2 * (costs[2] + costs[3])


@pytest.mark.parametrize("L", [1, 2, 4])
@pytest.mark.parametrize(
    ("a", "m", "d", "c"), [(2, 2, 1, 1), (3, 2, 2, 1), (5, 4, 3, Fraction(1, 2))]
)
def test_what_is_exposed_when_all_fits(L, a, m, d, c):
    """The first forward's and the last backward's, less both seams: 2c <= a, d <= m.

    At the first seam two combines stand one behind the other beside one forward attention.
    """
    layers = [LayerCosts(a, m, d, c)] * L
    for M in (2, 5, 9):
        assert one_stage(M, layers).exposed == 2 * L * (d + c) - 2 * c
        # Where a step's end is waited for, nothing hides at the seams.
        assert one_stage(M, layers, joined=True).exposed == 2 * L * (d + c)


def by_hand(steps: list[list[Node]]) -> LayerTimeline:
    """A program on a CPU: an all-to-all starts when its input exists, and is waited for before its use.

    start 1, run 2, start 4, wait 1, run 3, start 6, wait 4, run 7, start 8, wait 6, run 9, wait 8.
    """
    now, comm_free, under_way, found = 0, 0, {}, {}
    for nodes in steps:
        [c_b, a_f, m_b, d_f, d_b, m_f, c_f, a_b] = nodes
        for what, node in [
            *[("start", c_b), ("run", a_f), ("start", d_f), ("wait", c_b), ("run", m_b)],
            *[("start", d_b), ("wait", d_f), ("run", m_f), ("start", c_f), ("wait", d_b)],
            *[("run", a_b), ("wait", c_f)],
        ]:
            if what == "run":
                found[node] = (now, now + node.length)
                now += node.length
            elif what == "start":
                start = max(now, comm_free)
                comm_free = under_way[node] = start + node.length
                found[node] = (start, comm_free)
            else:
                now = max(now, under_way[node])
    return found


@pytest.mark.parametrize("costs", [(2, 2, 1, 1), (2, 2, 3, 3), (1, 4, 6, 2), (4, 1, 2, 9)])
def test_the_order_of_a_program_on_a_cpu_gives_the_same_lanes(costs):
    """Of one pair: a program that waits for a step's end has those of `joined`."""
    layers = [LayerCosts(*costs)]
    nodes = step_nodes(half(FORWARD, *layers, microbatch=1), half(BACKWARD, *layers))
    timeline = run_lanes([nodes, [n._replace(layer=1) for n in nodes]], joined=True)
    expected = by_hand([nodes, [n._replace(layer=1) for n in nodes]])
    assert {timed.node: (timed.start, timed.end) for timed in timeline.nodes} == expected


def test_each_lane_does_one_thing_at_a_time_and_each_microbatch_too():
    lanes = one_stage(3, [MOE, DENSE, LayerCosts(1, 4, 5, 2)], delay_wgrad=True)
    for lane in ("compute", "all-to-all"):
        nodes = [timed for timed in lanes.nodes if timed.node.lane == lane]
        assert all(one.end <= other.start for one, other in pairwise(nodes))
    for microbatch in range(3):
        chain = [
            timed
            for timed in lanes.nodes
            if timed.node.microbatch == microbatch and timed.node.kind != BACKWARD_WEIGHT
        ]
        assert all(one.end <= other.start for one, other in pairwise(chain))
        assert len(chain) == 2 * (4 + 2 + 4)
    assert sum(t.node.kind == BACKWARD_WEIGHT for t in lanes.nodes) == 3 * 3 * 2


def test_delayed_weight_gradients_hide_the_backwards_dispatch():
    """With a long dispatch the lanes tear open; weight gradients are computed in the tear."""
    for d in (2, 3, 4):
        layers = [LayerCosts(2, 2, d, 1)] * 4
        plain, delayed = (one_stage(8, layers, delay_wgrad=delay) for delay in (False, True))
        assert plain.compute == delayed.compute
        assert delayed.exposed < plain.exposed


def test_costs_that_make_no_sense():
    with pytest.raises(ValueError, match="mlp takes -1, which is negative"):
        LayerCosts(1, -1)
    with pytest.raises(ValueError, match="dispatch takes 1 and combine None; give both"):
        LayerCosts(1, 1, 1)


# -- Costs of a plan --


def test_a_simulation_has_the_lengths_of_its_lanes():
    layers = [[MOE] * 2, [MOE] * 3, [MOE], [MOE] * 2]
    step = simulate(plan("combined", 2, 4, 2), LayeredCosts.of_layers(layers))
    assert step.costs.forward == [12, 18, 6, 12]
    assert step.costs.backward == [20, 30, 10, 20]
    for rank in range(2):
        assert lanes_of(step, rank).compute == 4 * 12 * sum(
            len(layers[s]) for s in (rank, rank + 2)
        )
        for index, action in enumerate(step.plan.ranks[rank]):
            if not action.parts:
                continue
            f, b = (layers[part.chunk * 2 + rank] for part in action.parts)
            halves = half(FORWARD, *f, microbatch=1), half(BACKWARD, *b)
            length = step.ends[rank][index] - step.starts[rank][index]
            assert length == run_lanes([step_nodes(*halves)]).total
            assert length < 6 * len(f) + 10 * len(b)


def test_one_stage_is_that_of_the_clock_with_joined_steps():
    for delay in (False, True):
        costs = LayeredCosts.of_layers([[MOE] * 4], delay_wgrad=delay)
        step = simulate(plan("combined", 1, 5), costs)
        lanes = one_stage(5, [MOE] * 4, delay_wgrad=delay, joined=True)
        assert lanes_of(step, 0).nodes == lanes.nodes
        assert step.makespan == lanes.total


def test_three_ways():
    costs = LayeredCosts.of_layers([[MOE] * 4])
    found = {name: way.makespan for name, way in ways_of(simulate(plan("combined", 1, 4), costs))}
    assert found == {"ordinary": 256, "combined": 208, "combined, weights delayed": 201}
    costs = LayeredCosts.of_layers([[MOE] * 2] * 4)
    step = simulate(plan("combined", 2, 4, 2, overlap_p2p_comm=True), costs)
    found = [way.makespan for _, way in ways_of(step)]
    assert found[0] > found[1] > found[2]
    ordinary = simulate(plan("interleaved", 2, 4, 2, overlap_p2p_comm=True), Costs(12, 20))
    assert found[0] == ordinary.makespan


def test_other_work_than_forwards_and_backwards_is_refused():
    with registered(split_1f1b) as name:
        step = plan(name, 2, 4)
    with pytest.raises(ValueError, match="has work of the kind backward-input, but layers have"):
        simulate(step, LayeredCosts.of_layers([[MOE]] * 2))


# -- Pictures and files --


@pytest.fixture(scope="module")
def step():
    return simulate(plan("combined", 2, 4, 2), LayeredCosts.of_layers([[MOE] * 2] * 4))


def test_text_has_a_line_of_all_to_alls_for_each_rank(step):
    text = render(step, "text")
    lines = [line for line in text.splitlines() if line.startswith("  a2a")]
    assert len(lines) % 2 == 0 and all(set("/·") <= set(line[16:]) for line in lines[:2])
    # The first forward's are all exposed; in a pair of the first rank none is.
    assert set(lines[0][7:40]) <= set(" ·/")
    table = [line.split() for line in text.splitlines()[-3:]]
    assert [row[-5:] for row in table] == [
        ["288", "192", "64", "64", "0"],
        ["248", "192", "64", "40", "0"],
        ["236", "192", "64", "25", "0"],
    ]


def test_one_stage_says_what_streams_that_run_on_would_take():
    costs = LayeredCosts.of_layers([[MOE] * 4])
    text = render(simulate(plan("combined", 1, 4), costs), "text")
    rows = [line.split()[-4:] for line in text.splitlines()[-3:-1]]
    assert rows == [["206", "192", "64", "14"], ["199", "192", "64", "7"]]
    # An order of one's own, or an evaluation, has no such table.
    evaluation = simulate(plan("combined", 1, 4, forward_only=True), costs)
    assert "ordinary" not in render(evaluation, "text")


def test_the_picture_has_two_lanes_per_rank(step):
    root = ElementTree.fromstring(render(step, "svg"))
    tips = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    exchanges = [tip for tip in tips if tip.startswith("all-to-all: ")]
    assert len(exchanges) == 2 * 4 * 4 * 2 * 2
    assert "all-to-all: dispatch of layer 0, forward of microbatch 0, 2 to 3" in exchanges
    hatched = [e for e in root.iter() if e.get("fill") == "url(#exposed)"]
    assert len(hatched) == 1 + sum(  # one in the legend
        len(list(lanes_of(step, rank).exposed_parts())) for rank in range(2)
    )
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "all-to-all 64, exposed 40" in texts
    # Whole forwards and backwards are shadows of their nodes, without a number that shines through.
    shadows = [e for e in root.iter() if e.get("opacity") == "0.3"]
    assert len(shadows) == sum(1 for rank in range(2) for _ in step.plan.work(rank))
    assert not any(e.tag.endswith("}text") for shadow in shadows for e in shadow.iter())


def test_chrome_and_json_have_the_nodes(step):
    chrome = json.loads(render(step, "chrome"))["traceEvents"]
    lane = [e for e in chrome if e["ph"] == "X" and e["pid"] == 0 and e["tid"] == 3]
    assert len(lane) == 64
    assert sum(e["args"].get("exposed_us", 0) for e in lane) == 40_000
    data = json.loads(render(step, "json"))
    nodes = [e for e in data["ranks"][1] if e.get("name") == "layer-node"]
    assert nodes == json.loads(json.dumps(nodes)) and len(nodes) == len(node_events(step, 1))
    for node in nodes:
        work = data["ranks"][1][node["parent"]]
        assert work["start"] <= node["start"] <= node["end"] <= work["end"]
        assert node["attributes"].keys() == {"node", "direction", "layer", "lane"}
    # A reader of plans leaves them out.
    assert Plan.from_json(data) == step.plan


def test_a_picture_of_several_ways_has_one_clock():
    rows = [(name, one_stage(2, [MOE], overlap)) for name, overlap in (("a", False), ("b", True))]
    picture = render_layers(rows, "Two <ways>")
    root = ElementTree.fromstring(picture)
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a: 32, all-to-all 8, exposed 8" in texts and "b: 26, all-to-all 8, exposed 2" in texts
    assert "Two <ways>" in texts
