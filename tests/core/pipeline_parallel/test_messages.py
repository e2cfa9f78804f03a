"""Messages between stages over real ranks: what arrives, in which order, and from whom."""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.p2p_communication import (
    ACTIVATION,
    GRADIENT,
    P2PCommunicator,
    TensorMessage,
    communicator_of,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from tests.backend.shm_groups import needs_shared_memory
from tests.core.wire_kinds import (
    SHARED,
    begin,
    communicator,
    end,
    group_over,
    over_each_kind,
    receive,
    run_over,
    send,
)
from tests.fake_transport import FakeGroup

# -- To whom --


def exchange_with_the_other(kind: str, is_batched: bool) -> float:
    """Four ranks in groups {0, 2} and {1, 3}: each sends its rank to the other of its group."""
    groups = [group_over(kind, ranks) for ranks in ([0, 2], [1, 3])]
    group = groups[dist.get_rank() % 2]
    p2p, peer = communicator(group), 1 - group.rank()
    theirs = torch.empty(3)
    messages = [
        send(dist.get_rank(), peer, shape=(3,)),
        TensorMessage(False, theirs, peer, ACTIVATION),
    ]
    works = p2p.start_batch(messages) if is_batched else list(map(p2p.start, messages))
    assert len(works) == 2
    for work in works:
        work.wait()
    return theirs.mean().item()


@pytest.mark.parametrize("is_batched", [True, False], ids=["batch", "lone"])
@over_each_kind
def test_a_peer_is_a_rank_of_the_group_not_of_the_world(kind, is_batched):
    assert run_over(kind, exchange_with_the_other, 4, is_batched) == [2.0, 3.0, 0.0, 1.0]


def test_an_empty_batch_starts_nothing():
    """`torch.distributed` would refuse it: with an IndexError over NCCL."""
    assert P2PCommunicator.__new__(P2PCommunicator).start_batch([]) == []


def test_a_communicator_is_made_once_for_its_groups_and_config():
    groups = ProcessGroupCollection(pp=FakeGroup(0, 2))
    config, other = (
        ModelParallelConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
        for _ in range(2)
    )
    made = communicator_of(groups, config)
    assert made.pp_group is groups.pp and made.config is config
    assert communicator_of(groups, config) is made
    assert communicator_of(groups, other) is not made
    groups.pp = FakeGroup(1, 2)
    assert communicator_of(groups, other).curr_rank_in_pg == 1


# -- What arrives --


def exchange_in_a_ring(kind: str) -> bool:
    p2p = communicator(group_over(kind))
    rank, after, before, num = p2p.curr_rank_in_pg, p2p.next_rank, p2p.prev_rank, 20
    begin(p2p, send_limit=num)
    for i in range(num):
        p2p.exchange([send(100 * rank + i, after), send(-100 * rank - i, before, GRADIENT, (5,))])
    held = []
    for i in range(num):
        activation, gradient = p2p.exchange([receive(before), receive(after, GRADIENT, (5,))])
        assert gradient.wait().tolist() == [-100 * after - i] * 5
        assert activation.wait().tolist() == [[100 * before + i] * 2] * 3
        assert activation.wait() is activation.tensor
        assert activation.tensor.requires_grad and not gradient.tensor.requires_grad
        held.append(activation.tensor)
    end(p2p)
    # Held tensors are not overwritten by later messages.
    assert [tensor[0, 0].item() for tensor in held] == [100 * before + i for i in range(num)]
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
@over_each_kind
def test_every_message_arrives_in_order_and_stays(kind, size):
    assert all(run_over(kind, exchange_in_a_ring, size))


def send_nothing(kind: str) -> tuple:
    p2p = communicator(group_over(kind))
    if dist.get_rank() == 0:
        p2p.send_forward(torch.empty(0, 2, 4), is_last_stage=False)
        p2p.send_forward(torch.ones(1, 2, 4), is_last_stage=False)
        p2p.finish()
        return ()
    empty = p2p.recv_forward((0, 2, 4), is_first_stage=False)
    full = p2p.recv_forward((1, 2, 4), is_first_stage=False)
    return tuple(empty.shape), full.sum().item()


@over_each_kind
def test_a_message_without_elements_arrives(kind):
    assert run_over(kind, send_nothing, 2)[1] == ((0, 2, 4), 8.0)


def send_and_free(kind: str) -> float:
    """Rank 0 frees what it sends, and fills the memory anew, before rank 1 asks for it."""
    p2p, size = communicator(group_over(kind)), 1 << 20
    begin(p2p)
    if dist.get_rank() == 0:
        output = torch.full((size, 1, 1), 3.0)
        p2p.send_forward(output, False)
        output.data = torch.empty(1)
        gc.collect()
        others = [torch.full((size, 1, 1), 7.0) for _ in range(4)]
        dist.barrier()
        end(p2p)
        return others[0][0].item()
    dist.barrier()
    received = p2p.recv_forward((size, 1, 1), False)
    end(p2p)
    return received.unique().item()


@over_each_kind
def test_what_is_sent_may_be_freed_at_once(kind):
    assert run_over(kind, send_and_free, 2) == [7.0, 3.0]


def send_in_inference_mode(kind: str) -> list[float]:
    p2p, found = communicator(group_over(kind)), []
    for number in range(3):
        with torch.inference_mode(number == 0):
            if p2p.pp_group.rank() == 0:
                p2p.send_forward(torch.full((4, 2), float(number)), False)
            else:
                found.append(p2p.recv_forward((4, 2), False).sum().item())
    p2p.finish()
    return found


@over_each_kind
def test_a_step_in_inference_mode_does_not_end_the_later_ones(kind):
    """Was: every later message of the channel was refused."""
    assert run_over(kind, send_in_inference_mode, 2)[1] == [0.0, 8.0, 16.0]


def expect_another_size(kind: str) -> str:
    p2p = communicator(group_over(kind))
    other = p2p.next_rank
    begin(p2p)
    _, received = p2p.exchange([send(1, other, shape=(4, 2)), receive(other)])
    with pytest.raises(ConnectionError) as error:
        received.wait()
    return str(error.value)


@needs_shared_memory
def test_shapes_that_do_not_agree_are_told():
    first, second = run_over(SHARED, expect_another_size, 2)
    for words in (first, second):
        assert "32 bytes came where 24 bytes were expected" in words
    assert "stage 0 lost stage 1 while receiving an activation of shape (3, 2)" in first


# -- Stages that have gone --


def neighbour_leaves(kind: str, num_left_unread: int) -> str:
    """Rank 1 leaves the group; the time-out is longer than the test may take."""
    p2p = communicator(group_over(kind))
    begin(p2p)
    if dist.get_rank() == 1:
        dist.barrier()
        dist.destroy_process_group(p2p.pp_group)
        dist.barrier()
        return ""
    p2p.exchange([send(number, 1) for number in range(num_left_unread)])
    dist.barrier()
    (received,) = p2p.exchange([receive(1, GRADIENT)])
    with pytest.raises(ConnectionError) as error:
        received.wait()
    dist.barrier()
    return str(error.value)


@needs_shared_memory
@pytest.mark.parametrize("num_left_unread", [0, 1])
def test_a_neighbour_that_has_gone_is_noticed(num_left_unread):
    words, _ = run_over(SHARED, neighbour_leaves, 2, num_left_unread)
    assert "stage 0 lost stage 1 while receiving a" in words
    assert "has ended, or has left" in words


def leave_after_a_step(kind: str) -> tuple[float, bool]:
    """Rank 0 ends its step and leaves the group; does it before rank 1 asks for its message?"""
    p2p, has_ended = communicator(group_over(kind)), True
    begin(p2p)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        p2p.send_forward(torch.full((1 << 20, 1, 1), 5.0), False)
        end(p2p)
        dist.destroy_process_group(p2p.pp_group)
        store.set("left", "")
        dist.barrier()
        return 5.0, True
    try:
        store.wait(["left"], timedelta(seconds=30 if kind == SHARED else 1))
    except RuntimeError:
        has_ended = False
    received = p2p.recv_forward((1 << 20, 1, 1), False)
    end(p2p)
    dist.barrier()
    return received.unique().item(), has_ended


@over_each_kind
def test_what_was_sent_arrives_though_the_sender_leaves_after_its_step(kind):
    """Over gloo the sender waits until it is asked for: else it might end, and take it away."""
    assert run_over(kind, leave_after_a_step, 2) == [(5.0, True), (5.0, kind == SHARED)]


def start_after_the_peer_has_left(kind: str) -> str:
    p2p = communicator(group_over(kind))
    if dist.get_rank() == 1:
        dist.destroy_process_group(p2p.pp_group)
    dist.barrier()
    said = ""
    if dist.get_rank() == 0:
        with pytest.raises(ConnectionError) as error:
            p2p.send_forward(torch.ones(1, 1, 1), False)
        said = str(error.value)
    dist.barrier()
    return said


@needs_shared_memory
def test_a_message_that_cannot_be_started_names_both_stages():
    said, _ = run_over(SHARED, start_after_the_peer_has_left, 2)
    assert said.startswith("stage 0 lost stage 1 while starting a message (activation): "), said


@pytest.mark.parametrize("is_batched", [True, False], ids=["batch", "lone"])
def test_an_exchange_without_memory_names_no_stage(monkeypatch, is_batched):
    config = ModelParallelConfig(
        pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, batch_p2p_comm=is_batched
    )
    p2p = P2PCommunicator(FakeGroup(0, 2), config)

    def fail(message: TensorMessage) -> TensorMessage:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(p2p, "_with_memory", fail)
    monkeypatch.setattr(p2p, "start", lambda message: None)
    with pytest.raises(RuntimeError, match="^no memory is left"):
        p2p.exchange([send(1.0, 1), receive(1)])
