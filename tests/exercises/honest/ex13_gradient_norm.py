"""The gradient norm across ranks: which gradients to count, and how to add them up.

Started by: you, and `minimegatron exercises check`. Before each update, Megatron scales gradients
down if the norm of the whole model's gradient is too large. No rank has the whole gradient. Write
both halves of the computation; the check puts them in place of ours, runs the real training step on
4 ranks and compares with one process.

Useful here:

    self.shards                  the parts of parameters that this rank updates. For each:
    shard.model_param            the model's parameter, with two marks that the layers set:
      .tensor_model_parallel       True if tensor-parallel ranks hold different pieces of it;
                                   otherwise each of them holds all of it
      .shared                      True on the last stage's copy of a tied embedding (may be missing)
    shard.main_param.grad        this part's gradient; may be None
    self.tp_group.rank()         this rank's number among the tensor-parallel ranks
    all_reduce(tensor, group, ReduceOp.SUM or ReduceOp.MAX)          in place, on every rank
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from minimegatron.core.collectives import ReduceOp, all_reduce
from minimegatron.core.optimizer.optimizer import MegatronOptimizer


def get_main_grads_for_grad_norm(self: MegatronOptimizer) -> list[torch.Tensor]:
    """This rank's gradients, without those that another rank counts already.

    Two kinds of parameter are on several ranks: those that every tensor-parallel rank holds whole,
    and a tied embedding. Data-parallel copies are no concern here: the norm is never added up over
    data-parallel ranks that hold the same gradients.
    """
    i_am_first_tp_rank = self.tp_group.rank() == 0
    counted = []
    for piece in self.shards:
        weight, gradient = piece.model_param, piece.main_param.grad
        only_here = weight.tensor_model_parallel or i_am_first_tp_rank
        second_copy = getattr(weight, "shared", False)
        if gradient is not None and only_here and not second_copy:
            counted.append(gradient)
    return counted


def get_grad_norm_fp32(
    grads_for_norm: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    grad_stats_parallel_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
) -> float:
    """The norm of all gradients of all ranks of the group, as if they were one long vector.

    Args:
        grads_for_norm: this rank's part, as the function above selects it; may be empty.
        norm_type: p of the p-norm, (sum |x|^p)^(1/p); or inf, for the largest absolute value.
        grad_stats_parallel_group: over which ranks; a sequence of groups means one after the other
            (with ZeRO-1: data-parallel ranks that hold shards, then model-parallel ranks). None for
            this rank alone.
    """
    if grad_stats_parallel_group is None:
        groups = ()
    elif isinstance(grad_stats_parallel_group, dist.ProcessGroup):
        groups = (grad_stats_parallel_group,)
    else:
        groups = tuple(grad_stats_parallel_group)

    is_max = math.isinf(norm_type)
    acc = torch.zeros(1, dtype=torch.float64)
    for gradient in grads_for_norm:
        flat = gradient.detach().to(torch.float64).abs().flatten()
        if flat.numel() == 0:
            continue
        if is_max:
            acc[0] = max(acc[0], flat.max())
        else:
            acc[0] += flat.pow(norm_type).sum()

    for g in groups:
        all_reduce(acc, g, ReduceOp.MAX if is_max else ReduceOp.SUM)
    answer = float(acc[0])
    return answer if is_max else answer ** (1 / norm_type)


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
