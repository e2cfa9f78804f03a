"""The gradient norm across ranks, solved.

Called by: the check, in place of the optimizer's own. What can be added over ranks is the sum of
p-th powers, not the norm itself; so the root comes last. And whatever is to be added over ranks must
be on one rank only.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from minimegatron.core.collectives import ReduceOp, all_reduce
from minimegatron.core.optimizer.optimizer import MegatronOptimizer


def get_main_grads_for_grad_norm(self: MegatronOptimizer) -> list[torch.Tensor]:
    """This rank's gradients, without those that another rank counts already."""
    grads = []
    for shard in self.shards:
        param, grad = shard.model_param, shard.main_param.grad
        # The first stage counts a tied embedding, tensor rank 0 what all of them hold.
        is_second_copy = getattr(param, "shared", False)
        is_mine = param.tensor_model_parallel or self.tp_group.rank() == 0
        if grad is not None and is_mine and not is_second_copy:
            grads.append(grad)
    return grads


def get_grad_norm_fp32(
    grads_for_norm: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    grad_stats_parallel_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
) -> float:
    """The norm of all gradients of all ranks of the group, as if they were one long vector."""
    total = torch.zeros((), dtype=torch.float64)
    for grad in grads_for_norm:
        powers = grad.double().abs()
        if norm_type == math.inf:
            # An empty tensor has no largest element.
            total = torch.maximum(total, powers.max()) if grad.numel() else total
        else:
            total += powers.pow(norm_type).sum()
    groups = grad_stats_parallel_group
    if groups is None:
        groups = ()
    elif not isinstance(groups, Sequence):
        groups = [groups]
    # A rank without gradients takes part too: the others wait for it.
    for group in groups:
        all_reduce(total, group, ReduceOp.MAX if norm_type == math.inf else ReduceOp.SUM)
    return total.item() if norm_type == math.inf else total.item() ** (1.0 / norm_type)


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
