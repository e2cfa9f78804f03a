"""The attention of a layer on a ring: its lanes, its clock, and plans whose layers have one."""

import json
from fractions import Fraction
from xml.etree import ElementTree

import pytest

from minimegatron.core.orders.work import COMPUTE, RING_HOP
from minimegatron.planner.actions import BACKWARD, FORWARD
from minimegatron.planner.context_costs import pairs_of_tokens
from minimegatron.planner.layer_costs import LayeredCosts, lanes_of
from minimegatron.planner.layer_plan import LayerCosts, one_ring, one_stage
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_report import exposed_words
from minimegatron.planner.render import render
from minimegatron.planner.render_layers import render_layers
from minimegatron.planner.ring_costs import RingCosts, ring_parts
from minimegatron.planner.simulator import simulate

TIMES = [(4, 1), (4, 4), (4, 6), (4, 9), (3, Fraction(7, 2)), (5, 0)]
"""(block, hop); a backward's block takes twice as long."""


@pytest.mark.parametrize("c", [2, 3, 4, 8])
@pytest.mark.parametrize(("block", "hop"), TIMES)
def test_closed_forms(c, block, hop):
    ring = RingCosts(c, block, hop)
    forward, backward = one_ring(ring, FORWARD), one_ring(ring, BACKWARD)
    assert forward.total == (c - 1) * max(block, hop) + block
    assert forward.exposed == (c - 1) * max(0, hop - block)
    B = 2 * block
    assert backward.total == 2 * max(B, hop) + (c - 2) * max(B, 2 * hop) + hop
    assert (forward.busy(RING_HOP), backward.busy(RING_HOP)) == ((c - 1) * hop, (2 * c - 1) * hop)
    for lanes, computes in ((forward, c * block), (backward, c * B)):
        assert lanes.busy(COMPUTE) == computes == lanes.total - lanes.exposed
        assert lanes.communication == lanes.busy(RING_HOP)
    for kind, lanes in ((FORWARD, forward), (BACKWARD, backward)):
        alone = one_ring(ring, kind, overlap=False)
        assert alone.total == lanes.compute + lanes.communication
        assert alone.exposed == alone.communication


def test_a_rank_alone_has_its_block_and_no_hops():
    assert list(ring_parts(RingCosts(1, 5, 2), FORWARD)) == [("block", 5)]
    assert list(ring_parts(RingCosts(1, 5, 2), BACKWARD)) == [("block", 10)]


@pytest.mark.parametrize("c", [2, 4, 8])
def test_blocks_follow_the_pairs_of_tokens(c):
    """Zig-zag: all blocks are equal; in order, the last rank has 2c - 1 of the size of its own."""
    ring, in_order = RingCosts(c, 1), RingCosts(c, 1, in_order=True)
    totals = one_ring(ring, FORWARD).total, one_ring(in_order, FORWARD).total
    assert totals == (c, 2 * c - 1)
    # That holds for many tokens: a diagonal is half seen, and counts whole.
    length = 2048 * c
    zigzag = max(pairs_of_tokens(length, c))
    contiguous = max(pairs_of_tokens(length, c, contiguous=True))
    assert contiguous / zigzag == pytest.approx(totals[1] / totals[0], rel=0.001)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_ranks": 0, "block": 1}, "0 ranks; give 1 or more"),
        ({"num_ranks": 2, "block": -1}, "block of a ring takes -1, which is negative"),
        ({"num_ranks": 2, "block": 1, "hop": -2}, "hop of a ring takes -2"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        RingCosts(**options)


# -- In a layer, in a plan --


def test_a_layer_has_its_ring_between_projections_and_mlp():
    ring = RingCosts(4, 2, 3)
    lanes = one_stage(1, [LayerCosts(5, 7, ring=ring)] * 2)
    forward, backward = (one_ring(ring, kind) for kind in (FORWARD, BACKWARD))
    assert lanes.total == 2 * (3 * (5 + 7) + forward.total + backward.total)
    assert lanes.exposed == 2 * (forward.exposed + backward.exposed)
    names = [node.name for node, *_ in lanes.nodes if node.layer == 0]
    there, back = (
        ["attention", *["kv", "block"] * 3, "block", "mlp"],
        [
            "mlp",
            "kv",
            "block",
            *["dkv", "kv", "block"] * 2,
            "dkv",
            "block",
            "dkv home",
            "attention",
        ],
    )
    assert names == there + back
    assert exposed_words(lanes) == f"ring hops {lanes.communication}, exposed {lanes.exposed}"


def test_hops_beside_all_to_alls_have_a_lane_of_their_own():
    """Within a pair, too: an attention's hops run while the other microbatch's tokens travel."""
    layers = [LayerCosts(1, 6, 4, 4, ring=RingCosts(2, 3, 1))] * 2
    ordinary, combined = one_stage(3, layers, overlap=False), one_stage(3, layers)
    assert combined.total < ordinary.total
    assert combined.hidden_lanes == ["all-to-all", RING_HOP]
    assert ordinary.communication == combined.communication == 3 * 2 * (4 * 4 + 4 * 1)
    for lanes in (ordinary, combined):
        assert lanes.exposed == lanes.total - lanes.compute
    both = combined.exposed_on("all-to-all") + combined.exposed_on(RING_HOP)
    assert combined.exposed <= both
    assert "; ring hops 24, exposed" in exposed_words(combined)


def simulated(pp: int = 2, M: int = 2, **options):
    layer = LayerCosts(2, 2, ring=RingCosts(4, 2, 3))
    return simulate(plan(None, pp, M, **options), LayeredCosts.of_layers([[layer]] * pp))


def test_a_plan_knows_the_ring_of_its_layers():
    step = simulated()
    forward, backward = (one_ring(RingCosts(4, 2, 3), kind) for kind in (FORWARD, BACKWARD))
    assert step.makespan == 3 * (4 + 8 + forward.total + backward.total)
    for rank in range(2):
        lanes = lanes_of(step, rank)
        assert lanes.busy(RING_HOP) == 2 * (3 + 7) * 3
        assert lanes.exposed == 2 * (forward.exposed + backward.exposed) > 0


def test_every_format_shows_the_lane():
    step = simulated()
    text = render(step, "text", 120)
    assert text.count("\n  ring  ") == 4 and "ring: hops of attention's ring" in text
    table = text.split("attention of a layer, 4 ranks")[1].splitlines()
    assert table[1].split() == ["forward", "11", "8", "9", "3"]
    assert table[2].split() == ["backward", "23", "16", "21", "7"]
    assert table[3].startswith("forward, each hop waited for") and table[3].split()[-4:] == [
        *("17", "8", "9", "9")
    ]
    assert table[5].startswith("forward, split in order") and table[5].split()[-4] == "15"
    svg = render(step, "svg")
    ElementTree.fromstring(svg)
    assert "ring hops, exposed" in svg and "ring hops: kv of layer 0" in svg
    assert "all-to-all" not in text + svg
    tracks = {
        x["args"]["name"]
        for x in json.loads(render(step, "chrome"))["traceEvents"]
        if x["name"] == "thread_name"
    }
    assert {"layers: compute", "layers: ring-hop"} < tracks and len(tracks) == 4
    nodes = [
        x
        for rank in json.loads(render(step, "json"))["ranks"]
        for x in rank
        if x.get("attributes", {}).get("lane") == RING_HOP
    ]
    assert len(nodes) == 2 * 2 * (3 + 3 + 4)


def test_a_picture_of_one_ring_and_of_rings_beside_all_to_alls():
    ring = RingCosts(4, 2, 3)
    rows = [(f"{kind}", one_ring(ring, kind)) for kind in (FORWARD, BACKWARD)]
    picture = render_layers(rows, "A ring of four")
    ElementTree.fromstring(picture)
    assert "backward: 23, ring hops 21, exposed 7" in picture and "all-to-all" not in picture
    both = one_stage(2, [LayerCosts(1, 6, 4, 4, ring=RingCosts(2, 3, 1))])
    mixed = render_layers([*rows, ("experts", both)], "Both lanes")
    ElementTree.fromstring(mixed)
    assert mixed.count(">all-to-all</text>") == mixed.count(">ring hops</text>") == 3
