"""Numbers stay right, but each gradient's memory is held twice.

Expected: _after_grad fills param.grad with zeros, and keeps it
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
    """Where every gradient lies. `numels` are the parameters' sizes, in the order of the model."""
    params = [(0, 0, 0)] * len(numels)
    buckets: list[tuple[int, int]] = []
    first = start = 0
    for i in reversed(range(len(numels))):
        end = start + numels[i]
        params[i] = (start, end, len(buckets))
        is_full = bucket_size is not None and end - first >= bucket_size
        if is_full or i == 0:
            buckets.append((first, end))
            first = end
        start = end
    return BufferLayout(params, buckets, [end - first for first, end in buckets])


def _after_grad(self: DistributedDataParallel, param: torch.nn.Parameter) -> None:
    """Hook: `param.grad` holds the gradient of this microbatch, complete."""
    if not param.grad_added_to_main_grad:
        param.main_grad.add_(param.grad)
    param.grad_added_to_main_grad = False
    param.grad.zero_()
    if self.ddp_config.overlap_grad_reduce:
        self.param_to_bucket_group[param].register_grad_ready(param)


def register_grad_ready(self: _ParamAndGradBucketGroup, param: torch.nn.Parameter) -> None:
    """Notes that `param`'s gradient is in; launches every bucket that is due by that."""
    if not self.is_last_microbatch:
        return
    self.params_with_grad.add(param)
    group = self
    while group is not None and _is_due(group):
        group.start_grad_sync()
        # The next one may have been complete for a while, and waited for its turn.
        group = group.next_bucket_group


def _is_due(group: _ParamAndGradBucketGroup) -> bool:
    previous = group.previous_bucket_group
    is_its_turn = previous is None or previous.grad_reduce_handles is not None
    is_complete = len(group.params_with_grad) == len(group.params)
    return is_complete and is_its_turn and group.grad_reduce_handles is None
