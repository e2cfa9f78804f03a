"""Shared-memory messages: content, order, reuse of memory, and what a neighbour's end looks like."""

import time

import pytest
import torch
import torch.distributed as dist

from minimegatron.core.pipeline_parallel import p2p_communication
from minimegatron.core.pipeline_parallel.local_transport import LocalTransport
from minimegatron.core.pipeline_parallel.p2p_communication import get_transport
from minimegatron.core.pipeline_parallel.transport import ACTIVATION, GRADIENT, TensorMessage
from tests.ranks import run_ranks


def _send(transport, value, peer, payload=ACTIVATION, shape=(3, 2)):
    return transport.start(TensorMessage(True, torch.full(shape, float(value)), peer, payload))


def _receive(transport, peer, payload=ACTIVATION, shape=(3, 2)):
    tensor = torch.empty(shape)
    return tensor, transport.start(TensorMessage(False, tensor, peer, payload))


def exchange_in_a_ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = get_transport(dist.group.WORLD)
    assert isinstance(transport, LocalTransport)
    assert get_transport(dist.group.WORLD) is transport
    after, before = (rank + 1) % size, (rank - 1) % size
    for i in range(20):
        _send(transport, 100 * rank + i, after)
        _send(transport, -100 * rank - i, before, GRADIENT, (5,))
    held = []
    for i in range(20):
        tensor, work = _receive(transport, before)
        grad, grad_work = _receive(transport, after, GRADIENT, (5,))
        grad_work.wait()
        work.wait()
        assert tensor.tolist() == [[100 * before + i] * 2] * 3
        assert grad.tolist() == [-100 * after - i] * 5
        held.append(tensor)
    # Held tensors are not overwritten by later messages.
    assert [tensor[0, 0].item() for tensor in held] == [100 * before + i for i in range(20)]
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_message_arrives_in_order_and_stays(size):
    assert all(run_ranks(exchange_in_a_ring, size))


def reuse_slots():
    transport = get_transport(dist.group.WORLD)
    other = 1 - dist.get_rank()
    for i in range(50):
        _send(transport, i, other)
        tensor, work = _receive(transport, other)
        work.wait()
        assert tensor[0, 0] == i
        tensor.requires_grad_()
        tensor.square().sum().backward()  # autograd holds the memory, then lets go
        assert tensor.grad[0, 0] == 2 * i
        del tensor, work
        dist.barrier()
    return len(transport.connections[other]._slots)


def test_memory_is_used_again_once_nobody_holds_it():
    assert max(run_ranks(reuse_slots, 2)) <= 3


def wrong_size():
    transport = get_transport(dist.group.WORLD)
    other = 1 - dist.get_rank()
    _send(transport, 1, other, shape=(4, 2))
    _, work = _receive(transport, other, shape=(3, 2))
    with pytest.raises(ConnectionError, match="32 bytes came where 24 bytes were expected"):
        work.wait()
    return True


def test_shapes_that_do_not_agree_are_told():
    assert all(run_ranks(wrong_size, 2))


def neighbour_leaves(what_it_leaves_unread: int) -> float:
    transport = get_transport(dist.group.WORLD)
    if dist.get_rank() == 0:
        for i in range(what_it_leaves_unread):
            _send(transport, i, 1)
    dist.barrier()
    if dist.get_rank() == 1:
        del transport
        p2p_communication._transports.clear()  # closes its sockets, as the end of its process would
        return 0.0
    _, work = _receive(transport, 1, GRADIENT)  # it travels where the activations went
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="has ended, or has left"):
        work.wait()
    return time.monotonic() - began


@pytest.mark.parametrize("what_it_leaves_unread", [0, 1])
def test_a_neighbour_that_has_gone_is_noticed_at_once(what_it_leaves_unread):
    assert run_ranks(neighbour_leaves, 2, what_it_leaves_unread)[0] < 10
