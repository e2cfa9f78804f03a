"""Loops over a chunk and a communicator: what recording actors write down, and what they refuse.

That real ranks do the same, message for message, is in tests/trace/test_plan_equals_trace.py.
"""

import inspect
from unittest import mock

import pytest

from minimegatron.core.orders.loop_recorder import record_loop
from minimegatron.core.orders.p2p_methods import METHODS
from minimegatron.core.orders.plan_config import PlanConfig
from minimegatron.core.orders.work import BACKWARD, COMMUNICATE, FORWARD, WARMUP, Action
from minimegatron.core.pipeline_parallel import schedule_table
from minimegatron.core.pipeline_parallel.loops import interleaved_1f1b, one_f_one_b
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.schedule_table import (
    RankMicrobatches,
    get_num_warmup_microbatches,
)
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_check import check
from minimegatron.planner.stage import Stage
from tests.planner.grid import legal_groups


def by_hand(stage):
    """1F1B as a function of a stage, which yields its actions."""
    M = stage.num_microbatches
    num_warmup = M if stage.forward_only else min(stage.pp_size - stage.pp_rank - 1, M)
    for i in range(num_warmup):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
    if num_warmup < M:
        yield stage.recv_forward(num_warmup)
    for i in range(M - num_warmup):
        yield stage.forward(num_warmup + i)
        yield stage.send_forward_recv_backward(num_warmup + i, receives=i)
        yield stage.backward(i)
        if i < M - num_warmup - 1:
            yield stage.send_backward_recv_forward(i, receives=num_warmup + i + 1)
        else:
            yield stage.send_backward(i)
    for i in range(M - num_warmup, 0 if stage.forward_only else M):
        yield stage.recv_backward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)


def without_phases(actions: list[Action]) -> list[Action]:
    return [action._replace(phase=None) for action in actions]


@pytest.mark.parametrize("is_batched", [True, False])
def test_a_loop_is_what_its_stage_yields(is_batched):
    sizes = [[8 * (stage + 1)] * (1 + stage % 3) for stage in range(5)]
    for forward_only in (False, True):
        for M in range(1, 8):
            options = {"forward_only": forward_only, "batch_p2p_comm": is_batched}
            options |= {"message_bytes": 8, "message_sizes": sizes}
            loop, yielded = (plan(x, 5, M, **options) for x in ("1f1b", by_hand))
            assert [*map(without_phases, loop.ranks)] == yielded.ranks


def test_warmup_is_the_number_that_others_reckon_with():
    for p in range(1, 7):
        for M in range(1, 7):
            for rank in range(p):
                kinds = [a.kind for a in record_loop(one_f_one_b, PlanConfig("1f1b", p, M), rank)]
                ahead = kinds[: kinds.index(BACKWARD)].count(FORWARD)
                num_warmup = get_num_warmup_microbatches(p, rank, M)
                assert ahead == min(num_warmup + 1, M)


def test_every_turn_of_interleaving_is_right():
    for p in (2, 3, 4):
        for M, G in legal_groups(p, 8):
            for overlap in (False, True):
                step = plan("interleaved", p, M, 2, G, overlap_p2p_comm=overlap)
                assert check(step) == []
                run = [record_loop(interleaved_1f1b, step.config, rank) for rank in range(p)]
                assert run == step.ranks, "not the loop that training runs"


def test_the_table_has_the_communicators_own_arguments():
    for name, row in METHODS.items():
        method = getattr(P2PCommunicator, name)
        names = tuple(inspect.signature(method).parameters)[1:]
        assert row.parameters == names
    of_stage = {name for name in dir(Stage) if name.startswith(("recv_", "send_"))}
    assert of_stage == METHODS.keys()


# -- A loop of one's own --


def one_at_a_time(chunk, p2p, recv_shapes, send_shapes):
    stage, num_stages = p2p.pp_group.rank(), p2p.pp_group.size()
    is_first, is_last = stage == 0, stage == num_stages - 1
    for i in range(chunk.num_microbatches):
        output = chunk.forward_step(i, p2p.recv_forward(recv_shapes, is_first))
        p2p.send_forward(output, is_last)
        if not chunk.forward_only:
            grad = chunk.backward_step(p2p.recv_backward(send_shapes, is_last))
            p2p.send_backward(grad, is_first)


def test_a_loop_is_planned():
    step = plan(one_at_a_time, 3, 4, message_bytes=16)
    assert step.config.schedule == "one_at_a_time" and check(step) == []
    assert [str(action) for action in step.ranks[1][:4]] == [
        "recv_forward(receive activation of microbatch 0, chunk 0 from rank 0)",
        "forward of microbatch 0, chunk 0",
        "send_forward(send activation of microbatch 0, chunk 0 to rank 2)",
        "recv_backward(receive gradient of microbatch 0, chunk 0 from rank 2)",
    ]
    assert step.bytes_sent(1) == 2 * 4 * 16
    forwards = plan(one_at_a_time, 3, 4, forward_only=True)
    assert {action.phase for action in forwards.ranks[0]} == {WARMUP}
    assert check(forwards) == []


def faulty(change):
    """The loop above with another chunk or communicator: `change(chunk, p2p)` returns both."""

    def loop(chunk, p2p, recv_shapes, send_shapes):
        one_at_a_time(*change(chunk, p2p), recv_shapes, send_shapes)

    return loop


class Other:
    """An actor that does one call in another way."""

    def __init__(self, actor, **calls):
        self._actor, self._calls = actor, calls

    def __getattr__(self, name):
        return self._calls.get(name) or getattr(self._actor, name)


def kinds(loop, p: int = 2, M: int = 2) -> set[str]:
    return {problem.kind for problem in check(plan(loop, p, M))}


def test_a_message_is_named_by_what_it_is_used_for():
    """A second forward of microbatch 0, with the input that was meant for 1."""

    def twice(chunk, p2p):
        return Other(chunk, forward_step=lambda i, x: chunk.forward_step(0, x)), p2p

    assert {"duplicate", "absent"} <= kinds(faulty(twice))


def test_what_nobody_uses_is_a_leak():
    def forgets(chunk, p2p):
        return chunk, Other(p2p, send_forward=lambda output, is_last: None)

    assert "leak" in kinds(faulty(forgets))


def test_a_tensor_of_another_microbatch_is_seen():
    kept = []

    def sends_the_first(chunk, p2p):
        def send(output, is_last):
            kept.append(output)
            p2p.send_forward(kept[0], is_last)

        kept.clear()
        return chunk, Other(p2p, send_forward=send)

    problems = check(plan(faulty(sends_the_first), 2, 2))
    assert any("a second time" in problem.text for problem in problems)


def test_a_backward_without_a_forward_is_named():
    def backward_first(chunk):
        chunk.backward_step(None)
        chunk.forward_step(0, None)

    (problem,) = check(plan(backward_first, 1, 1))
    assert str(problem).endswith("order: backward comes before its forward")


def test_interleaving_that_warms_up_too_little_is_named():
    """A real run would take from an empty queue; the plan says which input has not come."""

    def count(p, r, M, v, *sizes, **options):
        return RankMicrobatches(M * v, False, 0, M * v)

    with mock.patch.object(schedule_table, "count_rank_microbatches", count):
        found = {problem.kind for problem in check(plan("interleaved", 2, 4, 2))}
    assert {"dependency", "order"} <= found


def test_a_parameter_that_nobody_gives_is_refused():
    def asks_for_more(chunk, stages):
        """Nothing."""

    with pytest.raises(ValueError, match="asks for 'stages'.*name its parameters after chunk"):
        plan(asks_for_more, 2, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda p2p: p2p.recv_forward(()),
        lambda p2p: p2p.send_forward(None, True, True),
        lambda p2p: p2p.recv_forward((), True, overlap_p2p_comm=True),
        lambda p2p: p2p.send_backward(None, is_last_stage=True),
    ],
)
def test_wrong_arguments_are_refused_as_by_the_real_one(call):
    def loop(chunk, p2p):
        call(p2p)

    with pytest.raises(TypeError, match="takes"):
        plan(loop, 2, 2)


def test_arguments_by_name_are_the_same():
    def named(chunk, p2p, recv_shapes, send_shapes):
        rank = p2p.pp_group.rank()
        x = p2p.recv_forward(tensor_shapes=recv_shapes, is_first_stage=rank == 0)
        output = chunk.forward_step(microbatch_id=0, input_tensor=x)
        p2p.send_forward(output_tensors=output, is_last_stage=rank == 1)

    step = plan(named, 2, 1, forward_only=True)
    assert check(step) == []
    assert sum(action.kind == COMMUNICATE for action in step.ranks[0]) == 2
