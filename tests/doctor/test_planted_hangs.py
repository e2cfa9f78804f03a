"""Hangs planted in real ranks: each must be found, blamed on the right rank, and explained."""

import time

import pytest

from minimegatron.doctor import findings as verdict
from minimegatron.doctor.findings import Diagnosis
from minimegatron.launching.launcher import HangError, RankError, RankTimeout, launch
from tests.doctor import hangs
from tests.figures import slowness

HANG_TIMEOUT = 1.5


@pytest.fixture(scope="module", autouse=True)
def running_forkserver():
    """Imports torch before any clock runs."""
    launch(hangs.nothing, 1, 0, 0, backend="gloo", device="cpu")


def run(fn, nprocs: int, hang_timeout: float = HANG_TIMEOUT, timeout: float = 60):
    return launch(
        fn, nprocs, hang_timeout=hang_timeout, timeout=timeout, backend="gloo", device="cpu"
    )


def diagnose(fn, nprocs: int) -> Diagnosis:
    began = time.monotonic()
    with pytest.raises(HangError) as caught:
        run(fn, nprocs)
    took = time.monotonic() - began
    assert took < 15 or took < 15 * slowness()
    found = caught.value.diagnosis
    assert found.text in str(caught.value)
    assert caught.value.ranks == list(found.ranks)
    return found


def unit(found: Diagnosis, rank: int) -> tuple:
    seen = found.situations[rank]
    return seen.microbatch, seen.chunk


def names(found: Diagnosis, rank: int) -> list[str]:
    return [entry.partition(" (")[0] for entry in found.situations[rank].path]


# -- Messages --


def test_two_ranks_that_both_send_first():
    found = diagnose(hangs.send_send_cycle, 2)
    assert found.kind == verdict.CYCLE
    assert found.cycle == (0, 1)
    assert unit(found, 0) == unit(found, 1) == (0, 0)
    calls = [found.situations[rank].call for rank in (0, 1)]
    assert [(c.doing, c.payload, c.peer) for c in calls] == [
        ("sending", "activation", 1),
        ("sending", "gradient", 0),
    ]
    assert names(found, 0) == ["forward-backward", "p2p-wait"]
    for rank in (0, 1):
        assert "in all_send_first" in found.stacks[rank]
        assert "p2p.finish()" in found.stacks[rank]
    assert "rank 0 sends the activation of microbatch 0 to rank 1" in found.text


def test_a_receive_that_is_missing():
    found = diagnose(hangs.missing_receive, 2)
    assert found.kind == verdict.MISSING
    assert found.ranks == (1,)
    assert unit(found, 0) == (3, 0)
    assert "has asked for 3 activations from rank 0 so far, not for this one" in found.text
    assert found.situations[1].call.name == "all-reduce"


def test_a_message_to_the_wrong_peer():
    found = diagnose(hangs.wrong_peer, 3)
    assert found.kind == verdict.WRONG_PEER
    assert found.ranks == (0,)
    assert "sends activations to rank 2, but its next stage is rank 1" in found.cause
    assert unit(found, 1) == (0, 0)


def test_stages_with_different_numbers_of_microbatches():
    found = diagnose(hangs.unequal_microbatches, 3)
    assert found.kind == verdict.UNEQUAL
    assert found.ranks == (1,)
    assert "microbatches: ranks 0 and 2: 4; rank 1: 6" in found.cause
    assert unit(found, 1) == (4, 0)


# -- Collectives --


def test_a_rank_that_skips_a_collective():
    found = diagnose(hangs.skipped_collective, 4)
    assert found.kind == verdict.MISSING
    assert found.ranks == (2,)
    assert "all-reduce #4 (sum, [4, 8] float32)" in found.cause
    assert "ranks 0, 1 and 3 are" in found.cause
    assert found.situations[2].call.name == "all-gather"


def test_a_rank_that_skips_a_collective_and_returns():
    found = diagnose(hangs.early_return, 3)
    assert found.kind == verdict.LEFT
    assert found.ranks == (2,)
    assert {(m.rank, m.waited_for_by) for m in found.missing} == {(2, 0), (2, 1)}


def test_mismatched_shapes_in_a_collective():
    # gloo does not hang on these: it ends the process. The doctor says why.
    with pytest.raises(RankError) as caught:
        run(hangs.mismatched_shapes, 3)
    found = caught.value.diagnosis
    assert found.kind == verdict.MISMATCH
    assert found.ranks == (1,)
    assert "ranks 0 and 2 with all-reduce of [2, 8] float32" in found.cause
    assert "rank 1 with all-reduce of [1, 8] float32" in found.cause
    assert found.cause in " ".join(str(caught.value).split())


def test_different_operations_in_one_collective():
    found = diagnose(hangs.mismatched_operations, 3)
    assert found.kind == verdict.MISMATCH
    assert found.ranks == (1,)
    assert "rank 1 with broadcast of [16] float32 (from rank 0)" in found.cause


def test_two_collectives_in_different_orders():
    found = diagnose(hangs.wrong_order, 2)
    assert found.kind == verdict.ORDER
    assert found.cycle == (0, 1)


def test_waiting_for_an_asynchronous_collective():
    found = diagnose(hangs.never_waits_for_launched, 2)
    assert found.kind == verdict.STUCK
    assert found.ranks == (1,)
    assert names(found, 0) == ["collective-wait"]
    assert found.situations[0].call.shape == (7,)
    assert found.situations[1].kind == "computes"


# -- Ranks --


def test_a_stopped_rank():
    found = diagnose(hangs.stopped_rank, 3)
    assert found.kind == verdict.STOPPED_RANK
    assert found.ranks == (1,)
    assert [unit(found, rank) for rank in range(3)] == [(1, 0), (2, 0), (2, 0)]
    assert found.situations[0].call.payload == "gradient"
    assert found.situations[2].call.payload == "activation"
    assert 1 not in found.stacks


def test_a_rank_that_sleeps_in_python():
    found = diagnose(hangs.asleep, 3)
    assert found.kind == verdict.STUCK
    assert found.ranks == (1,)
    assert unit(found, 1) == (1, 0)
    assert "has been asleep" in found.cause
    assert "time.sleep(600)" in found.cause


def test_a_rank_in_an_endless_loop_of_an_interleaved_schedule():
    found = diagnose(hangs.endless_loop, 2)
    assert found.kind == verdict.STUCK
    assert found.ranks == (1,)
    assert unit(found, 1) == (3, 1)
    assert unit(found, 0) == (3, 1)
    assert "has been computing" in found.cause
    assert "in the forward of microbatch 3, chunk 1" in found.text


def test_an_exception_that_somebody_swallows():
    found = diagnose(hangs.swallowed_exception_over_gloo, 2)
    assert found.kind == verdict.SWALLOWED
    assert found.ranks == (1,)
    assert "ended forward-compute of microbatch 2" in found.cause
    assert "ValueError: a bad sample" in found.cause
    assert "more lines" not in found.cause


def test_an_exception_that_somebody_swallows_reaches_those_that_wait():
    """Through shared memory they are told, and nobody hangs."""
    with pytest.raises(RankError) as caught:
        run(hangs.swallowed_exception, 2)
    assert caught.value.ranks[0] == 0
    assert "given up this step: ValueError: a bad sample" in caught.value.summaries[0]


def test_a_planned_schedule_that_sticks_in_a_backward():
    found = diagnose(hangs.planned_schedule, 2)
    assert found.kind == verdict.STUCK
    assert found.ranks == (1,)
    assert found.situations[1].work == "backward"
    assert unit(found, 1) == (2, 0)
    assert unit(found, 0) == (2, 0)
    assert "in the backward of microbatch 2" in found.cause


# -- Calls of torch.distributed itself --


def test_two_ranks_that_both_receive_first():
    found = diagnose(hangs.both_receive, 2)
    assert found.kind == verdict.CYCLE
    assert found.cycle == (0, 1)
    assert names(found, 0) == ["torch.distributed.recv"]


def test_a_barrier_that_one_rank_does_not_enter():
    found = diagnose(hangs.barrier_of_one, 2)
    assert found.kind == verdict.MISSING
    assert found.situations[0].call.name == "torch.distributed.barrier"


def test_a_handle_that_nobody_traced():
    found = diagnose(hangs.handle_of_torch, 2)
    assert found.kind == verdict.MISSING
    assert found.ranks == (0,)
    assert "src=1).wait()" in found.cause


# -- No hang --


def test_a_slow_rank_is_no_hang():
    assert run(hangs.slow, 2, hang_timeout=8) == ["done", "done"]


def test_without_hang_timeout_nothing_is_recorded():
    with pytest.raises(RankTimeout) as caught:
        launch(hangs.asleep, 2, timeout=3, backend="gloo", device="cpu")
    assert caught.value.diagnosis is None


def test_a_time_out_that_comes_first_has_a_diagnosis_too():
    with pytest.raises(RankTimeout) as caught:
        run(hangs.asleep, 2, hang_timeout=60, timeout=4)
    assert caught.value.diagnosis.kind == verdict.STUCK


def test_a_hang_timeout_of_zero_is_refused():
    with pytest.raises(ValueError, match="hang_timeout is 0; give more than 0, or None"):
        launch(hangs.slow, 2, hang_timeout=0)
