"""The simulation gives what the closed forms say, exactly, for every legal configuration."""

from fractions import Fraction

import pytest

from cases.short_warmup import both_warmups, makespan
from minimegatron.planner.actions import ACTIVATION, GRADIENT
from minimegatron.planner.formulas import (
    bubble_formulas,
    makespan_formula,
    message_formula,
    peak_in_flight_formula,
)
from minimegatron.planner.imagined_transport import BUFFERED
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_check import check
from minimegatron.planner.simulator import Costs, simulate
from tests.planner.grid import MOST_CHUNKS, MOST_MICROBATCHES, MOST_STAGES, legal_groups


def assert_closed_forms(step, forward, backward, transport="rendezvous"):
    """`forward` and `backward` are times of a chunk."""
    config = step.config
    v = config.num_model_chunks
    simulation = simulate(step, Costs(forward, backward), transport)
    assert simulation.makespan == makespan_formula(config, forward * v, backward * v).value, config
    over_ideal, over_total = bubble_formulas(config)
    assert simulation.bubble_over_ideal == over_ideal.value, config
    assert simulation.bubble_over_total == over_total.value, config
    for rank in range(config.pp_size):
        assert step.peak_in_flight(rank) == peak_in_flight_formula(config, rank).value, config
    count = message_formula(config).value
    gradients = 0 if config.forward_only else count
    assert step.message_counts() == {ACTIVATION: count, GRADIENT: gradients}, config


EVERY = 8
"""In every run of the tests: one of so many (M, G) of the whole grid, others for each p and v."""


@pytest.mark.parametrize("p", range(2, MOST_STAGES + 1))
@pytest.mark.parametrize("v", range(1, MOST_CHUNKS + 1))
def test_interleaved_makespan_on_parts_of_the_grid(p, v):
    of_p = list(legal_groups(p, MOST_MICROBATCHES))
    assert_makespans(p, v, [*of_p[(p + v) % EVERY :: EVERY], of_p[0], of_p[-1]])


@pytest.mark.full
@pytest.mark.parametrize("p", range(2, MOST_STAGES + 1))
@pytest.mark.parametrize("v", range(1, MOST_CHUNKS + 1))
def test_interleaved_makespan_on_the_whole_grid(p, v):
    assert_makespans(p, v, legal_groups(p, MOST_MICROBATCHES))


def assert_makespans(p, v, groups):
    for M, G in groups:
        simulation = simulate(plan("interleaved", p, M, v, G), Costs(1, 2))
        # (M + (p - 1)/v)(f + b) in chunk times.
        assert simulation.makespan == (M * v + p - 1) * 3, (p, M, v, G)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_plain_schedules_on_the_whole_grid(name):
    for p in range(1, MOST_STAGES + 1):
        for M in range(1, MOST_MICROBATCHES + 1):
            for forward_only in (False, True):
                step = plan(name, p, M, forward_only=forward_only)
                assert_closed_forms(step, 1, 2)


@pytest.mark.parametrize("M", [1, 2, 7, 32])
def test_no_pipelining(M):
    for forward_only in (False, True):
        step = plan(None, 1, M, forward_only=forward_only)
        assert step.config.schedule == "no-pipelining"
        assert_closed_forms(step, 3, 1)
        assert check(step) == []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
def test_every_figure_of_interleaving(overlap, forward_only):
    for p in range(2, 6):
        for M, G in legal_groups(p, 11):
            for v in range(1, MOST_CHUNKS + 1):
                step = plan("interleaved", p, M, v, G, forward_only, overlap_p2p_comm=overlap)
                assert_closed_forms(step, 1, 2)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [(1, 1), (5, 1), (1, 7), (Fraction(1, 3), Fraction(2, 7)), (0, 1), (1, 0)],
)
def test_any_ratio_of_forward_to_backward_and_either_transport(forward, backward):
    for transport in ("rendezvous", BUFFERED):
        assert_closed_forms(plan("gpipe", 4, 6), forward, backward, transport)
        assert_closed_forms(plan("1f1b", 5, 9), forward, backward, transport)
        assert_closed_forms(plan("interleaved", 4, 10, 3, 5), forward, backward, transport)


@pytest.mark.parametrize("batched", [False, True])
def test_built_in_plans_pass_the_check(batched):
    for p in range(2, 7):
        for M in range(1, 8):
            for name in ("gpipe", "1f1b"):
                for forward_only in (False, True):
                    step = plan(name, p, M, forward_only=forward_only, batch_p2p_comm=batched)
                    assert check(step) == [], step.config
        for M, G in legal_groups(p, 9):
            for v in (1, 2, 3):
                if p == 2 and v > 1 and batched:
                    continue  # Crosses: see test_check.
                step = plan("interleaved", p, M, v, G, batch_p2p_comm=batched)
                assert check(step) == [], step.config


def test_raising_the_group_size_costs_memory_and_saves_no_time():
    # traps.md, section 14: p = 4, v = 2, M = 16.
    steps = [plan("interleaved", 4, 16, 2, G) for G in (4, 8, 16)]
    assert [step.peak_in_flight(0) for step in steps] == [11, 15, 23]
    assert len({simulate(step).makespan for step in steps}) == 1


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("v", [2, 3])
def test_two_steps_of_warm_up_per_stage_are_needed_by_one_exchange_and_hide_messages(p, v):
    for M in (2 * p, 4 * p):
        usual, short = both_warmups(p, M, v, overlap=False)
        assert makespan(usual, 0) is not None and makespan(short, 0) is None, (p, v, M)
        usual, short = both_warmups(p, M, v, overlap=True)
        assert makespan(short, 0) == makespan(usual, 0), (p, v, M)
        assert short.peak_in_flight(0) < usual.peak_in_flight(0), (p, v, M)
        for message in ("1/100", "1/5"):
            assert makespan(short, message) > makespan(usual, message), (p, v, M, message)


@pytest.mark.parametrize("wire", ["tagged", "untagged"])
def test_breadth_first_is_as_long_as_interleaving_and_holds_everything(wire):
    for p in range(2, 7):
        for v in range(1, 5):
            for M in (p, p + 1, 2 * p, 3 * p):
                for forward_only in (False, True):
                    step = plan("breadth-first", p, M, v, forward_only=forward_only, wire=wire)
                    assert_closed_forms(step, 1, 2)
                    assert_closed_forms(step, Fraction(1, 3), Fraction(1, 7), BUFFERED)
    # Where p divides M, interleaving is as long, and holds less.
    same = [plan(name, 4, 8, 2) for name in ("interleaved", "breadth-first")]
    assert len({simulate(step).makespan for step in same}) == 1
    assert [step.peak_in_flight(0) for step in same] == [11, 16]
    # With fewer microbatches than stages, each chunk waits for the last stage of the one before.
    few = plan("breadth-first", 4, 3, 2)
    assert makespan_formula(few.config, 2, 4) is bubble_formulas(few.config) is None
    assert simulate(few).makespan > (3 * 2 + 3) * 3


def test_no_closed_form_of_what_is_not_known():
    step = plan(lambda stage: (), 4, 8)
    assert makespan_formula(step.config, 1, 2) is bubble_formulas(step.config) is None
    assert peak_in_flight_formula(step.config, 0) is message_formula(step.config) is None
