"""Groups of more ranks than share memory for everything: each rank is a thread of this process."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from minimegatron.backend import group as groups
from minimegatron.backend.group import MAX_RANKS, SharedMemoryGroup

SECONDS = 60.0
MOST = MAX_RANKS + 2
"""Ranks that are connected here. The real bound would take 2,000 open files of one process."""


@pytest.fixture(autouse=True)
def few_are_connected(monkeypatch):
    monkeypatch.setattr(groups, "MAX_CONNECTED", MOST)


def on_threads(size: int, function: Callable[[SharedMemoryGroup], object]) -> list:
    """What the function returns on each rank of a new group."""
    store, found = dist.HashStore(), [None] * size

    def run(rank: int) -> None:
        try:
            group = SharedMemoryGroup(store, rank, size, timedelta(seconds=SECONDS))
            found[rank] = function(group)
            group.barrier().wait()
            group.shutdown()
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not [error for error in found if isinstance(error, Exception)], found
    return found


def use_everything(group: SharedMemoryGroup) -> dict[str, list[float]]:
    """Each kind of call once, with numbers that say whose they are."""
    rank, size = group.rank(), group.size()
    found = {}

    def note(name: str, work: dist.Work, *tensors: torch.Tensor) -> None:
        work.wait()
        found[name] = torch.cat([tensor.flatten() for tensor in tensors]).tolist()

    own, rows = torch.tensor([float(rank)]), torch.arange(float(size)) + 100 * rank
    total = own.clone()
    note("all_reduce", group.allreduce([total]), total)
    gathered = torch.empty(size)
    note("all_gather", group.all_gather_single(gathered, own), gathered)
    share = torch.empty(1)
    note("reduce_scatter", group.reduce_scatter_single(share, rows), share)
    exchanged = torch.empty(size)
    note("all_to_all", group.all_to_all_single(exchanged, rows, [], []), exchanged)
    options = dist.BroadcastOptions()
    options.rootRank = size - 1
    copied = own.clone()
    note("broadcast", group.broadcast([copied], options), copied)
    received = torch.empty(1)
    sent = group.send([own], (rank + 1) % size, 3)
    note("message", group.recv([received], (rank - 1) % size, 3), received)
    sent.wait()
    return found


@pytest.mark.parametrize("size", [MAX_RANKS + 1, MOST, MOST + 1])
def test_groups_of_many_ranks(size):
    ranks = list(map(float, range(size)))
    for rank, found in enumerate(on_threads(size, use_everything)):
        assert found == {
            "all_reduce": [sum(ranks)],
            "all_gather": ranks,
            "reduce_scatter": [100 * sum(ranks) + size * rank],
            "all_to_all": [100 * other + rank for other in ranks],
            "broadcast": [size - 1.0],
            "message": [(rank - 1.0) % size],
        }


def test_messages_from_any_of_many_ranks():
    def tell_the_first(group: SharedMemoryGroup) -> list[tuple[int, float]]:
        if group.rank():
            group.send([torch.tensor([float(group.rank())])], 0, 7).wait()
            return []
        came = []
        for _ in range(group.size() - 1):
            work = group.recv_anysource([number := torch.empty(1)], 7)
            work.wait()
            came.append((work._source_rank(), number.item()))
        return came

    came = on_threads(MAX_RANKS + 1, tell_the_first)[0]
    assert sorted(came) == [(rank, float(rank)) for rank in range(1, MAX_RANKS + 1)]


@pytest.mark.parametrize(("size", "shares"), [(MOST, True), (MOST + 1, False)])
def test_the_largest_group_that_shares_memory(size, shares):
    assert on_threads(size, lambda group: group.mesh is not None) == [shares] * size
