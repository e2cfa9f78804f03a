"""A rank that has no gradients returns at once; the others wait for it in the sum.

Expected: Rank 0 has come out of your code
"""

import math
from collections.abc import Sequence

import torch

from minimegatron.core.collectives import ReduceOp, all_reduce


def get_main_grads_for_grad_norm(self):
    return [
        shard.main_param.grad
        for shard in self.shards
        if shard.main_param.grad is not None
        and not getattr(shard.model_param, "shared", False)
        and (shard.model_param.tensor_model_parallel or self.tp_group.rank() == 0)
    ]


def get_grad_norm_fp32(grads_for_norm, norm_type=2.0, grad_stats_parallel_group=None):
    grads = [grad.double().abs() for grad in grads_for_norm]
    if not grads:
        return 0.0
    is_max = norm_type == math.inf
    total = torch.cat([grad.reshape(-1) for grad in grads])
    total = total.max() if is_max else total.pow(norm_type).sum()
    groups = grad_stats_parallel_group
    groups = [] if groups is None else groups if isinstance(groups, Sequence) else [groups]
    for group in groups:
        all_reduce(total, group, ReduceOp.MAX if is_max else ReduceOp.SUM)
    return total.item() if is_max else total.item() ** (1.0 / norm_type)
