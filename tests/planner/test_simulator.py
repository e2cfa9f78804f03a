"""Costs, transports, gaps and blame, on cases small enough to check by hand."""

from fractions import Fraction

import pytest

from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from minimegatron.planner.actions import COMMUNICATE
from minimegatron.planner.plan import plan
from minimegatron.planner.simulator import Costs, simulate


def work(simulation, rank):
    """(name, start, end) of each forward and backward."""
    return [
        (f"{a.kind[0].upper()}{a.microbatch}", start, end)
        for a, start, end in zip(
            simulation.plan.ranks[rank], simulation.starts[rank], simulation.ends[rank], strict=True
        )
        if a.kind != COMMUNICATE
    ]


def words(simulation, place):
    rank, index = place
    action = simulation.plan.ranks[rank][index]
    return f"{action.kind[0].upper()}{action.microbatch} on {rank}"


def blame(simulation, rank):
    """(start, end, what is waited for) of each gap."""
    return [
        (gap.start, gap.end, gap.waits_for and words(simulation, gap.waits_for))
        for gap in simulation.gaps(rank)
    ]


def test_1f1b_by_hand():
    step = simulate(plan("1f1b", 2, 2), Costs(1, 2))
    assert work(step, 0) == [("F0", 0, 1), ("F1", 1, 2), ("B0", 4, 6), ("B1", 7, 9)]
    assert work(step, 1) == [("F0", 1, 2), ("B0", 2, 4), ("F1", 4, 5), ("B1", 5, 7)]
    assert blame(step, 0) == [(2, 4, "B0 on 1"), (6, 7, "B1 on 1")]
    assert blame(step, 1) == [(0, 1, "F0 on 0"), (7, 9, "B1 on 0")]
    assert [words(step, place) for place in step.critical_path()] == [
        *("F0 on 0", "F0 on 1", "B0 on 1", "F1 on 1", "B1 on 1", "B1 on 0")
    ]
    assert (step.busy(0), step.idle(0)) == (6, 3)
    assert (step.bubble_over_ideal, step.bubble_over_total) == (Fraction(1, 2), Fraction(1, 3))


def test_messages_take_time_where_both_ends_are_ready():
    step = simulate(plan("1f1b", 2, 1, message_bytes=6), Costs(1, 2, latency=1, bandwidth=3))
    # F0, 1 + 6/3 for the message, F0, B0, the same back, B0.
    assert work(step, 0) == [("F0", 0, 1), ("B0", 10, 12)]
    assert work(step, 1) == [("F0", 4, 5), ("B0", 5, 7)]
    receive = next(i for i, a in enumerate(step.plan.ranks[1]) if a.call == "recv_forward")
    # Of the four units in recv_forward, one was waiting and three the transfer.
    assert (step.starts[1][receive], step.ends[1][receive], step.waits[1][receive]) == (0, 4, 1)


def test_a_slow_stage_makes_the_others_wait_for_it():
    step = simulate(plan("1f1b", 3, 4), Costs([1, 3, 1], [2, 6, 2]))
    # The slow stage is busy from its first input on; the others wait for it, each time.
    assert blame(step, 1) == [(0, 1, "F0 on 0"), (37, 39, "B3 on 0")]
    assert step.makespan == 1 + 4 * (3 + 6) + 2
    for rank in (0, 2):
        assert len(step.gaps(rank)) >= 4
        for gap in step.gaps(rank)[:-1]:
            assert gap.waits_for[0] == 1
    path = [words(step, place) for place in step.critical_path()]
    assert path == ["F0 on 0", *(name + " on 1" for name, _, _ in work(step, 1)), "B3 on 0"]


def test_buffered_sends_do_not_wait():
    # Rank 1 is slow to take what rank 0 sends; rank 0 goes on only where sends are buffered.
    step = plan("gpipe", 2, 3, forward_only=True)
    blocking, buffered = (
        simulate(step, Costs([1, 4], 1), transport) for transport in ("rendezvous", "buffered")
    )
    assert work(blocking, 0) == [("F0", 0, 1), ("F1", 1, 2), ("F2", 5, 6)]
    assert work(buffered, 0) == [("F0", 0, 1), ("F1", 1, 2), ("F2", 2, 3)]
    assert blocking.makespan == buffered.makespan == 13
    assert blame(blocking, 0)[0] == (2, 5, "F0 on 1")


def test_overlap_hides_messages():
    separate = simulate(plan("interleaved", 4, 8, 2), Costs(4, 8, latency=1))
    overlapped = simulate(
        plan("interleaved", 4, 8, 2, overlap_p2p_comm=True), Costs(4, 8, latency=1)
    )
    ideal = (8 * 2 + 3) * 12
    assert ideal < overlapped.makespan < separate.makespan


def test_times_stay_exact():
    step = simulate(plan("1f1b", 3, 5), Costs(Fraction(1, 3), Fraction(1, 7)))
    assert step.makespan == 7 * Fraction(10, 21)
    assert isinstance(simulate(plan("1f1b", 3, 5), Costs(1, 2)).makespan, int)
    floats = simulate(plan("1f1b", 3, 5), Costs(0.5, 0.25))
    assert floats.makespan == 7 * 0.75
    assert floats.bubble_over_ideal == pytest.approx(2 / 5)


def test_costs_per_stage_and_per_virtual_stage():
    step = plan("interleaved", 2, 2, vpp=2)
    forward, backward = Costs([1, 2], [1, 2, 3, 4]).of_chunks(step.config)
    assert forward == [[1, 1], [2, 2]]
    # Virtual stages 0 .. 3 are (rank 0, chunk 0), (1, 0), (0, 1), (1, 1).
    assert backward == [[1, 3], [2, 4]]
    with pytest.raises(ValueError, match="3 forward times for 2 stages of 2 chunks; give one"):
        simulate(step, Costs([1, 2, 3]))


def test_whole_stages_share_among_their_chunks():
    costs = Costs.of_stages(1, 2, num_model_chunks=4, imbalance=[1, 2])
    assert costs.forward == [Fraction(1, 4), Fraction(1, 2)]
    assert costs.backward == [Fraction(1, 2), 1]
    # So cutting finer leaves the work as it is, and shrinks the bubble.
    busy, idle = set(), []
    for v in (1, 2, 4):
        step = simulate(plan("interleaved", 4, 8, v), Costs.of_stages(1, 2, v))
        busy.add(step.busy(0))
        idle.append(step.idle(0))
    assert busy == {24}
    assert idle == [9, Fraction(9, 2), Fraction(9, 4)]


def test_costs_from_a_layout():
    layout = PipelineParallelLayerLayout("Ett|t|tt|tL", 2)
    times = {"embedding": (1, 1), "decoder": (2, 4), "loss": (3, 6)}
    costs = Costs.from_layout(layout, times)
    assert costs.forward == [5, 2, 4, 5]
    assert costs.backward == [9, 4, 8, 10]
    step = simulate(plan("interleaved", 2, 4, vpp=2), costs)
    assert step.busy(0) == 4 * (5 + 4 + 9 + 8)
    with pytest.raises(ValueError, match="a layer 'loss', but layer_times knows only embedding"):
        Costs.from_layout(layout, {"embedding": (0, 0), "decoder": (1, 2)})


def test_an_empty_stage_costs_nothing():
    costs = Costs.from_layout(
        PipelineParallelLayerLayout("E||t|L", 4),
        {"embedding": (1, 1), "decoder": (1, 2), "loss": (1, 1)},
    )
    assert costs.forward == [1, 0, 1, 1]
    step = simulate(plan("1f1b", 4, 4), costs)
    assert step.busy(1) == 0
    assert step.makespan > 0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Costs(forward=-1), "forward time -1 is negative"),
        (lambda: Costs(backward=[1, -2]), "backward time -2 is negative"),
        (lambda: Costs(latency=-1), "latency time -1 is negative"),
        (lambda: Costs(bandwidth=0), "bandwidth 0 is not above 0"),
        (lambda: simulate(plan("1f1b", 2, 2), transport="magic"), "use 'rendezvous' or 'buffered'"),
    ],
)
def test_bad_costs_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
