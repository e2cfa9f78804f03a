"""`TorchTransport`: messages through `torch.distributed`, between ranks of a group."""

import pytest
import torch
import torch.distributed as dist

from minimegatron.core.pipeline_parallel.transport import TensorMessage, TorchTransport
from tests.ranks import run_ranks


def _exchange_with_the_other(batched: bool) -> float:
    """Four ranks in groups {0, 2} and {1, 3}: each sends its rank to the other of its group."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    transport, peer = TorchTransport(group), 1 - group.rank()
    mine, theirs = torch.full((3,), float(dist.get_rank())), torch.empty(3)
    messages = [
        TensorMessage(True, mine, peer, "activation"),
        TensorMessage(False, theirs, peer, "activation"),
    ]
    if batched:
        works = transport.start_batch(messages)
    else:
        works = [transport.start(message) for message in messages]
    for work in works:
        work.wait()
    return theirs.mean().item()


@pytest.mark.parametrize("batched", [True, False])
def test_a_peer_is_a_rank_of_the_group_not_of_the_world(batched: bool):
    assert run_ranks(_exchange_with_the_other, 4, batched, timeout=20) == [2.0, 3.0, 0.0, 1.0]


@pytest.mark.parametrize("matches_by_tag", [True, False])
def test_an_empty_batch_is_refused_on_every_backend(matches_by_tag: bool):
    """NCCL would end with an IndexError, gloo would start nothing: the same words for both."""
    transport = TorchTransport.__new__(TorchTransport)
    transport.matches_by_tag = matches_by_tag
    with pytest.raises(ValueError, match="a batch of 0 messages"):
        transport.start_batch([])
