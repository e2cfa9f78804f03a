"""A ZeRO-1 step, solved.

Called by: the check, in place of the gradient buffers' and the distributed optimizer's own. A
reduce-scatter and an all-gather are the two halves of an all-reduce: the update between them costs
no extra message.
"""

from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import all_gather, reduce_scatter
from minimegatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBucket,
    _ParamAndGradBucketGroup,
    _ParamAndGradBuffer,
)


def shard_buffer(buffer: torch.Tensor, data_parallel_group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of `buffer`; a view, so that writing to it writes to the buffer."""
    numel = buffer.numel() // data_parallel_group.size()
    first = data_parallel_group.rank() * numel
    return buffer[first : first + numel]


def local_ranges(buffer: _ParamAndGradBuffer) -> dict[torch.nn.Parameter, tuple[int, int]]:
    """For each parameter that this rank's shards touch, which of its elements they cover."""
    group = buffer.data_parallel_group
    ranges = {}
    for param, (param_start, param_end, bucket_id) in buffer.param_index_map.items():
        bucket = buffer.buckets[bucket_id]
        shard_numel = bucket.grad_data.numel() // group.size()
        shard_start = bucket.offset + group.rank() * shard_numel
        # Both intervals are counted from the buffer's beginning.
        start = max(param_start, shard_start)
        end = min(param_end, shard_start + shard_numel)
        if start < end:
            ranges[param] = (start - param_start, end - param_start)
    return ranges


def _reduce(
    self: _ParamAndGradBucketGroup, bucket: _ParamAndGradBucket, force_all_reduce: bool
) -> Any:
    """Starts the summation of a bucket's gradients, and returns the handle."""
    bucket.grad_data.mul_(bucket.gradient_scaling_factor)
    group = self.data_parallel_group
    shard = shard_buffer(bucket.grad_data, group)
    return reduce_scatter(shard, bucket.grad_data, group, async_op=True)


def _gather(self: _ParamAndGradBucketGroup, bucket: _ParamAndGradBucket) -> Any:
    """Starts the exchange of a bucket's updated parameters, and returns the handle."""
    group = self.data_parallel_group
    shard = shard_buffer(bucket.param_data, group)
    return all_gather(bucket.param_data, shard, group, async_op=True)


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
