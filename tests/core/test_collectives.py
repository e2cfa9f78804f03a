"""The collectives of `core`, over each kind of group: their results, and what a failed step leaves."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist

from minimegatron.backend.group import MAX_BYTES
from minimegatron.core import collectives, parallel_state, tracing
from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.backend.shm_groups import needs_shared_memory
from tests.core.wire_kinds import (
    GLOO,
    GLOO_INSIDE,
    SHARED,
    group_over,
    over_each_kind,
    run_over,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
OPERATIONS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Whole numbers, of which every type here has exact sums; others on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(-4, 4, shape, generator=generator).to(dtype)


# -- The same numbers as torch's own --


def compare_with_gloo(kind: str) -> int:
    group, gloo, size = group_over(kind), group_over(GLOO), dist.get_world_size()
    rank, compared = dist.get_rank(), 0
    for dtype in DTYPES:
        part = values((2 * size, 3), dtype)
        for op in OPERATIONS:
            ours, theirs = part.clone(), part.clone()
            collectives.all_reduce(ours, group, op=op)
            dist.all_reduce(theirs, op, gloo)
            assert torch.equal(ours, theirs)
            ours = part.new_empty(2, 3)
            collectives.reduce_scatter(ours, part, group, op=op)
            assert torch.equal(ours, theirs.chunk(size)[rank])
            compared += 2
        theirs = [part.clone() for _ in range(size)]
        dist.all_gather(theirs, part, gloo)
        ours = part.new_empty(size * part.size(0), 3)
        collectives.all_gather(ours, part, group)
        assert torch.equal(ours, torch.cat(theirs))
        ours = torch.empty_like(part)
        collectives.pass_to_next(ours, part, group).wait()
        assert torch.equal(ours, theirs[(rank - 1) % size])
        for source in range(size):
            ours = part.clone()
            collectives.broadcast(ours, source, group)
            assert torch.equal(ours, theirs[source])
        compared += 2 + size
    return compared


@pytest.mark.parametrize("size", [2, 3, 4])
@over_each_kind
def test_the_same_as_gloo(kind, size):
    assert run_over(kind, compare_with_gloo, size) == [len(DTYPES) * (10 + size)] * size


def sum_floats(kind: str) -> list[float]:
    total = torch.full((1000,), 0.1 * (dist.get_rank() + 1)).pow(1 + dist.get_rank())
    collectives.all_reduce(total, group_over(kind))
    return total.tolist()


@over_each_kind
def test_every_rank_has_the_same_bits(kind):
    first, *others = run_over(kind, sum_floats, 4)
    assert all(other == first for other in others)


def many_at_once(kind: str) -> bool:
    group, size = group_over(kind), dist.get_world_size()
    parts = [torch.full((5,), float(10 * i + dist.get_rank())) for i in range(20)]
    handles = [collectives.all_reduce(part, group, async_op=True) for part in parts]
    total = torch.ones(3)
    collectives.all_reduce(total, group)  # overtakes none of those under way
    assert total.tolist() == [size] * 3
    for handle in reversed(handles):
        assert handle.wait() and handle.wait()
    wanted = [10.0 * size * i + size * (size - 1) / 2 for i in range(20)]
    return [part.unique().item() for part in parts] == wanted


@pytest.mark.parametrize("size", [2, 3])
@over_each_kind
def test_handles_may_be_waited_for_in_any_order(kind, size):
    assert all(run_over(kind, many_at_once, size))


def pieces_of_a_view(kind: str) -> bool:
    group, whole = group_over(kind), values((3, 4), torch.float64)
    mine, theirs = torch.empty(2, 3, dtype=torch.float64), whole.t().contiguous()
    collectives.reduce_scatter(mine, whole.t(), group)
    collectives.all_reduce(theirs, group)
    return torch.equal(mine, theirs.chunk(2)[dist.get_rank()])


@over_each_kind
def test_an_input_need_not_be_contiguous(kind):
    assert all(run_over(kind, pieces_of_a_view, 2))


def large_and_small(kind: str) -> list[int]:
    """How many collectives gloo has begun: after a small one, and after one that is larger by one."""
    group, numbers, begun = group_over(kind), MAX_BYTES // 4, []
    for tensor in (torch.ones(numbers), torch.ones(numbers + 1)):
        collectives.all_reduce(tensor, group)
        assert tensor.eq(2).all()
        begun.append(group._inside._begun.count)
    return begun


@needs_shared_memory
def test_large_tensors_are_left_to_gloo():
    assert run_over(SHARED, large_and_small, 2) == [[0, 1]] * 2


class Many(torch.nn.Module):
    """A model with one bucket per parameter."""

    def __init__(self, number: int):
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.ones(5)) for _ in range(number)
        )

    def forward(self, x):
        return sum((weight * x).sum() for weight in self.weights)


def train_with_buckets(kind: str, number: int) -> bool:
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    ddp = DistributedDataParallel(config, ddp_config, Many(number))
    assert len(ddp.bucket_groups) == number
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp(torch.full((5,), dist.get_rank() + 1.0)).backward()
        ddp.finish_grad_sync()
    return all(bool((weight.main_grad == 1.5).all()) for weight in ddp.module.weights)


@pytest.mark.parametrize("kind", [pytest.param(SHARED, marks=needs_shared_memory), GLOO_INSIDE])
def test_150_buckets_with_overlap_block_nobody(kind):
    assert run_over(kind, train_with_buckets, 2, 150) == [True, True]


# -- Ranks that fail, or do not come --


def wait_for_a_rank_that_failed(kind: str) -> list:
    """Rank 0 ends its step well, and waits, as in an optimizer, for rank 1, whose step has failed."""
    group, rank = group_over(kind), dist.get_rank()
    collectives.begin_step([group])
    found, tensor = [], torch.ones(1)
    if rank == 1:
        collectives.abandon([group], "planted")
    else:
        collectives.end_step([group])
        try:
            collectives.all_reduce(tensor, group)
        except ConnectionError as error:
            found.append(str(error))
    for number in range(3):
        collectives.begin_step([group])
        tensor = torch.full((1,), float(rank + number))
        collectives.all_reduce(tensor, group)
        found.append(tensor.item())
        collectives.end_step([group])
    return found


@needs_shared_memory
def test_who_waits_outside_of_a_step_for_a_rank_that_failed_is_told():
    """Was: both stood until the time-out, and every later collective failed."""
    (words, *first), second = run_over(SHARED, wait_for_a_rank_that_failed, 2)
    assert "has gone on after a step that it had given up: planted" in words
    assert first == second == [1.0, 3.0, 5.0]


def steps_after_a_failed_wait(kind: str) -> list[float]:
    """In each of three steps one wait fails, for another size; a good collective comes after it."""
    group, rank, found = group_over(kind), dist.get_rank(), []
    for _ in range(3):
        collectives.begin_step([group])
        other = torch.ones(2)
        sums = (torch.ones(3 + rank), other)
        wrong, right = [collectives.all_reduce(one, group, async_op=True) for one in sums]
        with pytest.raises(ConnectionError):
            wrong.wait()
        with contextlib.suppress(ConnectionError):  # unless it had come before the step failed
            right.wait()
            assert other.tolist() == [2.0, 2.0]
        collectives.abandon([group], "planted")
        collectives.begin_step([group])
        total = torch.full((5,), float(rank + 1))
        collectives.all_reduce(total, group)
        found += total.unique().tolist()
        collectives.end_step([group])
    return found


@needs_shared_memory
def test_good_steps_follow_a_wait_that_failed():
    """Was: what had arrived for it stayed, and every later collective took the one before it."""
    assert run_over(SHARED, steps_after_a_failed_wait, 2) == [[3.0] * 3] * 2


def neighbour_leaves(kind: str) -> str:
    """The time-out is longer than the test may take."""
    group, said = group_over(kind), ""
    collectives.all_reduce(torch.ones(3), group)
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
    else:
        with pytest.raises(ConnectionError) as error:
            collectives.all_reduce(torch.ones(3), group)
        said = str(error.value)
    dist.barrier()
    return said


@needs_shared_memory
def test_a_neighbour_that_has_gone_is_noticed():
    said, _ = run_over(SHARED, neighbour_leaves, 2)
    assert re.match("rank 1 of the group has (gone|ended)", said), said


def wait_for_a_collective(kind: str, seconds: float) -> str:
    """Rank 1 does not come until rank 0 has given up."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, distributed_timeout_minutes=seconds / 60
    )
    groups = ProcessGroupCollection(tp=parallel_state.get_tensor_model_parallel_group())
    collectives.begin_step([groups.tp])
    said = ""
    if dist.get_rank() == 0:
        with pytest.raises(ConnectionError) as error:
            collectives.all_reduce(torch.ones(3), groups.tp)
        said = str(error.value)
    dist.barrier()
    return said


@pytest.mark.parametrize("kind", [pytest.param(SHARED, marks=needs_shared_memory), GLOO_INSIDE])
def test_the_time_out_of_the_groups_reaches_collectives(kind):
    said, _ = run_over(kind, wait_for_a_collective, 2, 3.0)
    if kind == SHARED:
        assert "rank 1 of the group sent nothing within 3 s" in said
    else:
        assert "3000ms" in said or "within 3 s" in said, said


# -- The edges of a step --


class GroupWithoutSteps:
    """As one over NCCL."""

    def name(self) -> str:
        return "nccl"

    def barrier(self) -> None:
        raise AssertionError("a group over NCCL tells nobody of a failure")


class GroupOfSteps(GroupWithoutSteps):
    """A group that knows steps, and writes down what it is told."""

    def __init__(self):
        self.told: list = []

    def begin_step(self, forward_only: bool) -> None:
        self.told.append(("begin", forward_only))

    def end_step(self) -> None:
        self.told.append("end")

    def abandon(self, reason: str) -> None:
        self.told.append(reason)


def test_groups_that_know_steps_are_told_and_the_others_are_counted():
    mine, other, plain = GroupOfSteps(), GroupOfSteps(), GroupWithoutSteps()
    for forward_only in (False, True):
        collectives.begin_step([mine, plain], [other], forward_only)
    assert mine.told == [("begin", False)] * 2
    assert other.told == [("begin", False), ("begin", True)]
    assert collectives.num_begun(plain) == 2 and collectives.num_begun(mine) == 0
    collectives.end_step([mine, plain])
    collectives.abandon([other, plain], "planted")
    assert mine.told[2:] == ["end"] and other.told[2:] == ["planted"]


def test_nobody_meets_over_nccl():
    collectives.meet([GroupWithoutSteps()])


def lanes_and_tags(kind: str) -> tuple[list[int | None], list[float]]:
    group, outputs = group_over(kind), []
    lanes = [collectives.new_lane(group) for _ in range(2)]
    assert collectives.is_tagged(group)
    for lane, is_async in zip(lanes, (True, False), strict=True):
        output = torch.empty(2)
        mine = torch.tensor([float(dist.get_rank())])
        handle = collectives.all_gather(output, mine, group, async_op=is_async, lane=lane)
        if is_async:
            handle.wait()
        outputs += output.tolist()
    collectives.meet([group])
    return lanes, outputs


@over_each_kind
def test_lanes_of_no_step_are_counted_where_groups_know_steps(kind):
    lanes = [None, None] if kind == GLOO else [0, 1]
    assert run_over(kind, lanes_and_tags, 2) == [(lanes, [0.0, 1.0, 0.0, 1.0])] * 2


@pytest.mark.parametrize(("tensor", "group"), [(None, "a group"), (torch.zeros(1), None)])
def test_none_is_named(tensor, group):
    name = "tensor" if tensor is None else "group"
    with pytest.raises(TypeError, match=f"a collective needs a {name}, and got None"):
        tracing.of_collective({"tensor": tensor, "group": group})
