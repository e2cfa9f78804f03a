"""Tensor rank 0 alone counts, also what the ranks hold pieces of. All ranks have one norm.

Expected: Only tensor rank 0 counted its pieces of what is marked `tensor_model_parallel`
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
        and self.tp_group.rank() == 0
    ]


def get_grad_norm_fp32(grads_for_norm, norm_type=2.0, grad_stats_parallel_group=None):
    total = torch.zeros((), dtype=torch.float64)
    for grad in grads_for_norm:
        if norm_type == math.inf:
            total = torch.maximum(total, grad.double().abs().max())
        else:
            total += grad.double().abs().pow(norm_type).sum()
    groups = grad_stats_parallel_group
    groups = [] if groups is None else groups if isinstance(groups, Sequence) else [groups]
    for group in groups:
        all_reduce(total, group, ReduceOp.MAX if norm_type == math.inf else ReduceOp.SUM)
    return total.item() if norm_type == math.inf else total.item() ** (1.0 / norm_type)
