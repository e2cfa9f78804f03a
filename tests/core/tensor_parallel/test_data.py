"""`broadcast_data` gives every rank of the group the first one's batch."""

import pytest
import torch
import torch.distributed as dist

from minimegatron.core.tensor_parallel.data import broadcast_data
from tests.groups import PretendGroup
from tests.ranks import run_ranks

BATCH = {
    "text": torch.arange(12).view(3, 4),
    "scalar": torch.tensor(5),
    "deep": torch.arange(32).view(2, 1, 2, 2, 4),
    "empty": torch.zeros(0, 3, dtype=torch.int64),
}


def receive() -> dict[str, torch.Tensor]:
    group = dist.group.WORLD
    return broadcast_data(list(BATCH), BATCH if group.rank() == 0 else None, torch.int64, group)


def test_every_rank_gets_the_batch():
    for received in run_ranks(receive, 2):
        assert list(received) == list(BATCH)
        for key, tensor in BATCH.items():
            assert received[key].shape == tensor.shape and torch.equal(received[key], tensor)


def test_bad_batches():
    for data, match in [
        ({"a": torch.zeros(2)}, "'a' has dtype torch.float32 but is to be broadcast as"),
        ({"b": torch.zeros(2)}, r"no 'a'; it has \['b'\]"),
        ({"a": torch.zeros(1, 1, 1, 1, 1, 1).long()}, "6 dimensions"),
    ]:
        with pytest.raises(ValueError, match=match):
            broadcast_data(["a"], data, torch.int64, PretendGroup())


def test_one_rank_has_nobody_to_tell(monkeypatch):
    """On a GPU, sending the sizes to oneself would wait for all that is queued, once a microbatch."""
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("waits for the GPU"))
    received = broadcast_data(list(BATCH), BATCH, torch.int64, PretendGroup())
    assert all(torch.equal(received[key], tensor) for key, tensor in BATCH.items())
