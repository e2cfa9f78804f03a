"""Grad buffers: one piece of memory for all gradients, sent bucket by bucket while backward runs.

Three functions, called in this order: when the model is wrapped, after each parameter's gradient in
every backward, and from there, if gradients are to be sent during backward.

    BufferLayout(params, buckets, buckets_unpadded)
        params[i]             (start, end, bucket number) of parameter i, in the order of `numels`
        buckets[b]            (start, end) of bucket b
        buckets_unpadded[b]   its length
"""

from collections.abc import Sequence

import torch

from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.core.distributed.param_and_grad_buffer import (
    BufferLayout,
    _ParamAndGradBucketGroup,
)


def lay_out_buffer(
    numels: Sequence[int],
    alone: Sequence[bool],
    bucket_size: int | None,
    num_shards: int | None = None,
) -> BufferLayout:
    """Last parameter first, no gaps; a bucket closes once it is full."""
    where = [None] * len(numels)
    buckets = []
    opened_at = here = 0
    for i in range(len(numels) - 1, -1, -1):
        end = here + numels[i]
        where[i] = (here, end, len(buckets))
        here = end
        if bucket_size is not None and here - opened_at >= bucket_size:
            buckets.append((opened_at, here))
            opened_at = here
    if here > opened_at:
        buckets.append((opened_at, here))
    return BufferLayout(where, buckets, [stop - start for start, stop in buckets])


def _after_grad(self: DistributedDataParallel, param: torch.nn.Parameter) -> None:
    """Accumulate, free, and tell the bucket."""
    if not param.grad_added_to_main_grad:
        param.main_grad += param.grad
    param.grad_added_to_main_grad = False
    param.grad = None
    if self.ddp_config.overlap_grad_reduce:
        self.param_to_bucket_group[param].register_grad_ready(param)


def register_grad_ready(self: _ParamAndGradBucketGroup, param: torch.nn.Parameter) -> None:
    """Launch this bucket if it may leave, then those behind it that only waited for it."""
    if not self.is_last_microbatch:
        return
    self.params_with_grad.add(param)
    bucket = self
    while bucket is not None:
        full = len(bucket.params_with_grad) == len(bucket.params)
        before = bucket.previous_bucket_group
        its_turn = before is None or before.grad_reduce_handles is not None
        if not full or not its_turn or bucket.grad_reduce_handles is not None:
            return
        bucket.start_grad_sync()
        bucket = bucket.next_bucket_group


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
