"""Norms of gradients beside the 2-norm on a CPU: on a GPU, and of other orders.

Megatron has this in `megatron.core.optimizer.clip_grads`.
"""

from collections.abc import Iterable, Sequence

import torch

from minimegatron.core.utils import device_is_asynchronous, get_device


def largest_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The largest absolute value, 0 where there is none: a float64 scalar."""
    found = torch.zeros((), dtype=torch.float64, device=get_device())
    for tensor in tensors:
        if tensor.numel():
            found = torch.maximum(found, tensor.abs().max().double())
    return found


def sum_of_powers(tensors: Sequence[torch.Tensor], power: float) -> torch.Tensor | int:
    """Of all absolute values, in float64; 0 without tensors."""
    if power == 2.0 and device_is_asynchronous():
        return _sum_of_squares_of_all(tensors)
    return sum(tensor.double().abs().pow(power).sum() for tensor in tensors)


def _sum_of_squares_of_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """On a GPU: the same for all tensors, in a few kernels instead of three for each.

    Each tensor's own norm is in its own dtype, so shards may give another last digit than wholes.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=get_device())
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
