"""How many elements of the gradient are zero; no step asks unless the configuration says so.

Counterpart: `megatron.core.optimizer.clip_grads`; and a method of an optimizer.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from minimegatron.core.collectives import ReduceOp
from minimegatron.core.optimizer.clip_grads import _reduce_over
from minimegatron.core.parameter import ParameterKind
from minimegatron.core.tracing import traced
from minimegatron.core.utils import get_device

__all__ = ["count_zeros_fp32"]


class CountsZeros:
    """The part of `MegatronOptimizer` that counts them."""

    kinds_of_groups: dict[tuple[dist.ProcessGroup, ...], list[ParameterKind]]

    @traced("optimizer-count-zeros")
    def count_zeros(self) -> int:
        """Zero elements in the whole model's gradient; every rank must call it."""
        return sum(
            count_zeros_fp32(self._counted_params(kinds), groups)
            for groups, kinds in self.kinds_of_groups.items()
        )


@torch.no_grad()
def count_zeros_fp32(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    grad_stats_parallel_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
) -> int:
    """How many elements of all `.grad` of all ranks of the group are zero; groups as for the norm."""
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    total = torch.zeros((), dtype=torch.float64, device=get_device())
    for param in parameters:
        if param.grad is not None:
            total += param.grad.numel() - torch.count_nonzero(param.grad)
    return int(_reduce_over(total, grad_stats_parallel_group, ReduceOp.SUM))
