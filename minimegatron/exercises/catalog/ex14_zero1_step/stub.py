"""A ZeRO-1 step: reduce-scatter the gradients, update one shard, all-gather the parameters.

Started by: you, and `minimegatron exercises check`. Write the four small functions that make the
distributed optimizer distributed. The check puts the last three in place of ours, trains a small GPT
with Adam on 4 ranks and compares gradients and weights with one process.

Gradients lie in a *buffer*, one long vector, cut into *buckets*. Parameters lie in a second vector,
at the same places. Of each bucket, data-parallel rank r owns the r-th of d equal parts, its *shard*:

    bucket 0 (offset 0, 768 elements)     bucket 1 (offset 768, 384 elements)
    | rank 0 | rank 1 | rank 2 |          | rank 0 | rank 1 | rank 2 |         d = 3

Shards cut through parameters wherever they happen to fall.

Useful here:

    buffer.param_index_map          {param: (start, end, bucket_id)}: its elements in the buffer
    buffer.buckets[bucket_id]       a bucket: .offset in the buffer, .grad_data, .param_data (vectors
                                    of the bucket's length), .gradient_scaling_factor
    group.rank(), group.size()      of a data-parallel group; self.data_parallel_group is one too
    reduce_scatter(output, input, group, async_op=True)     adds up all ranks' `input`; slice number
                                    group.rank() of the sum goes to `output`; returns a handle
    all_gather(output, input, group, async_op=True)         every rank's `input`, one after the other,
                                    in `output`; returns a handle
"""

from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import all_gather, reduce_scatter  # noqa: F401
from minimegatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBucket,
    _ParamAndGradBucketGroup,
    _ParamAndGradBuffer,
)


def shard_buffer(buffer: torch.Tensor, data_parallel_group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of `buffer`, a vector whose length the group's size divides. A view."""
    raise NotImplementedError(
        "Write shard_buffer: slice number group.rank() of group.size() slices"
    )


def local_ranges(buffer: _ParamAndGradBuffer) -> dict[torch.nn.Parameter, tuple[int, int]]:
    """For each parameter that this rank's shards touch, which of its elements they cover.

    As {param: (first, one past the last)}, counted from the parameter's own first element. A
    parameter that this rank's shards do not touch is left out. `buffer.data_parallel_group` says
    which rank this is.
    """
    raise NotImplementedError(
        "Write local_ranges: intersect each parameter's place in the buffer with this rank's shard "
        "of its bucket"
    )


def _reduce(
    self: _ParamAndGradBucketGroup, bucket: _ParamAndGradBucket, force_all_reduce: bool
) -> Any:
    """Starts the summation of a bucket's gradients, and returns the handle.

    Afterwards this rank's shard of `bucket.grad_data` holds the sum over all data-parallel ranks of
    their gradients, each first multiplied by `bucket.gradient_scaling_factor`. The rest of the bucket
    is of no interest any more. `force_all_reduce` is False in this exercise.
    """
    raise NotImplementedError("Write _reduce: scale, then reduce-scatter into this rank's shard")


def _gather(self: _ParamAndGradBucketGroup, bucket: _ParamAndGradBucket) -> Any:
    """Starts the exchange of a bucket's updated parameters, and returns the handle.

    Before, every rank has updated its own shard of `bucket.param_data`. Afterwards all of it is new.
    """
    raise NotImplementedError("Write _gather: all-gather every rank's shard of param_data")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
