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
    """Where every gradient lies. `numels` are the parameters' sizes, in the order of the model.

    Backward makes the last parameter's gradient first, so that one lies first in the buffer. A bucket
    is closed as soon as it holds `bucket_size` elements or more; the next parameter begins a new one.
    With `bucket_size` None there is a single bucket. There are no gaps.

    `alone` (all False) and `num_shards` (None) are for the distributed optimizer; ignore them here.
    """
    raise NotImplementedError("Write lay_out_buffer: from the last parameter to the first")


def _after_grad(self: DistributedDataParallel, param: torch.nn.Parameter) -> None:
    """Hook: `param.grad` holds the gradient of this microbatch, complete.

    Adds it to `param.main_grad` (a view into the buffer), unless `param.grad_added_to_main_grad` says
    that the layer has done so itself; sets that to False again; frees `param.grad`. Then, if
    `self.ddp_config.overlap_grad_reduce`, tells `self.param_to_bucket_group[param]` with
    `register_grad_ready(param)`.
    """
    raise NotImplementedError("Write _after_grad: add, free, tell")


def register_grad_ready(self: _ParamAndGradBucketGroup, param: torch.nn.Parameter) -> None:
    """Notes that `param`'s gradient is in; launches every bucket that is due by that.

    A bucket is due when it has all its gradients, it is not launched yet, and the bucket before it is.

        self.is_last_microbatch       False while gradients only accumulate (`no_sync`)
        self.params                   the bucket's parameters
        self.params_with_grad         a set, empty before each step: those whose gradients are in
        self.grad_reduce_handles      None until it is launched
        self.start_grad_sync()        launches it
        self.previous_bucket_group, self.next_bucket_group    neighbours in that order, or None
    """
    raise NotImplementedError("Write register_grad_ready: count, and launch what is due, in order")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
