"""What it costs, and how to choose: the record of bytes, formulas by hand, choices by the planner."""

import importlib
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest

from minimegatron import launch
from minimegatron.planner.context_costs import context_parallel_bytes
from minimegatron.planner.plan import plan

choices = importlib.import_module("cases.choices")
costs = importlib.import_module("cases.layout_costs")
model_flops_per_token = importlib.import_module("cases.memory_cases").model_flops_per_token
record_bytes = importlib.import_module("records.rank_bytes")
recorded = importlib.import_module("source.places").recorded

pytestmark = pytest.mark.processes


# -- Bytes --


def test_the_record_has_all_runs_with_the_sizes_of_its_program():
    runs = recorded("rank_bytes")["runs"]
    assert list(runs) == list(record_bytes.RUNS)
    for name, run in runs.items():
        assert run["sizes"] == record_bytes.sizes_of(name)
        assert len(run["ranks"]) == record_bytes.num_ranks(run["sizes"])


@pytest.mark.parametrize("name", record_bytes.RUNS)
def test_the_estimate_is_close_to_what_was_measured(name):
    assert abs(choices.error(name)) < 0.02


def test_what_is_recorded_is_what_is_measured_today():
    """Of two runs with few ranks; the others are the same program."""
    for name, number in (("one rank", 1), ("p = 2, v = 2", 2)):
        found = launch(partial(record_bytes.measure, name), number)
        assert found == recorded("rank_bytes")["runs"][name]["ranks"], name


@pytest.mark.parametrize(
    ("p", "v"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (4, 3), (8, 2)]
)
@pytest.mark.parametrize("M", [8, 16, 64])
def test_chunks_in_flight_are_the_plans(p, v, M):
    schedule = "interleaved" if v > 1 else "1f1b" if p > 1 else "no-pipelining"
    planned = plan(schedule, p, M, v if v > 1 else None)
    x = costs.Layout(**choices.LARGE, p=p, v=v, M=M)
    assert costs.chunks_in_flight(x, True) == planned.peak_in_flight(0)
    assert costs.chunks_in_flight(x, False) == planned.peak_in_flight(p - 1)


# -- What a kind costs --


@pytest.mark.parametrize(("c", "t"), [(1, 1), (2, 1), (4, 2)])
def test_the_ring_moves_what_the_planner_says(c, t):
    x = costs.Layout(**choices.LARGE, c=c, t=t)
    planned = context_parallel_bytes("p2p", x.s, x.b, x.a, x.a, x.h // x.a, c, t)
    assert costs.context_bytes(x) == planned.total


def test_operations_of_a_model_without_experts_are_those_of_the_formula():
    x = costs.Layout(**choices.LARGE)
    assert costs.model_flops(x) == model_flops_per_token(x.h, x.s, x.L, x.V)


@pytest.mark.parametrize("node", [choices.EVERYWHERE, choices.NOWHERE])
@pytest.mark.parametrize("name", choices.KINDS)
def test_the_formula_by_hand_is_what_the_functions_say(name, node):
    kind = choices.KINDS[name]
    twice = [{key: 2 * getattr(kind.layout, key)} for key in ("h", "s", name)]
    for change in ({}, *twice):
        x = replace(kind.layout, **change)
        if name == "e":
            x = replace(x, d=x.e)
        expected = kind.by_hand(x, costs.rate(x) / ((x.inside if node else x.between) * 1e9))
        if name == "d":  # operations on weights only: attention comes on top
            expected /= 1 + x.s / (6 * x.h)
        assert choices.moved_share(x, node) == pytest.approx(expected, rel=0.03), change


def test_tensor_parallelism_between_nodes_moves_longer_than_it_computes():
    x = choices.KINDS["t"].layout
    assert choices.moved_share(x, choices.NOWHERE) > 1 > choices.moved_share(x, choices.EVERYWHERE)


# -- Three choices --


@pytest.mark.parametrize("name", choices.CHOICES)
def test_the_choice_fits_and_is_the_quickest_by_the_planner(name):
    best = choices.chosen(name)
    assert choices.fits(best)
    for other in choices.others(name):
        if choices.fits(other):
            assert choices.planned_seconds(best) < choices.planned_seconds(other)


@pytest.mark.parametrize("name", choices.CHOICES)
def test_more_tensor_parallel_ranks_than_a_node_has_are_never_quicker(name, monkeypatch):
    best = costs.step_seconds(choices.chosen(name))
    monkeypatch.setattr(choices, "TENSOR_SIZES", (16, 32))
    found = [x for x in choices.layouts(choices.CHOICES[name]) if choices.fits(x)]
    assert all(costs.step_seconds(x) > 1.5 * best for x in found)


@pytest.mark.parametrize("name", choices.CHOICES)
def test_the_formula_is_near_the_planner(name):
    for x in (choices.chosen(name), *choices.others(name)):
        assert costs.step_seconds(x) == pytest.approx(choices.planned_seconds(x), rel=0.08)


def test_what_the_page_says_about_the_tables():
    of = {name: [choices.chosen(name), *choices.others(name)] for name in choices.CHOICES}
    seven = of["7 B on 8"][0]
    assert (seven.t, seven.p, seven.d) == (1, 1, 8)
    assert costs.output_flops(seven) / costs.layer_flops(seven) == pytest.approx(1, abs=0.2)

    four, two, again, _, eight, sixteen = of["70 B on 64"]
    assert (four.t, four.p, four.d) == (4, 4, 4)
    assert not choices.fits(two) and choices.fits(again)
    seconds = choices.planned_seconds
    assert seconds(two) < seconds(four) < seconds(again)
    moved = {x.t: x.L / x.p * x.M * costs.moving_seconds(x) for x in (four, eight)}
    assert moved[8] / moved[4] == pytest.approx(7 / 3, rel=0.01)
    assert seconds(sixteen) > 4 * seconds(four)

    best = of["experts on 256"][0]
    assert (best.t, best.p, best.v, best.d, best.e) == (2, 8, 4, 16, 8)
    assert float(choices.in_flight(4, 64, 2)) == Fraction(11, 2)
