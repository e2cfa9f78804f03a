"""Memory that a group shares: bounded, given back, and never two tensors' at once."""

import gc
import os
import re
import time

import pytest
import torch
import torch.distributed as dist

from minimegatron.backend.group import MAX_BYTES
from minimegatron.backend.mesh import MOST_BYTES_AHEAD
from tests.backend.shm_groups import make_group, needs_shared_memory, refusal, run_case
from tests.ranks import run_ranks

pytestmark = needs_shared_memory

MIB = 1 << 20
PAGE = 4096


def full(num_bytes: int, value: float) -> torch.Tensor:
    return torch.full((num_bytes // 4,), float(value))


def has(tensor: torch.Tensor, value: float) -> bool:
    return bool(tensor.eq(value).all())


def shared_bytes() -> int:
    """Shared memory that this process has mapped for what it sends or receives."""
    total = 0
    with open("/proc/self/maps") as file:
        for line in file:
            if "memfd:minimegatron" in line:
                start, end = line.split()[0].split("-")
                total += int(end, 16) - int(start, 16)
    return total


# -- It never grows --


def lengths_that_vary(num: int, most_bytes: int) -> tuple[int, int]:
    """Messages and collectives of lengths that vary: the most memory mapped, the longest one."""
    group, rank = make_group(), dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    most, longest = 0, 0
    for _ in range(num):
        lengths = (4 * torch.randint(1, most_bytes // 4, (4,), generator=generator)).tolist()
        longest = max(longest, *lengths)
        for length in lengths:
            tensor = full(length, rank)
            dist.all_reduce(tensor, group=group)
            assert has(tensor, 1)
            if rank == 0:
                dist.send(tensor, 1, group)
            else:
                dist.recv(tensor, 0, group)
        dist.barrier(group)
        most = max(most, shared_bytes())
    return most, longest


def test_shared_memory_stays_small_while_lengths_vary():
    """Of collectives two slots each way, of messages as many, and a page of marks each way."""
    for most, longest in run_case(lengths_that_vary, 2, 150, 400_000):
        assert 0 < most <= 8 * longest + 16 * PAGE, (most, longest)


def run_ahead(num: int, num_bytes: int, kind: str) -> int:
    """Rank 0 gives as fast as it can, rank 1 takes slowly: the memory that this rank has mapped."""
    group, rank = make_group(), dist.get_rank()
    for i in range(num):
        tensor = full(num_bytes, i if rank == 0 else -1)
        if kind == "broadcast":
            dist.broadcast(tensor, 0, group)
        elif kind == "send" and rank == 0:
            dist.send(tensor, 1, group)
        elif kind == "send":
            dist.recv(tensor, 0, group)
        else:
            dist.reduce(tensor, 1, group=group)
            tensor += rank
        if rank == 1:
            assert has(tensor, i), i
            time.sleep(0.002)
    most = shared_bytes()
    dist.barrier(group)
    return most


@pytest.mark.parametrize("kind", ["broadcast", "send", "reduce"])
def test_who_needs_no_answer_runs_ahead_by_a_bounded_number_of_bytes(kind):
    num_bytes = MIB // 4
    for most in run_case(run_ahead, 2, 60, num_bytes, kind):
        assert most <= MOST_BYTES_AHEAD + 4 * num_bytes + 16 * PAGE, most


def drop_many(num: int, num_bytes: int) -> int:
    """The memory mapped after many handles that nobody keeps, ten under way at once."""
    group, rank = make_group(), dist.get_rank()
    for i in range(num):
        dist.all_reduce(full(num_bytes, rank), group=group, async_op=True)
        if i % 10 == 9:
            gc.collect()
            dist.barrier(group)
    return shared_bytes()


def test_dropped_handles_give_their_memory_back():
    for most in run_case(drop_many, 2, 200, 400_000):
        assert most <= 100 * 400_000, most  # of 400 that were sent, both ways


def send_in_inference_mode() -> list[float]:
    group, found = make_group(), []
    for number in range(3):
        with torch.inference_mode(number == 0):
            tensor = full(32, number)
            dist.all_reduce(tensor, group=group)
            if dist.get_rank() == 0:
                dist.send(tensor, 1, group)
            else:
                dist.recv(tensor, 0, group)
            found.append(tensor.sum().item())
    return found


def test_inference_mode_leaves_slots_that_may_be_written():
    assert run_case(send_in_inference_mode, 2) == [[0.0, 16.0, 32.0]] * 2


def end_outside_of_inference_mode() -> list[float]:
    """What began in inference mode is ended by whoever reads, or by gloo's own thread."""
    group, found = make_group(), []
    for num_bytes in (32, MAX_BYTES + 4):
        with torch.inference_mode():
            total, mean = full(num_bytes, 1), full(num_bytes, 3)[::2]
            handles = [
                dist.all_reduce(total, group=group, async_op=True),
                dist.all_reduce(mean, dist.ReduceOp.AVG, group, async_op=True),
            ]
        dist.barrier(group)
        for handle in handles:
            handle.wait()
        found += [total.unique().item(), mean.unique().item()]
    return found


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_result_of_inference_mode_may_come_after_it(is_shared):
    """Was: over gloo, "Inplace update to inference tensor outside InferenceMode"."""
    found = run_ranks(end_outside_of_inference_mode, 2, shared_memory=is_shared)
    assert found == [[2.0, 3.0, 2.0, 3.0]] * 2


def own_what_came(num: int) -> bool:
    """What has come is the receiver's own: neither the sender nor a later message changes it."""
    group, rank, kept = make_group(), dist.get_rank(), []
    for i in range(num):
        tensor = full(40_000, i)
        if rank == 0:
            work = dist.isend(tensor, 1, group)
            tensor.fill_(-1)  # a sent tensor has been copied
            work.wait()
            tensor.fill_(i)
            dist.broadcast(tensor, 0, group)
            tensor.fill_(-1)
        else:
            came = [torch.empty_like(tensor) for _ in range(2)]
            dist.recv(came[0], 0, group)
            dist.broadcast(came[1], 0, group)
            assert has(came[0], i) and has(came[1], i)
            came[0].mul_(2)
            kept.append(came[1])
    return all(has(tensor, i) for i, tensor in enumerate(kept))


def test_what_came_is_the_receivers_own():
    assert all(run_case(own_what_came, 2, 20))


# -- Who is told what --


def give_up_in_a_strange_language() -> str:
    group, numbers = make_group(), full(400, 1)
    group.begin_step()
    dist.all_reduce(numbers, group=group)
    if dist.get_rank() == 1:
        group.abandon("OSError: no such file: caf\udce9")  # not to be written as UTF-8
        return ""
    return refusal(lambda: dist.all_reduce(numbers, group=group))


def test_a_reason_that_is_no_text_is_told_as_far_as_it_is():
    assert (
        "given up this step: OSError: no such file: caf?"
        in run_case(give_up_in_a_strange_language, 2)[0]
    )


def launch_in_different_orders() -> list[float]:
    """Rank 0 launches over one group, then over another; rank 1 the other way round."""
    groups, rank, found = [make_group() for _ in range(2)], dist.get_rank(), []
    for num_bytes in (4000, 8 * MIB):
        sums = [full(num_bytes, rank + i) for i in range(2)]
        order = list(zip(groups, sums, strict=True))
        works = [
            dist.all_reduce(total, group=group, async_op=True)
            for group, total in (order if rank == 0 else reversed(order))
        ]
        for work in works:
            work.wait()
        found += [total.unique().item() for total in sums]
    return found


def test_a_launch_waits_for_nobody():
    assert run_case(launch_in_different_orders, 2) == [[1.0, 3.0, 1.0, 3.0]] * 2


def see_secrets() -> bool:
    """Neither this process's arguments nor its environment hold what ranks prove themselves with."""
    group = make_group()
    store = group.get_group_store()
    told = [store.get(f"shared memory/address of {rank}").decode() for rank in range(2)]
    secrets = [re.findall(r'"([0-9a-f]{32})"', words)[-1] for words in told]
    with open("/proc/self/cmdline", "rb") as line, open("/proc/self/environ", "rb") as environment:
        public = line.read() + environment.read() + repr(dict(os.environ)).encode()
    return len(set(secrets)) == 2 and not any(secret.encode() in public for secret in secrets)


def test_the_secret_of_a_group_is_known_to_its_store_alone():
    assert run_case(see_secrets, 2) == [True, True]
