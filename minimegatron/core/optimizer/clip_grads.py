"""The norm of the whole model's gradient, from ranks that each hold a part of it; and clipping by it.

Counterpart: `megatron.core.optimizer.clip_grads`, under the same names ("fp32" there names the
gradients' dtype; float64 gradients are welcome here, and lose nothing).

Each rank must leave out what another counts already (`MegatronOptimizer.get_main_grads_for_grad_norm`
does), and all ranks must clip by the same number: by their own, they would drift apart.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from minimegatron.core.collectives import ReduceOp, all_reduce
from minimegatron.core.optimizer import other_norms
from minimegatron.core.utils import device_is_asynchronous, get_device
from minimegatron.exports import all_of

__getattr__, __dir__ = all_of(__name__, "minimegatron.core.optimizer.optimizer_state")

NORM_BLOCK = 1 << 16
"""Elements that a CPU converts to float64 at a time: what fits its cache."""


def _sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    """A float64 scalar.

    Squares of float32 are exact in float64, so the sum hardly depends on how a tensor is cut into
    shards. The tests find the same bits in the clipped gradients of sharded and unsharded runs.
    """
    # `vector_norm` with this dtype converts element by element, which is much slower than blocks.
    total = torch.zeros((), dtype=torch.float64)
    for block in tensor.reshape(-1).split(NORM_BLOCK):
        block = block.double()
        total += torch.dot(block, block)
    return total


def _reduce_over(
    value: torch.Tensor, groups: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None, op: object
) -> float:
    """The number that all ranks of the groups agree on, group after group; None for this rank's own."""
    for group in groups if isinstance(groups, Sequence) else [groups]:
        if group is not None:
            all_reduce(value, group, op)
    return value.item()


@torch.no_grad()
def get_grad_norm_fp32(
    grads_for_norm: Iterable[torch.Tensor] | torch.Tensor,
    norm_type: float = 2.0,
    grad_stats_parallel_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
) -> float:
    """The norm of all gradients of all ranks of the group, as if they were one vector.

    Args:
        grads_for_norm: this rank's part; together with the other ranks', each gradient once.
        norm_type: any positive p, or inf for the largest absolute value.
        grad_stats_parallel_group: reduced over one group, or over several in turn (data-parallel
            ranks that hold shards, then the model-parallel ranks); None for this rank alone.

    Every rank of the group must call it, also with no gradients, and gets the same number.
    """
    grads_for_norm = (
        [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else grads_for_norm
    )
    norm_type = float(norm_type)
    if norm_type == math.inf:
        largest = other_norms.largest_of(grads_for_norm)
        return _reduce_over(largest, grad_stats_parallel_group, ReduceOp.MAX)
    total = torch.zeros((), dtype=torch.float64, device=get_device())
    is_plain = norm_type == 2.0 and not device_is_asynchronous()
    total += (
        sum(map(_sum_of_squares, grads_for_norm))
        if is_plain
        else other_norms.sum_of_powers([*grads_for_norm], norm_type)
    )
    return _reduce_over(total, grad_stats_parallel_group, ReduceOp.SUM) ** (1.0 / norm_type)


@torch.no_grad()
def clip_grad_by_total_norm_fp32(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, total_norm: float
) -> None:
    """Multiplies every `.grad` by max_norm / total_norm, in place, where that is below 1."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    coefficient = max_norm / (total_norm + 1e-6)
    grads = [param.grad for param in parameters if param.grad is not None]
    if coefficient < 1.0 and grads:
        torch._foreach_mul_(grads, coefficient)
