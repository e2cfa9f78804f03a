"""Ranks that are started again never meet the dead."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from minimegatron.training.process_group import fresh_store

MINUTE = timedelta(minutes=1)


class LateStore:
    """A store through which one rank comes late: the others are there long before."""

    def __init__(self, store: dist.Store, seconds: float):
        self.store, self.seconds = store, seconds

    def __call__(self, rank: int, world_size: int) -> dist.Store:
        time.sleep(self.seconds)
        return fresh_store(self.store, rank, world_size, MINUTE)


@pytest.mark.parametrize("late", [0, 1, 2, None])
def test_nothing_is_left_of_the_dead(late):
    shared = dist.HashStore()
    for generation in range(3):
        with ThreadPoolExecutor(3) as ranks:
            starts = [LateStore(shared, 0.1 if rank == late else 0.0) for rank in range(3)]
            stores = list(ranks.map(lambda rank: starts[rank](rank, 3), range(3)))  # noqa: B023
        assert not any(store.check(["address"]) for store in stores)
        stores[generation].set("address", f"of generation {generation}")
        assert all(store.get("address").decode()[-1] == str(generation) for store in stores)


def test_a_generation_that_died_while_meeting():
    shared = dist.HashStore()
    # Ranks 0 and 1 had met, rank 2 had replied, and then they were killed.
    shared.set("generation", "old")
    shared.set("reply/1", "old abc")
    shared.set("welcome/1", "abc")
    shared.set("reply/2", "old def")
    found = {}

    def start(rank: int) -> None:
        found[rank] = fresh_store(shared, rank, 3, MINUTE)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert not found  # the old welcome is not theirs
    start(0)
    for thread in threads:
        thread.join(10)
    found[1].set("key", "value")
    assert found[0].get("key") == found[2].get("key") == b"value"


def test_who_is_missing():
    with pytest.raises(RuntimeError, match="rank 1 has not come"):
        fresh_store(dist.HashStore(), 0, 2, timedelta(seconds=0.05))
    with pytest.raises(RuntimeError, match="rank 0 has not come"):
        fresh_store(dist.HashStore(), 1, 2, timedelta(seconds=0.05))
