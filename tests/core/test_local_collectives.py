"""Collectives through shared memory: the same as `torch.distributed`'s, and the same on all ranks."""

import sys
import time

import pytest
import torch
import torch.distributed as dist

from minimegatron.backend.connecting import connect
from minimegatron.core import collectives
from minimegatron.core.local_host import local_collectives
from minimegatron.core.local_host.local_collectives import MAX_BYTES, get_mesh
from tests.ranks import run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
OPERATIONS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Whole numbers, of which every type here has exact sums; others on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(-4, 4, shape, generator=generator).to(dtype)


def compare_with_gloo() -> int:
    group, size = dist.group.WORLD, dist.get_world_size()
    compared = 0
    for dtype in DTYPES:
        part = values((2 * size, 3), dtype)
        assert get_mesh(group, part) is not None
        for op in OPERATIONS:
            ours, theirs = part.clone(), part.clone()
            collectives.all_reduce(ours, group, op=op)
            dist.all_reduce(theirs, op=op)
            assert torch.equal(ours, theirs)
            ours, theirs = part.new_empty(2, 3), part.clone()
            collectives.reduce_scatter(ours, part, group, op=op)
            dist.all_reduce(theirs, op=op)
            assert torch.equal(ours, theirs.chunk(size)[dist.get_rank()])
            compared += 2
        ours, theirs = part.new_empty(size * part.size(0), 3), [part.clone() for _ in range(size)]
        collectives.all_gather(ours, part, group)
        dist.all_gather(theirs, part)
        assert torch.equal(ours, torch.cat(theirs))
        for source in range(size):
            ours, theirs = part.clone(), part.clone()
            collectives.broadcast(ours, source, group)
            dist.broadcast(theirs, source)
            assert torch.equal(ours, theirs)
        compared += 1 + size
    return compared


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_same_as_gloo(size):
    assert run_ranks(compare_with_gloo, size) == [len(DTYPES) * (9 + size)] * size


def sum_floats() -> list[float]:
    total = torch.full((1000,), 0.1 * (dist.get_rank() + 1)).pow(1 + dist.get_rank())
    collectives.all_reduce(total, dist.group.WORLD)
    return total.tolist()


def test_every_rank_has_the_same_bits():
    first, *others = run_ranks(sum_floats, 4)
    assert all(other == first for other in others)


def many_at_once() -> bool:
    group, parts = dist.group.WORLD, [values((5,), torch.float64, seed) for seed in range(20)]
    wanted = [part.clone() for part in parts]
    for part in wanted:
        dist.all_reduce(part)
    handles = [collectives.all_reduce(part, group, async_op=True) for part in parts]
    total = torch.ones(3)
    collectives.all_reduce(total, group)  # overtakes none of those under way
    assert total.tolist() == [dist.get_world_size()] * 3
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
    return all(torch.equal(part, want) for part, want in zip(parts, wanted, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_handles_may_be_waited_for_in_any_order(size):
    assert all(run_ranks(many_at_once, size))


def large_and_small() -> tuple[bool, bool]:
    numbers = MAX_BYTES // 4
    small, large = torch.ones(numbers), torch.ones(numbers + 1)
    for tensor in (small, large):
        collectives.all_reduce(tensor, dist.group.WORLD)
        assert tensor.eq(2).all()
    meshes = [get_mesh(dist.group.WORLD, tensor) for tensor in (small, large)]
    return tuple(mesh is not None for mesh in meshes)


def test_large_tensors_are_left_to_gloo():
    assert run_ranks(large_and_small, 2) == [(True, False)] * 2


def steps_with_large_tensors() -> str:
    """Two good steps; one that fails on rank 1 before its large collective; and one after that."""
    group, rank = dist.group.WORLD, dist.get_rank()
    large = torch.ones(MAX_BYTES)
    for _ in range(2):
        collectives.begin_step([group])
        collectives.all_reduce(torch.ones(3), group)
        collectives.all_reduce(large, group)
        collectives.end_step([group])
        collectives.all_reduce(torch.ones(MAX_BYTES), group)
    assert large.eq(4).all()
    collectives.begin_step([group])
    if rank == 0:
        collectives.all_reduce(torch.ones(MAX_BYTES), group, async_op=True)
        with pytest.raises(ConnectionError, match="planted"):
            collectives.all_reduce(torch.ones(3), group)
    collectives.abandon([group], "planted")
    collectives.begin_step([group])
    small = torch.ones(3)
    collectives.all_reduce(small, group)
    assert small.eq(2).all()
    with pytest.raises(ConnectionError) as error:
        collectives.all_reduce(large, group)
    return str(error.value)


def test_large_tensors_after_a_failed_step_are_not_paired_with_its_own():
    """Was: gloo summed the failed step's tensor on one rank with the next step's on the other."""
    first, second = run_ranks(steps_with_large_tensors, 2)
    assert "rank 1 of the group has begun 4 collectives over gloo, and this rank 5" in first
    assert "rank 0 of the group has begun 5 collectives over gloo, and this rank 4" in second
    assert "initialize_model_parallel" in first


def launch_in_different_orders() -> list[list[float]]:
    """Outside of steps and inside: rank 0 launches over A, then over B, rank 1 the other way round."""
    groups, rank, found = [dist.new_group([0, 1]) for _ in range(2)], dist.get_rank(), []
    for group in groups:
        collectives.all_reduce(torch.ones(3), group)
    for in_step in (False, True):
        if in_step:
            collectives.begin_step(groups)
        sums = [torch.full((MAX_BYTES,), float(rank)) for _ in groups]
        order = list(zip(groups, sums, strict=True))
        handles = [
            collectives.all_reduce(total, group, async_op=True)
            for group, total in (order if rank == 0 else reversed(order))
        ]
        for handle in handles:
            handle.wait()
        found.append([total[0].item() for total in sums])
    return found


def test_a_launch_of_a_large_tensor_waits_for_nobody():
    assert run_ranks(launch_in_different_orders, 2) == [[[1.0, 1.0]] * 2] * 2


def fail_in_a_strange_language() -> str:
    group, numbers = dist.group.WORLD, torch.ones(3)
    collectives.begin_step([group])
    collectives.all_reduce(numbers, group)
    if dist.get_rank() == 1:
        collectives.abandon(
            [group], "OSError: no such file: caf\udce9"
        )  # not to be written as UTF-8
        return ""
    with pytest.raises(ConnectionError) as error:
        collectives.all_reduce(numbers, group)
    return str(error.value)


def test_a_reason_that_is_no_text_is_told_as_far_as_it_is():
    assert (
        "given up this step: OSError: no such file: caf?"
        in run_ranks(fail_in_a_strange_language, 2)[0]
    )


def steps_after_a_failed_wait() -> list[float]:
    """In each of three steps one wait fails, for another size; a good collective comes after it."""
    group, rank, found = dist.group.WORLD, dist.get_rank(), []
    for _ in range(3):
        collectives.begin_step([group])
        handles = [collectives.all_reduce(torch.ones(3 + rank), group, async_op=True)]
        handles += [collectives.all_reduce(torch.ones(2), group, async_op=True)]
        for handle in handles:  # the second belongs to the same step, whose order is lost
            with pytest.raises(ConnectionError):
                handle.wait()
        collectives.abandon([group], "planted")
        collectives.begin_step([group])
        total = torch.full((5,), float(rank + 1))
        collectives.all_reduce(total, group)
        found += total.unique().tolist()
        collectives.end_step([group])
    return found


def test_good_steps_follow_a_wait_that_failed():
    """Was: what had arrived for it stayed, and every later collective took the one before it."""
    assert run_ranks(steps_after_a_failed_wait, 2) == [[3.0] * 3] * 2


def sizes_differ() -> bool:
    with pytest.raises(ConnectionError, match="bytes came where"):
        collectives.all_reduce(torch.ones(3 + dist.get_rank()), dist.group.WORLD)
    return True


def test_sizes_that_do_not_agree_are_told():
    assert all(run_ranks(sizes_differ, 2))


def neighbour_leaves() -> float:
    collectives.all_reduce(torch.ones(3), dist.group.WORLD)
    if dist.get_rank() == 1:
        local_collectives._meshes.clear()  # closes its sockets, as the end of its process would
        return 0.0
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        collectives.all_reduce(torch.ones(3), dist.group.WORLD)
    return time.monotonic() - began


def test_a_neighbour_that_has_gone_is_noticed_at_once():
    assert run_ranks(neighbour_leaves, 2)[0] < 10


def pieces_of_a_view() -> bool:
    whole = values((3, 4), torch.float64)
    mine, theirs = torch.empty(2, 3, dtype=torch.float64), whole.t().contiguous()
    collectives.reduce_scatter(mine, whole.t(), dist.group.WORLD)
    dist.all_reduce(theirs)
    return torch.equal(mine, theirs.chunk(2)[dist.get_rank()])


def test_an_input_need_not_be_contiguous():
    assert all(run_ranks(pieces_of_a_view, 2))


def test_without_linux_gloo_carries_everything(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert connect(None, callees=[0], callers=[]) is None


@pytest.mark.parametrize(("tensor", "group"), [(None, "a group"), (torch.zeros(1), None)])
def test_none_is_named(tensor, group):
    name = "tensor" if tensor is None else "group"
    with pytest.raises(TypeError, match=f"a collective needs a {name}, and got None"):
        collectives._describe({"tensor": tensor, "group": group})
