"""Plans lowered from orders: any order, on any placement and wire; and those that are published."""

import operator
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.core.orders.lowering import lowered_step
from minimegatron.core.orders.placement import BOTH, LINE, LOOP, V
from minimegatron.planner.actions import KINDS
from minimegatron.planner.imagined_transport import BUFFERED, RENDEZVOUS
from minimegatron.planner.memory import activation_timeline, peak_activation_bytes
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.plan_check import check
from minimegatron.planner.simulator import Costs, simulate
from minimegatron.planner.unreceived import count_unreceived
from tests.planner.known_orders import (
    DUALPIPE_V_RANK_1,
    PUBLISHED,
    dualpipe_v_words,
    random_orders,
    registered,
    registered_lists,
    step_length,
)

WIRES = ["tagged", "untagged"]
SIZES = [
    *[(LINE, p, 1) for p in (2, 3, 4)],
    *[(LOOP, p, 2) for p in (2, 3, 4)],
    *[(V, p, 2) for p in (2, 3, 4)],
    *[(BOTH, p, 2) for p in (2, 3, 4)],
]


def published(name: str, wire: str = "tagged", **options) -> Plan:
    order, placement, p, M = PUBLISHED[name]
    with registered(order, placement) as registered_name:
        return plan(registered_name, p, M, wire=wire, **options)


# -- Any order --


@given(st.data())
@settings(deadline=None, max_examples=80)
def test_any_order_that_can_be_done_is_planned_right(data):
    rule, p, v = data.draw(st.sampled_from(SIZES))
    wire = data.draw(st.sampled_from(WIRES))
    M = 2 * data.draw(st.integers(1, 3))
    placement = rule(p, v)
    orders = random_orders(placement, M, random.Random(data.draw(st.integers(0, 10**6))))
    lengths = data.draw(st.tuples(*[st.integers(0, 4)] * 4))
    combine = data.draw(st.sampled_from([None, max, lambda a, b: 3]))
    with registered_lists(orders, placement) as name:
        step = plan(name, p, M, v if rule is LOOP else None, wire=wire)
    assert check(step) == []
    forward, backward, backward_input, backward_weight = lengths
    costs = Costs(
        forward,
        backward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        pair=combine,
    )
    times = dict(
        zip(["forward", "backward", "backward-input", "backward-weight"], lengths, strict=True)
    )
    wanted = step_length(orders, placement, times | {"pair": combine or operator.add})
    for transport in (BUFFERED, RENDEZVOUS):
        done = simulate(step, costs, transport)
        assert done.makespan == wanted
        path = done.critical_path()
        assert sum(done.ends[r][i] - done.starts[r][i] for r, i in path) == wanted
        for rank in range(p):
            assert sum(gap.length for gap in done.gaps(rank)) == done.idle(rank) >= 0
            assert activation_timeline(done, rank)[-1][1] == 0
    assert Plan.from_json(step.to_json()) == step


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_messages_that_take_time_arrive_before_they_are_used(data):
    rule, p, v = data.draw(st.sampled_from(SIZES))
    placement = rule(p, v)
    orders = random_orders(placement, 4, random.Random(data.draw(st.integers(0, 10**6))))
    with registered_lists(orders, placement) as name:
        step = plan(name, p, 4, v if rule is LOOP else None, wire=data.draw(st.sampled_from(WIRES)))
    done = simulate(step, Costs(2, 3, latency=Fraction(1, 2)))
    made, needed = {}, {}
    for rank in range(p):
        for event in done.events(rank):
            for part in event.action.parts or (event.action,):
                if part.kind in KINDS and KINDS[part.kind].takes:
                    payload, stage = KINDS[part.kind].takes, placement.stages[rank][part.chunk]
                    made[payload, part.microbatch, stage] = rank, event.end
                    needed[payload, part.microbatch, stage] = rank, event.start
    for (payload, microbatch, stage), (rank, start) in needed.items():
        source = made.get(
            (payload, microbatch, stage - 1 if payload == "activation" else stage + 1)
        )
        if source is not None:
            assert start >= source[1] + (0 if source[0] == rank else Fraction(1, 2))


# -- Published ones --


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_orders(name, wire):
    step = published(name, wire)
    assert check(step) == []
    makespans = {simulate(step, Costs(1, 2), transport).makespan for transport in ("buffered",)}
    makespans.add(simulate(step, Costs(1, 2)).makespan)
    # ZB-V: M (F + B + W) of two chunks, and p - 1 more. DualPipeV and DualPipe without overlap.
    wanted = {"1f1b-split": 30, "zb-h1": 27, "zb-v": 7 * 6 + 3, "dualpipe-v": 54, "dualpipe": 26}
    assert makespans == {wanted[name]}


def test_dualpipe_v_is_as_published_and_overlap_shortens_it():
    assert dualpipe_v_words(4, 8, 1) == DUALPIPE_V_RANK_1
    step = published("dualpipe-v")
    # As many slots as pairs are shorter by, but for the slots that the first of them wait.
    assert simulate(step, Costs(1, 2, pair=max)).makespan < 8 * 6
    assert simulate(step, Costs(1, 2, pair=lambda a, b: a + b)).makespan == 54


def test_dualpipe_is_as_long_as_half_of_it_on_a_v():
    order, placement, _, _ = PUBLISHED["dualpipe-v"]
    with registered(order, placement) as name:
        half = plan(name, 2, 4)
    both = published("dualpipe")
    for costs in (Costs(1, 2), Costs(3, 5, backward_input=4, backward_weight=2, pair=max)):
        assert simulate(both, costs).makespan == simulate(half, costs).makespan
    assert [both.peak_in_flight(rank) for rank in (0, 1)] == [
        half.peak_in_flight(rank) for rank in (0, 1)
    ]
    assert both.message_counts() == {"activation": 3 * 8, "gradient": 3 * 8}


def test_what_zb_holds_until_its_weight_gradients():
    step = published("zb-h1")
    assert [step.peak_in_flight(rank) for rank in range(4)] == [4, 4, 4, 4]
    assert [peak_activation_bytes(step, rank, 10) for rank in range(4)] == [40, 40, 40, 40]
    # If nothing of a microbatch were needed for its weight gradients: as 1F1B.
    assert [peak_activation_bytes(step, rank, 10, share=0) for rank in range(4)] == [40, 30, 20, 10]
    half = [peak_activation_bytes(step, rank, 10, Fraction(1, 2)) for rank in range(4)]
    assert half == [40, 35, 30, 25]
    # A graph that is kept, with gradients beside: 1.7 times as much.
    assert peak_activation_bytes(step, 3, 10, Fraction(17, 10)) == 68
    assert [published("zb-v").peak_in_flight(rank) for rank in range(4)] == [8, 8, 8, 8]


def test_a_timeline_of_what_is_held():
    def one(rank):
        yield rank.forward(0)
        yield rank.backward_input(0)
        yield rank.backward_weight(0)

    with registered(one) as name:
        done = simulate(plan(name, 1, 1), Costs(1, 2))
    assert activation_timeline(done, 0) == [(0, 1), (3, 0)]
    assert activation_timeline(done, 0, 8, Fraction(1, 4)) == [(0, 8), (2, 2), (3, 0)]


def test_sizes_of_activations_are_asked_for_by_virtual_stage():
    # On a V rank 0 holds stages 0 and 7.
    sizes = [1, 0, 0, 0, 0, 0, 0, 100]
    step = published("zb-v")
    peaks = [peak_activation_bytes(step, rank, sizes) for rank in range(4)]
    assert peaks[1:] == [0, 0, 0]
    assert peaks[0] % 100 == 7 and peaks[0] >= 100


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_step_without_backwards(name):
    step = published(name, forward_only=True)
    assert check(step) == []
    assert simulate(step).kinds == ["forward"]
    assert step.message_counts()["gradient"] == 0


# -- What may lie unreceived --


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "arguments", [("1f1b", 4, 8), ("interleaved", 4, 8, 2), ("breadth-first", 4, 16, 2)]
)
def test_the_plan_and_its_lowering_count_the_same_unreceived_messages(arguments, wire):
    step = plan(*arguments, wire=wire)
    assert count_unreceived(step) == lowered_step(step.config).limits


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("rule", "p", "v"), [size for size in SIZES if size[0] is not BOTH])
def test_any_plan_and_its_lowering_count_the_same_unreceived_messages(rule, p, v, wire):
    placement, most = rule(p, v), 0
    for seed in range(10):
        orders = random_orders(placement, 3, random.Random(seed))
        with registered_lists(orders, placement) as name:
            step = plan(name, p, 3, v if rule is LOOP else None, wire=wire)
            counted = count_unreceived(step)
            assert counted == lowered_step(step.config).limits
        most = max(most, *counted)
    assert most > 1


# -- Costs --


def test_either_half_of_a_backward_takes_half_of_its_time():
    step = published("zb-h1")
    times = simulate(step, Costs(1, 3)).times
    assert times["backward-input"][0][0] == times["backward-weight"][0][0] == Fraction(3, 2)
    uneven = Costs(1, [2, 4, 6, 7], backward_weight=5)
    (inputs,) = uneven.of_chunks(step.config, ["backward-input"])
    assert inputs == [[1], [2], [3], [Fraction(7, 2)]]
    assert simulate(step, Costs(1, 0.5)).times["backward-weight"][0][0] == 0.25


def test_times_of_virtual_stages_follow_the_placement():
    config = published("zb-v").config
    (forward,) = Costs(list(range(8))).of_chunks(config, ["forward"])
    assert forward == [[0, 7], [1, 6], [2, 5], [3, 4]]
    (forward,) = Costs([5, 6, 7, 8]).of_chunks(config, ["forward"])
    assert forward == [[5, 5], [6, 6], [7, 7], [8, 8]]
    # Two copies of four stages.
    (forward,) = Costs([5, 6, 7, 8]).of_chunks(published("dualpipe").config, ["forward"])
    assert forward == [[5, 8], [6, 7], [7, 6], [8, 5]]
    with pytest.raises(ValueError, match=r"3 backward_weight times .* or 8 \(one per virtual"):
        Costs(backward_weight=[1, 2, 3]).of_chunks(config, ["backward-weight"])


def test_a_layout_that_is_placed_on_a_v():
    layout = [[["embedding"], ["loss"]], [["decoder"], ["decoder", "decoder"]]]
    times = {"embedding": (1, 2), "decoder": (3, 6), "loss": (5, 5)}
    costs = Costs.from_layout(layout, times, placement=V(2))
    assert (costs.forward, costs.backward) == ([1, 3, 6, 5], [2, 6, 12, 5])


def test_a_pair_counts_once_as_busy_time():
    step = published("dualpipe-v")
    apart, together = (simulate(step, Costs(1, 2, pair=pair)) for pair in (None, max))
    num_pairs = sum(bool(action.parts) for action in step.ranks[0])
    assert num_pairs > 0
    assert apart.busy(0) == 8 * 6
    assert together.busy(0) == 8 * 6 - num_pairs


def test_costs_that_cannot_be():
    with pytest.raises(ValueError, match="backward_input time -1 is negative"):
        Costs(backward_input=-1)
    with pytest.raises(ValueError, match="that takes 1 and 2 takes -1, which is negative"):
        simulate(published("dualpipe-v"), Costs(1, 2, pair=lambda a, b: a - b))


def test_whole_stages_share_the_halves_too():
    costs = Costs.of_stages(1, 3, 2, backward_input=1, backward_weight=Fraction(2), pair=max)
    assert (costs.backward_input, costs.backward_weight) == (Fraction(1, 2), 1)
    assert costs.pair is max
