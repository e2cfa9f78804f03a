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

import math  # noqa: F401
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from minimegatron.core.collectives import ReduceOp, all_reduce  # noqa: F401
from minimegatron.core.optimizer.optimizer import MegatronOptimizer


def get_main_grads_for_grad_norm(self: MegatronOptimizer) -> list[torch.Tensor]:
    """This rank's gradients, without those that another rank counts already.

    Two kinds of parameter are on several ranks: those that every tensor-parallel rank holds whole,
    and a tied embedding. Data-parallel copies are no concern here: the norm is never added up over
    data-parallel ranks that hold the same gradients.
    """
    raise NotImplementedError(
        "Write get_main_grads_for_grad_norm: of each gradient that several ranks hold, one rank "
        "must count it and the others not"
    )


def get_grad_norm_fp32(
    grads_for_norm: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    grad_stats_parallel_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
) -> float:
    """The norm of all gradients of all ranks of the group, as if they were one long vector.

    Add up in float64, whatever the gradients are: the check compares nine digits.

    Args:
        grads_for_norm: this rank's part, as the function above selects it; may be empty.
        norm_type: p of the p-norm, (sum |x|^p)^(1/p); or inf, for the largest absolute value.
        grad_stats_parallel_group: over which ranks; a sequence of groups means one after the other
            (with ZeRO-1: data-parallel ranks that hold shards, then model-parallel ranks). None for
            this rank alone.
    """
    raise NotImplementedError(
        "Write get_grad_norm_fp32: add up over this rank's gradients, then over the groups, and "
        "take the root at the end"
    )


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
