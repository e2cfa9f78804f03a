"""The headline: on real ranks, every schedule does exactly what its plan says, message by message.

Nothing is sorted: a call's messages are compared in the order in which they were started.
"""

import itertools
from unittest import mock

import pytest
import torch.distributed as dist

import minimegatron
from minimegatron.core import parallel_state
from minimegatron.core.orders.work import ACTIVATION, GRADIENT
from minimegatron.core.pipeline_parallel import p2p_communication
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, TensorMessage
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.planner.actions import RECEIVE
from minimegatron.planner.links import LAYER_NODE
from minimegatron.planner.registry import register_schedule
from minimegatron.planner.stack_costs import messages_behind
from minimegatron.tracing.compare import compare_with_plan, wrong_messages
from minimegatron.tracing.node_order import wrong_nodes
from minimegatron.training.pipeline_schedule import get_planned_forward_backward_func
from tests import parity, parity_t5
from tests.core.pipeline_parallel.test_order import legal_groups
from tests.core.pipeline_parallel.test_real_ranks import (
    Config,
    groups_of_runs,
    pairwise,
    run_mode,
)
from tests.figures import figure
from tests.ranks import run_ranks
from tests.trace.recordings import run_step

PLAIN = ("batched", "unbatched", "batched free", "batched forward-only", "unbatched variable")
PLAIN += ("batched gloo",)
RING = ("unbatched", "overlap", "overlap free", "overlap forward-only", "unbatched variable")
RING += ("unbatched gloo", "overlap gloo")


def modes(p: int, v: int | None) -> tuple[str, ...]:
    if v is None:
        return PLAIN
    return RING if p == 2 else (*RING, "batched", "batched free", "batched forward-only")


def all_cases(p: int) -> list[Config]:
    return [
        (v, M, G, mode)
        for v in (None, 1, 2, 3)
        for M in (1, 3, 8)  # the fake transport takes all sizes, in tests/core/pipeline_parallel
        for G in ([None] if v is None else legal_groups(p, M))
        for mode in modes(p, v)
    ]


def record(p: int, cases: list[Config]) -> list:
    runs = []
    for v, of_v in itertools.groupby(cases, key=lambda case: case[0]):
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v
        )
        groups = groups_of_runs()
        with minimegatron.trace() as run:
            for _, M, G, mode in of_v:
                run_mode(groups["gloo" in mode], p, M, v, G, mode)
        parallel_state.destroy_model_parallel()
        runs.append(run)
    return runs if dist.get_rank() == 0 else []


@pytest.mark.parametrize("p", [2, 3, 4])
def test_every_rank_does_what_its_plan_says(p):
    check(p, pairwise(p))


@pytest.mark.full
@pytest.mark.parametrize("p", [2, 3, 4])
def test_every_rank_does_what_its_plan_says_in_all_modes(p):
    check(p, all_cases(p))


def check(p: int, cases: list[Config]) -> None:
    runs = run_ranks(record, p, p, cases, timeout=240)[0]
    num_actions = num_messages = 0
    by_v = [list(of_v) for _, of_v in itertools.groupby(cases, key=lambda case: case[0])]
    assert len(runs) == len(by_v) == 4
    for run, of_run in zip(runs, by_v, strict=True):
        assert run.num_steps == len(of_run)
        for number, case in enumerate(of_run):
            step = run.step(number)
            assert compare_with_plan(step) == [], case
            assert wrong_messages(step) == [], case
            assert step.plan.message_counts() == count_messages(step), case
            num_actions += sum(len(step.actions(rank)) for rank in range(p))
            num_messages += len(step.transfers)
    figure(f"p={p}: {len(cases)} steps, {num_actions} actions, {num_messages} messages")
    assert num_messages > 500


def count_messages(step) -> dict[str, int]:
    gradients = sum(message.payload == GRADIENT for message in step.transfers)
    received = sum(
        message.direction == RECEIVE
        for rank in range(len(step.stages))
        for action in step.actions(rank)
        for message in action.messages
    )
    assert received == len(step.transfers)
    return {"activation": len(step.transfers) - gradients, "gradient": gradients}


# -- Raw order --


def backwards(self, **given) -> list[TensorMessage]:
    """`P2PCommunicator._in_order`, in another order."""
    wanted = [(False, GRADIENT), (True, ACTIVATION), (False, ACTIVATION), (True, GRADIENT)]
    return sorted(in_order(self, **given), key=lambda m: wanted.index((m.is_send, m.payload)))


in_order = P2PCommunicator._in_order


def record_backwards(p: int):
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=p)
    with (
        mock.patch.object(P2PCommunicator, "_in_order", backwards),
        minimegatron.trace() as run,
    ):
        run_step(p, 4)
    return run


def test_plan_equals_trace_in_raw_order_or_the_difference_is_named():
    """A gradient that is sent after an activation is asked for, and not before as planned."""
    step = run_ranks(record_backwards, 3, 3, timeout=60)[0].step(0)
    assert wrong_messages(step) == []  # on a tagged transport everything arrives all the same
    divergences = {divergence.rank: str(divergence) for divergence in compare_with_plan(step)}
    assert set(divergences) == {0, 1, 2}
    sent = "send gradient of microbatch 0, chunk 0 to rank 1"
    received = "receive activation of microbatch 1, chunk 0 from rank 1"
    first, second = f"({sent}; {received})", f"({received}; {sent})"
    expected, found = divergences[2].split(", found ")
    assert first in expected and second in found


def record_batches(p: int):
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=p)
    with (
        mock.patch.object(p2p_communication, "is_tagged", lambda group: False),
        minimegatron.trace() as run,
    ):
        run_step(p, 4)
    return run


def test_plan_equals_trace_in_batches_as_nccl_gets_them():
    step = run_ranks(record_batches, 3, 3, timeout=60)[0].step(0)
    assert compare_with_plan(step) == []
    assert wrong_messages(step) == []
    starts = [event for events in step.events for event in events.values()]
    starts = [event for event in starts if event.name == "p2p-start"]
    assert len(starts) == 2 * len(step.transfers)


# -- Combined 1F1B: pairs, their messages, and the nodes of their layers --

EXPERTS = {"dp": 2, "ep": 2, "experts": 4, "combined": True}
ON_TWO = [
    parity.Case(M=4, num_layers=2, **EXPERTS),
    parity.Case(M=5, num_layers=3, moe_freq=(1, 0, 1), delay_wgrad=True, **EXPERTS),
    parity.Case(M=6, num_layers=1, evaluates=True, **EXPERTS),
]
RINGS = [
    {"vp": 2, "G": 2, "M": 4, "overlap": True},
    {"vp": 2, "G": 3, "M": 5, "num_layers": 5, "layout": "Et|ttt|t|L"},
    {"vp": 2, "G": 4, "M": 6, "overlap": True, "delay_wgrad": True, "deallocate": True},
    {"vp": 3, "G": 2, "M": 4, "delay_wgrad": True, "num_layers": 12, "moe_freq": (1, 0) * 6},
    {"vp": 3, "G": 3, "M": 5, "overlap": True},
    {"vp": 3, "G": 2, "M": 6, "evaluates": True},
]
ON_FOUR = [parity.Case(pp=2, batched=False, **EXPERTS, **ring) for ring in RINGS]


def record_combined(cases: list[parity.Case]) -> list:
    runs = []
    for case in cases:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=case.pp,
            virtual_pipeline_model_parallel_size=case.vp,
            expert_model_parallel_size=case.ep,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chunks, _ = parity.build(case, groups)
        data = parity.batches(case.M * case.dp)[groups.dp.rank() :: case.dp]
        with minimegatron.trace() as run:
            for forward_only in [True, False] if case.evaluates else [False]:
                iterators = [iter(data) for _ in chunks]
                parity.run_step(case, groups, chunks, iterators, forward_only)
        parallel_state.destroy_model_parallel()
        runs.append(run)
    return runs if dist.get_rank() == 0 else []


@pytest.mark.parametrize("cases", [ON_TWO, ON_FOUR], ids=["two", "four"])
def test_combined_steps_do_what_their_plans_say(cases):
    """Work, pairs and messages in raw order, and each lane's nodes as `planner.layer_plan` has them."""
    runs = run_ranks(record_combined, cases[0].world, cases, timeout=120)[0]
    num_pairs = num_messages = num_nodes = 0
    for run, case in zip(runs, cases, strict=True):
        assert run.num_steps == 1 + case.evaluates, case
        for number in range(run.num_steps):
            step = run.step(number)
            is_training = number == run.num_steps - 1
            assert not is_training or step.config.schedule == "combined", case
            assert compare_with_plan(step) == [], case
            assert wrong_messages(step) == [], case
            assert wrong_nodes(step) == [], case
            assert step.plan.message_counts() == count_messages(step), case
            for rank in range(case.pp):
                # A pair counts as its parts there; here, that the same ones share a step.
                pairs = [
                    [[(x.kind, x.microbatch, x.chunk) for x in action.parts] for action in actions]
                    for actions in (step.plan.ranks[rank], step.actions(rank))
                ]
                planned, found = ([pair for pair in of_side if pair] for of_side in pairs)
                assert found == planned and bool(found) == is_training, case
                num_pairs += len(found)
            nodes = [e for events in step.events for e in events.values() if e.name == LAYER_NODE]
            assert bool(nodes) == is_training, case
            num_messages += len(step.transfers)
            num_nodes += len(nodes)
    figure(
        f"{len(cases)} combined cases: {num_pairs} pairs, {num_messages} messages, {num_nodes} nodes"
    )


# -- Two tensors between stages --

STACKS = [
    parity_t5.T5(pp=3, split=1, M=4, deallocate=True),
    parity_t5.T5(pp=3, split=1, M=2, batched=False, evaluates=True, recompute="full"),
    parity_t5.T5(pp=3, split=2, M=4, llama=True, per_token=True),
]


def record_stacks(cases: list[parity.Case]) -> list:
    runs = []
    for case in cases:
        parity.make_groups(case)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chunks, _ = parity.build(case, groups)
        with minimegatron.trace() as run:
            for forward_only in [True, False] if case.evaluates else [False]:
                iterators = [iter(parity_t5.batches(case.M))]
                parity.run_step(case, groups, chunks, iterators, forward_only)
        runs.append(run)
    return runs if dist.get_rank() == 0 else []


def test_two_tensors_travel_as_the_plan_says():
    """Both stacks' outputs and both gradients, each with its size, in raw order."""
    runs = run_ranks(record_stacks, 3, STACKS, timeout=120)[0]
    element = 8 * parity.MICRO_BATCH * parity.HIDDEN
    encoder, decoder = (element * length for length in (parity_t5.S_ENC, parity_t5.S_DEC))
    num_messages = 0
    for run, case in zip(runs, STACKS, strict=True):
        for number in range(1 + case.evaluates):
            step = run.step(number)
            sizes = messages_behind(parity_t5.split_of(case), encoder, decoder)
            assert step.config.message_sizes == sizes
            assert compare_with_plan(step) == [], case
            assert wrong_messages(step) == [], case
            assert step.plan.message_counts() == count_messages(step), case
            for stage in (0, 1):
                ahead = [m for m in step.transfers if (m.sender, m.receiver) == (stage, stage + 1)]
                assert [m.num_bytes for m in ahead] == [*sizes[stage]] * case.M, case
            num_messages += len(step.transfers)
    figure(f"{len(runs)} cases of two stacks: {num_messages} messages")


# -- Schedules of a user's own --


@register_schedule("last-first")
def last_first(stage):
    """GPipe with its backwards in the reverse order."""
    for i in range(stage.num_microbatches):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
    for i in reversed(range(stage.num_microbatches)):
        yield stage.recv_backward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)


@register_schedule("one-at-a-time-loop")
def one_at_a_time(chunk, p2p, recv_shapes, send_shapes):
    """A loop over actors: each microbatch there and back."""
    stage, num_stages = p2p.pp_group.rank(), p2p.pp_group.size()
    is_first, is_last = stage == 0, stage == num_stages - 1
    for i in range(chunk.num_microbatches):
        output = chunk.forward_step(i, p2p.recv_forward(recv_shapes, is_first))
        p2p.send_forward(output, is_last)
        chunk.free_output(output)
        grad = chunk.backward_step(p2p.recv_backward(send_shapes, is_last))
        p2p.send_backward(grad, is_first)


PLANNED = ("gpipe", "last-first", "one-at-a-time-loop", "1f1b")


def record_planned(p: int):
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=p)
    with minimegatron.trace() as run:
        for name in PLANNED:
            for M in (1, 3, 5):
                run_step(p, M, schedule=get_planned_forward_backward_func(name))
    return run


def test_registered_schedules_do_what_their_plans_say():
    run = run_ranks(record_planned, 3, 3, timeout=120)[0]
    assert run.num_steps == len(PLANNED) * 3
    names = [run.step(number).config.schedule for number in range(run.num_steps)]
    assert names == [name for name in PLANNED for _ in range(3)]
    for number in range(run.num_steps):
        step = run.step(number)
        assert compare_with_plan(step) == [], names[number]
        assert wrong_messages(step) == [], names[number]
        phases = {action.phase for action in step.actions(0)}
        assert phases == {action.phase for action in step.plan.ranks[0]}
