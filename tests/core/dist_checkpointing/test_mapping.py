"""Boxes: whatever the cut, all ranks' boxes together are the whole tensor, each element once."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    boxes_of_range,
    make_sharded_tensors,
)
from minimegatron.core.tensor_parallel.sharding import (
    set_tensor_model_parallel_attributes,
    shard_parameter,
)


def put(tensor: ShardedTensor, whole: torch.Tensor, times: torch.Tensor) -> None:
    where = tuple(
        slice(offset, offset + size)
        for offset, size in zip(tensor.global_offset, tensor.data.shape, strict=True)
    )
    whole[where] = tensor.data
    times[where] += 1


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    ends=st.tuples(st.integers(0, 700), st.integers(0, 700)),
)
def test_boxes_cover_a_range_in_order(shape, ends):
    numel = math.prod(shape)
    start, end = sorted(min(x, numel) for x in ends)
    counted = torch.arange(numel).view(shape)
    boxes = list(boxes_of_range(tuple(shape), start, end))
    found = [
        counted[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].flatten()
        for offset, size in boxes
    ]
    assert torch.cat([*found, torch.tensor([], dtype=torch.int64)]).tolist() == [*range(start, end)]
    assert len(boxes) <= 2 * len(shape) - 1


@settings(max_examples=200)
@given(
    rest=st.lists(st.integers(1, 4), max_size=2),
    dim=st.integers(0, 2),
    tp_size=st.sampled_from([1, 2, 3]),
    stride=st.sampled_from([1, 2]),
    per_rank=st.integers(1, 3),
    shards=st.integers(1, 4),
    is_cut=st.booleans(),
)
def test_all_ranks_together_are_the_whole(rest, dim, tp_size, stride, per_rank, shards, is_cut):
    """Tensor parallelism with stride, then flat shards of each slice as in ZeRO-1."""
    dim = min(dim, len(rest))
    shape = [*rest[:dim], per_rank * tp_size * stride, *rest[dim:]]
    full = torch.randn(shape)
    whole, times = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
    like = torch.empty(0)
    set_tensor_model_parallel_attributes(like, is_cut, dim if is_cut else -1, stride)
    for tp_rank in range(tp_size):
        param = shard_parameter(full, like, tp_rank, tp_size).clone()
        set_tensor_model_parallel_attributes(param, is_cut, like.partition_dim, stride)
        numel = param.numel()
        for shard in range(shards):
            start, end = numel * shard // shards, numel * (shard + 1) // shards
            data = param.view(-1)[start:end]
            if end - start == numel:
                data = data.view(param.shape)
            tensors = make_sharded_tensors("w", param, data, tp_rank, tp_size, start)
            for tensor in tensors:
                assert tensor.global_shape == tuple(shape)
                # What is loaded goes to where the parameter is.
                assert (
                    tensor.data.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
                )
                if tensor.replica_id == 0:
                    put(tensor, whole, times)
    assert torch.equal(whole, full)
    assert (times == 1).all()


def test_scalar_and_empty():
    scalar = torch.tensor(3.0)
    set_tensor_model_parallel_attributes(scalar, False, -1, 1)
    (whole,) = make_sharded_tensors("w", scalar, scalar, 0, 2)
    assert whole.global_shape == whole.global_offset == ()
    assert make_sharded_tensors("w", torch.zeros(4), torch.zeros(0), 0, 1, start=4) == []
