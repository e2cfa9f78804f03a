"""What is under way: handles, futures, waits in any order, many at once, threads."""

import gc
import os
import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.backend.shm_groups import in_threads, make_group, run_case

MIB = 1 << 20


def full(num_bytes: int, value: float) -> torch.Tensor:
    return torch.full((num_bytes // 4,), float(value))


def has(tensor: torch.Tensor, value: float) -> bool:
    """Whether all elements are `value`."""
    return bool(tensor.eq(value).all())


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


# -- One handle --


def use_handles(num_bytes: int) -> bool:
    group, rank = make_group(), dist.get_rank()

    def begin() -> tuple[dist.Work, torch.Tensor]:
        tensor = full(num_bytes, rank + 1)
        return dist.all_reduce(tensor, group=group, async_op=True), tensor

    work, tensor = begin()
    assert work.wait() and work.wait() and has(tensor, 3)
    work, tensor = begin()
    assert work.wait(timedelta(seconds=60)) and work.is_completed() and has(tensor, 3)
    work, tensor = begin()
    while not work.is_completed():  # nobody waits, and it ends all the same
        time.sleep(0.001)
    assert has(tensor, 3)
    work, tensor = begin()
    work.wait()
    assert has(work.result()[0], 3)
    work, tensor = begin()
    assert has(work.get_future().wait()[0], 3) and has(tensor, 3)
    work = dist.broadcast(full(num_bytes, 1), 0, group, async_op=True)
    assert has(work.get_future().value()[0] if work.wait() else None, 1)
    if rank == 0:  # nothing comes of what was sent, and its tensor is not kept
        sent = dist.isend(full(num_bytes, 1), 1, group=group)
        assert sent.wait() and sent.result() == sent.get_future().wait() == []
    else:
        dist.recv(full(num_bytes, 0), 0, group=group)
    assert dist.barrier(group, async_op=True).wait()
    return True


@pytest.mark.parametrize("num_bytes", [400, 4 * MIB])
def test_a_handle_is_waited_for_asked_and_made_a_future(num_bytes):
    assert all(run_case(use_handles, 2, num_bytes))


def wait_too_briefly() -> str:
    """Rank 1 does not call at all."""
    group, rank, said = make_group(), dist.get_rank(), ""
    tensor = full(400, rank + 1)
    if rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        try:
            work.wait(timedelta(milliseconds=300))
        except RuntimeError as error:
            said = str(error)
    dist.barrier()
    return said


def test_a_wait_ends_after_the_time_that_it_was_given():
    assert run_case(wait_too_briefly, 2)[0]


# -- Futures --


def use_futures(num_bytes: int) -> bool:
    group, rank = make_group(), dist.get_rank()

    def begin(value: float) -> torch.futures.Future:
        work = dist.all_reduce(full(num_bytes, value), group=group, async_op=True)
        return work.get_future()

    assert has(begin(rank).then(lambda done: done.value()[0] / 2).wait(), 0.5)

    def reduce_again(done: torch.futures.Future) -> torch.Tensor:
        total = done.value()[0].clone()
        dist.all_reduce(total, group=group)
        return total

    assert has(begin(rank).then(reduce_again).then(lambda done: done.value() * 2).wait(), 4)

    def wait_again(done: torch.futures.Future) -> torch.Tensor:
        halved = done.value()[0] / 2
        work = dist.all_reduce(halved, group=group, async_op=True)
        return work.get_future().wait()[0]

    for _ in range(10):
        if rank:
            time.sleep(0.002)  # so that the future of the other rank is not done at once
        assert has(begin(rank).then(wait_again).wait(), 1)

    heard: list[float] = []
    some = [begin(rank + i) for i in range(20)]
    for future in some:
        future.add_done_callback(lambda done: heard.append(done.value()[0][0].item()))
    assert len(torch.futures.wait_all(some)) == 20
    gathered = torch.futures.collect_all([begin(rank + i) for i in range(20)]).wait()
    assert [has(future.value()[0], 2 * i + 1) for i, future in enumerate(gathered)] == [True] * 20
    dist.barrier(group)
    while len(heard) < 20:  # a callback may run after the wait that it belongs to
        time.sleep(0.001)
    assert sorted(heard) == [2 * i + 1 for i in range(20)]
    return True


@pytest.mark.parametrize("num_bytes", [400, 4 * MIB])
def test_futures_have_callbacks_that_may_call_collectives(num_bytes):
    assert all(run_case(use_futures, 2, num_bytes))


# -- Many at once --


def cross(num: int, num_bytes: int, message_bytes: int) -> bool:
    """Buckets, and between them messages to the other rank, which it takes only after all of them."""
    group, rank = make_group(), dist.get_rank()
    message = full(message_bytes, rank)
    buckets, works = [full(num_bytes, i + rank) for i in range(num)], []
    for i, bucket in enumerate(buckets):
        works.append(dist.all_reduce(bucket, group=group, async_op=True))
        if i % 3 == 0:
            works.append(dist.isend(message, 1 - rank, group, tag=i))
    come = [(i, torch.empty_like(message)) for i in range(0, num, 3)]
    works += [dist.irecv(tensor, 1 - rank, group, tag=i) for i, tensor in reversed(come)]
    random.Random(rank).shuffle(works)
    for work in works:
        work.wait()
    assert all(has(tensor, 1 - rank) for _, tensor in come)
    return all(has(bucket, 2 * i + 1) for i, bucket in enumerate(buckets))


@pytest.mark.parametrize(
    ("num", "num_bytes", "message_bytes"),
    [(150, 64 << 10, 64 << 10), (150, 4 * MIB, 64 << 10), (150, 64 << 10, 2 * MIB)],
)
def test_150_buckets_and_messages_that_cross_block_nobody(num, num_bytes, message_bytes):
    assert all(run_case(cross, 2, num, num_bytes, message_bytes))


def start_many(num: int) -> bool:
    group, rank, size = make_group(), dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(1), group=group)
    before = len(os.listdir("/proc/self/fd"))
    parts = [full(12, i + rank) for i in range(num)]
    works = [dist.all_reduce(part, group=group, async_op=True) for part in parts]
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "a file per call exhausts their limit"
    for work in works:
        work.wait()
    return all(has(part, size * i + size * (size - 1) / 2) for i, part in enumerate(parts))


@pytest.mark.parametrize("size", [2, 3])
def test_a_thousand_collectives_are_under_way_at_once(size):
    assert all(run_case(start_many, size, 1500))


def send_first(num: int, num_bytes: int) -> bool:
    group, rank = make_group(), dist.get_rank()
    messages = [full(num_bytes, i) for i in range(7)]
    sent = [dist.isend(messages[i % 7], 1 - rank, group) for i in range(num)]
    tensor = torch.empty_like(messages[0])
    for i in range(num):
        dist.irecv(tensor, 1 - rank, group).wait()
        assert has(tensor, i % 7), i
    for work in sent:
        work.wait()
    return True


def test_300_messages_of_1_mib_go_both_ways_before_any_is_taken():
    assert all(run_case(send_first, 2, 300, MIB))


def mix_all(seed: int) -> bool:
    """Four ranks; every kind of call under way; each rank waits in an order of its own."""
    group, rank, size = make_group(), dist.get_rank(), dist.get_world_size()
    drawn, works, wanted = random.Random(seed), [], []
    for i in range(60):
        tensor = full(drawn.choice((4, 4000, 300_000, 2 * MIB)), rank + i)
        kind = drawn.choice(("all_reduce", "broadcast", "all_gather", "ring"))
        if kind == "all_reduce":
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
            wanted.append((tensor, size * i + 6))
        elif kind == "broadcast":
            works.append(dist.broadcast(tensor, i % size, group, async_op=True))
            wanted.append((tensor, i % size + i))
        elif kind == "all_gather":
            out = [torch.empty_like(tensor) for _ in range(size)]
            works.append(dist.all_gather(out, tensor, group, async_op=True))
            wanted += [(out[peer], peer + i) for peer in range(size)]
        else:
            out = torch.empty_like(tensor)
            works.append(dist.isend(tensor, (rank + 1) % size, group, tag=i))
            works.append(dist.irecv(out, (rank - 1) % size, group, tag=i))
            wanted.append((out, (rank - 1) % size + i))
    for work in random.Random(f"{seed} {rank}").sample(works, len(works)):
        work.wait()
    return all(has(tensor, value) for tensor, value in wanted)


def test_each_rank_waits_in_an_order_of_its_own():
    assert all(run_case(mix_all, 4, 11))


def drop_handles() -> bool:
    """What is reduced in place, in halves, and through a copy, with nobody to wait for it."""
    group, rank = make_group(), dist.get_rank()
    wanted = []
    for i in range(20):
        num_bytes = 4 * MIB if i % 5 == 0 else 4000
        total, mean = full(num_bytes, rank + i), full(num_bytes, 2 * rank + i)
        turned = torch.full((2, num_bytes // 8), float(rank + i)).t()
        dist.all_reduce(total, group=group, async_op=True)
        dist.all_reduce(mean, dist.ReduceOp.AVG, group, async_op=True)
        dist.all_reduce(turned, group=group, async_op=True)
        dist.all_reduce(total.clone(), group=group, async_op=True)  # its tensor is dropped too
        wanted += [(total, 2 * i + 1), (mean, i + 1), (turned, 2 * i + 1)]
    gc.collect()
    total = full(4000, rank)
    dist.all_reduce(total, group=group)
    dist.barrier(group)
    assert has(total, 1)
    while not all(has(tensor, value) for tensor, value in wanted):
        time.sleep(0.001)
    return True


def test_handles_may_be_dropped():
    assert all(run_case(drop_handles, 2))


# -- Threads --


def use_threads() -> bool:
    first, second, rank = make_group(), make_group(), dist.get_rank()

    def reduce_many(group: dist.ProcessGroup, num_bytes: int):
        for i in range(100):
            total = full(num_bytes, rank + i)
            dist.all_reduce(total, group=group)
            assert has(total, 2 * i + 1)

    def there_and_back(group: dist.ProcessGroup, tag: int):
        for i in range(100):
            tensor = full(4000, 100 * tag + i)
            if rank == 0:
                dist.send(tensor, 1, group, tag)
                dist.recv(tensor, 1, group, tag)
                assert has(tensor, 100 * tag + i + 0.5)
            else:
                dist.recv(tensor, 0, group, tag)
                assert has(tensor, 100 * tag + i)
                dist.send(tensor + 0.5, 0, group, tag)

    in_threads(lambda: reduce_many(first, 4000), lambda: reduce_many(second, 400_000))
    in_threads(*(lambda tag=tag: there_and_back(first, tag) for tag in (1, 2, 3)))
    in_threads(lambda: there_and_back(first, 4), lambda: reduce_many(first, 4000))
    return True


def test_threads_use_two_groups_or_one_with_tags():
    assert all(run_case(use_threads, 2))


def come_and_go() -> tuple[int, int]:
    """Threads of this process before a group, and after its end."""
    dist.barrier()
    before = num_threads()
    group = make_group()
    for num_bytes in (400, 4 * MIB):
        dist.all_reduce(full(num_bytes, 1), group=group)
    peer = 1 - dist.get_rank()
    works = [dist.isend(full(400, 1), peer, group), dist.irecv(full(400, 1), peer, group)]
    works.append(dist.all_reduce(full(400, 1), group=group, async_op=True))
    works[-1].get_future().then(lambda done: done.value()).wait()
    for work in works:
        work.wait()
    dist.destroy_process_group(group)
    del group, works, work
    gc.collect()
    dist.barrier()
    deadline = time.monotonic() + 30
    while num_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, num_threads()


def test_no_thread_stays_when_a_group_ends():
    for before, after in run_case(come_and_go, 2):
        assert after <= before


SLEEP = 2.0
MAX_CPU_SECONDS = 0.2


def wait_for_the_last_rank() -> float:
    """Seconds of this process's CPU, all threads together, while it waits for a rank that sleeps."""
    last = dist.get_world_size() - 1
    groups, rank, tensor = (
        [make_group([i, last]) for i in range(last)],
        dist.get_rank(),
        full(400, 1),
    )
    for i, group in enumerate(groups):
        if rank in (i, last):
            dist.barrier(group)
    waits = [
        lambda group, peer: dist.all_reduce(tensor, group=group),
        lambda group, peer: dist.recv(tensor, peer, group),
        lambda group, peer: dist.send(tensor, peer, group),
        lambda group, peer: dist.barrier(group),
        lambda group, peer: dist.all_reduce(tensor, group=group, async_op=True).get_future().wait(),
    ]
    dist.barrier()
    if rank < last:
        began = time.process_time()
        waits[rank](groups[rank], last)
        return time.process_time() - began
    time.sleep(SLEEP)
    for peer, wait in enumerate(waits):
        if peer not in (1, 2):
            wait(groups[peer], peer)
    dist.send(tensor, 1, groups[1])
    dist.recv(tensor, 2, groups[2])
    return 0.0


def test_who_waits_sleeps():
    used = run_case(wait_for_the_last_rank, 6)
    assert max(used) < MAX_CPU_SECONDS, used
