"""Hangs planted in real ranks: each must be found, blamed on the right rank, and explained.

Ranks that hang do nothing but wait, so several hangs are waited for at once. What this process tells of
each is what it would tell of that one alone.
"""

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from minimegatron.doctor import findings
from minimegatron.doctor.findings import Diagnosis
from minimegatron.launching.launcher import HangError, RankError, RankTimeout, launch
from tests.doctor import hangs
from tests.figures import slowness

HANG_TIMEOUT = 3.0
AT_ONCE = 4


@dataclass
class Ended:
    """How a launch ended."""

    value: list[Any] | None
    error: Exception | None
    seconds: float


def run(fn: Callable, nprocs: int, **options: float | None) -> Ended:
    began, value, error = time.monotonic(), None, None
    options = {"hang_timeout": HANG_TIMEOUT, "timeout": 60} | options
    try:
        value = launch(fn, nprocs, backend="gloo", device="cpu", **options)
    except Exception as raised:
        error = raised
    return Ended(value, error, time.monotonic() - began)


LAUNCHES: dict[str, Callable[[], Ended]] = {}
"""By the test that looks at how it ended."""


def after(fn: Callable, nprocs: int, **options: float | None) -> Callable:
    """Decorates a test that is given how the ranks of `fn` ended, once they have."""

    def decorate(test: Callable) -> Callable:
        LAUNCHES[test.__name__] = functools.partial(run, fn, nprocs, **options)
        return test

    return decorate


@pytest.fixture(scope="module")
def running(request):
    """The launches of the tests that were asked for, several at a time, in the tests' order."""
    launch(
        hangs.nothing, 1, 0, 0, backend="gloo", device="cpu"
    )  # imports torch before any clock runs
    mine = [item.name for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {name: pool.submit(LAUNCHES[name]) for name in mine if name in LAUNCHES}
        yield futures
        for future in futures.values():
            future.cancel()


@pytest.fixture
def ended(running: dict[str, Future], request) -> Ended:
    return running[request.node.name].result()


@pytest.fixture
def found(ended: Ended) -> Diagnosis:
    """What the doctor said of a hang."""
    assert isinstance(ended.error, HangError), ended
    assert ended.seconds < 15 or ended.seconds < 15 * slowness()
    diagnosis = ended.error.diagnosis
    assert diagnosis.text in str(ended.error)
    assert ended.error.ranks == list(diagnosis.ranks)
    return diagnosis


def unit(found: Diagnosis, rank: int) -> tuple:
    seen = found.situations[rank]
    return seen.microbatch, seen.chunk


def names(found: Diagnosis, rank: int) -> list[str]:
    return [entry.partition(" (")[0] for entry in found.situations[rank].path]


# -- Messages --


@after(hangs.send_send_cycle, 2)
def test_two_ranks_that_both_send_first(found):
    assert found.kind == findings.CYCLE
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


@after(hangs.missing_receive, 2)
def test_a_receive_that_is_missing(found):
    assert found.kind == findings.MISSING
    assert found.ranks == (1,)
    assert unit(found, 0) == (3, 0)
    assert "has asked for 3 activations from rank 0 so far, not for this one" in found.text
    assert found.situations[1].call.name == "all-reduce"


@after(hangs.wrong_peer, 3)
def test_a_message_to_the_wrong_peer(found):
    assert found.kind == findings.WRONG_PEER
    assert found.ranks == (0,)
    assert "sends activations to rank 2, but its next stage is rank 1" in found.cause
    assert unit(found, 1) == (0, 0)


@after(hangs.unequal_microbatches, 3)
def test_stages_with_different_numbers_of_microbatches(found):
    assert found.kind == findings.UNEQUAL
    assert found.ranks == (1,)
    assert "microbatches: ranks 0 and 2: 4; rank 1: 6" in found.cause
    assert unit(found, 1) == (4, 0)


# -- Collectives --


@after(hangs.skipped_collective, 4)
def test_a_rank_that_skips_a_collective(found):
    assert found.kind == findings.MISSING
    assert found.ranks == (2,)
    assert "all-reduce #4 (sum, [4, 8] float32)" in found.cause
    assert "ranks 0, 1 and 3 are" in found.cause
    assert found.situations[2].call.name == "all-gather"


@after(hangs.early_return, 3)
def test_a_rank_that_skips_a_collective_and_returns(found):
    assert found.kind == findings.LEFT
    assert found.ranks == (2,)
    assert {(m.rank, m.waited_for_by) for m in found.missing} == {(2, 0), (2, 1)}


@after(hangs.mismatched_shapes, 3)
def test_mismatched_shapes_in_a_collective(ended):
    """Nobody hangs: the ranks are told. The doctor says which of them is the odd one."""
    assert isinstance(ended.error, RankError)
    found = ended.error.diagnosis
    assert found.kind == findings.MISMATCH
    assert found.ranks == (1,)
    assert "ranks 0 and 2 with all-reduce of [2, 8] float32" in found.cause
    assert "rank 1 with all-reduce of [1, 8] float32" in found.cause
    assert found.cause in " ".join(str(ended.error).split())


@after(hangs.mismatched_operations, 3)
def test_different_operations_in_one_collective(ended):
    assert isinstance(ended.error, RankError)
    found = ended.error.diagnosis
    assert found.kind == findings.MISMATCH
    assert found.ranks == (1,)
    assert "rank 1 with broadcast of [16] float32 (from rank 0)" in found.cause


@after(hangs.mismatched_operations_over_gloo, 3)
def test_different_operations_in_one_collective_of_gloo(found):
    assert found.kind == findings.MISMATCH
    assert found.ranks == (1,)
    assert "rank 1 with broadcast of [16] float32 (from rank 0)" in found.cause


@after(hangs.wrong_order, 2)
def test_two_collectives_in_different_orders(found):
    assert found.kind == findings.ORDER
    assert found.cycle == (0, 1)


@after(hangs.never_waits_for_launched, 2)
def test_waiting_for_an_asynchronous_collective(found):
    assert found.kind == findings.STUCK
    assert found.ranks == (1,)
    assert names(found, 0) == ["collective-wait"]
    assert found.situations[0].call.shape == (7,)
    assert found.situations[1].kind == "computes"


@after(hangs.rank_that_skips_its_experts, 4)
def test_an_all_to_all_that_a_rank_of_the_expert_group_skips(found):
    """Also: that the ranks of an all-to-all gave unequal numbers of rows is no mistake of theirs."""
    assert found.kind == findings.STUCK
    assert found.ranks == (3,)
    waits = found.situations[2]
    assert (waits.waits_for, waits.group.ranks) == ((3,), (2, 3))
    assert "([0, 2] float32) of the expert group (ranks 2 and 3), for rank 3" in waits.text


@after(hangs.rank_that_skips_a_hop, 4)
def test_a_hop_of_a_ring_that_a_rank_of_the_context_group_skips(found):
    assert found.kind == findings.STUCK
    assert found.ranks == (2,)
    waits = found.situations[3]
    assert (waits.waits_for, waits.group.ranks) == ((2,), (2, 3))
    assert waits.text.startswith("waits in ring-hop #")
    assert "([2, 3] float32) of the context group (ranks 2 and 3), for rank 2" in waits.text


# -- Ranks --


@after(hangs.stopped_rank, 3)
def test_a_stopped_rank(found):
    assert found.kind == findings.STOPPED_RANK
    assert found.ranks == (1,)
    assert [unit(found, rank) for rank in range(3)] == [(1, 0), (2, 0), (2, 0)]
    assert found.situations[0].call.payload == "gradient"
    assert found.situations[2].call.payload == "activation"
    assert 1 not in found.stacks


@after(hangs.asleep, 3)
def test_a_rank_that_sleeps_in_python(found):
    assert found.kind == findings.STUCK
    assert found.ranks == (1,)
    assert unit(found, 1) == (1, 0)
    assert "has been asleep" in found.cause
    assert "time.sleep(600)" in found.cause


@after(hangs.endless_loop, 2)
def test_a_rank_in_an_endless_loop_of_an_interleaved_schedule(found):
    assert found.kind == findings.STUCK
    assert found.ranks == (1,)
    assert unit(found, 1) == (3, 1)
    assert unit(found, 0) == (3, 1)
    assert "has been computing" in found.cause
    assert "in the forward of microbatch 3, chunk 1" in found.text


@after(hangs.swallowed_exception_over_gloo, 2)
def test_an_exception_that_somebody_swallows(found):
    assert found.kind == findings.SWALLOWED
    assert found.ranks == (1,)
    assert "ended forward-compute of microbatch 2" in found.cause
    assert "ValueError: a bad sample" in found.cause
    assert "more lines" not in found.cause


@after(hangs.swallowed_exception, 2)
def test_an_exception_that_somebody_swallows_reaches_those_that_wait(ended):
    """Through shared memory they are told, and nobody hangs."""
    assert isinstance(ended.error, RankError)
    assert ended.error.ranks[0] == 0
    assert "given up this step: ValueError: a bad sample" in ended.error.summaries[0]


@after(hangs.planned_schedule, 2)
def test_a_planned_schedule_that_sticks_in_a_backward(found):
    assert found.kind == findings.STUCK
    assert found.ranks == (1,)
    assert found.situations[1].work == "backward"
    assert unit(found, 1) == (2, 0)
    assert unit(found, 0) == (2, 0)
    assert "in the backward of microbatch 2" in found.cause


# -- Calls of torch.distributed itself --


@after(hangs.both_receive, 2)
def test_two_ranks_that_both_receive_first(found):
    assert found.kind == findings.CYCLE
    assert found.cycle == (0, 1)
    assert names(found, 0) == ["torch.distributed.recv"]


@after(hangs.barrier_of_one, 2)
def test_a_barrier_that_one_rank_does_not_enter(found):
    assert found.kind == findings.MISSING
    assert found.situations[0].call.name == "torch.distributed.barrier"


@after(hangs.handle_of_torch, 2)
def test_a_handle_that_nobody_traced(found):
    assert found.kind == findings.MISSING
    assert found.ranks == (0,)
    assert "src=1).wait()" in found.cause


# -- As on NCCL --


@after(hangs.gpu_waits_in_a_collective, 3)
def test_a_collective_that_the_gpu_waits_in(found):
    assert found.kind == findings.STUCK
    assert found.ranks == (1,)
    assert "Ranks 0 and 2 wait for it" in found.cause
    assert [found.situations[rank].waits_for for rank in range(3)] == [(1,), (), (1,)]
    call = found.situations[0].call
    assert (call.name, call.shape, call.on_device) == ("all-reduce", (4,), True)
    assert "of the tensor group (ranks 0, 1 and 2), for rank 1" in found.situations[2].text
    assert "in wait_for_the_gpu" in found.stacks[0]


@after(hangs.gpu_waits_for_a_message, 2)
def test_a_message_that_the_gpu_waits_for(found):
    assert found.kind == findings.STUCK
    assert found.ranks == (1,)
    assert "its GPU sends a message to rank 1, and waits until rank 1 takes it" in found.text


@after(hangs.backward_in_a_thread_of_its_own, 2)
def test_a_backward_pass_in_a_thread_of_its_own(found):
    assert found.kind == findings.STUCK
    assert found.ranks == (0,)
    assert "forever.wait()" in found.cause
    hook, _, program = found.stacks[0].partition("autograd's own thread")
    assert "in hook_of_a_layer" in hook
    assert "in _engine_run_backward" in program
    assert "in backward_in_a_thread_of_its_own" in program


# -- No hang --


@after(hangs.slow, 2, hang_timeout=8)
def test_a_slow_rank_is_no_hang(ended):
    assert ended.value == ["done", "done"], ended


@after(hangs.asleep, 2, timeout=3, hang_timeout=None)
def test_without_hang_timeout_nothing_is_recorded(ended):
    assert isinstance(ended.error, RankTimeout)
    assert ended.error.diagnosis is None


@after(hangs.asleep, 2, hang_timeout=60, timeout=5)
def test_a_time_out_that_comes_first_has_a_diagnosis_too(ended):
    assert isinstance(ended.error, RankTimeout)
    assert ended.error.diagnosis.kind == findings.STUCK


def test_a_hang_timeout_of_zero_is_refused():
    with pytest.raises(ValueError, match="hang_timeout is 0; give more than 0, or None"):
        launch(hangs.slow, 2, hang_timeout=0)


def test_every_test_looks_at_a_launch_of_its_own():
    assert len(LAUNCHES) == 28
    assert all(name in globals() for name in LAUNCHES)
