"""Further rows of the table in `mappings`: cuts and gathers, along the last dimension and the first.

Counterpart: the functions of the same names in `megatron.core.tensor_parallel.mappings`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from minimegatron.core.tensor_parallel.mappings import (
    _apply,
    _gather_along_first_dim,
    _reduce_scatter_along_first_dim,
)
from minimegatron.core.tensor_parallel.megatron_methods import SymbolicRegion
from minimegatron.core.tensor_parallel.tensor_pieces import split_tensor_along_last_dim
from minimegatron.core.tensor_parallel.uneven_rows import _AllToAll, all_to_all, check_sizes
from minimegatron.core.utils import divide

__all__ = [
    "_AllToAll",
    "_GatherFromModelParallelRegion",
    "_GatherFromSequenceParallelRegion",
    "_ScatterToModelParallelRegion",
    "_ScatterToSequenceParallelRegion",
    "_gather_along_last_dim",
    "_split_along_first_dim",
    "_split_along_last_dim",
    "all_to_all",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]
"""`mappings` offers these; two are of `uneven_rows`."""

# -- The moves --


def _split_along_last_dim(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    return split_tensor_along_last_dim(tensor, group.size())[group.rank()].contiguous()


def _split_along_first_dim(
    tensor: torch.Tensor, group: Any, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    if sizes is None:
        sizes = [divide(tensor.size(0), group.size())] * group.size()
    check_sizes(sizes, group, tensor.size(0), sum(sizes))
    return tensor.split(list(sizes))[group.rank()].contiguous()


def _gather_along_last_dim(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Collectives concatenate along dimension 0, so the pieces are laid side by side afterwards."""
    pieces = _gather_along_first_dim(tensor, group).chunk(group.size(), dim=0)
    return torch.cat(pieces, dim=-1)


# -- The rows --


class _ScatterToModelParallelRegion(SymbolicRegion):
    @staticmethod
    def forward(ctx, input_, group):
        ctx.group = group
        return _split_along_last_dim(input_, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return _gather_along_last_dim(grad_output, ctx.group), None


class _GatherFromModelParallelRegion(SymbolicRegion):
    @staticmethod
    def forward(ctx, input_, group):
        ctx.group = group
        return _gather_along_last_dim(input_, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return _split_along_last_dim(grad_output, ctx.group), None


class _ScatterToSequenceParallelRegion(SymbolicRegion):
    @staticmethod
    def forward(ctx, input_, group):
        ctx.group = group
        return _split_along_first_dim(input_, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return _gather_along_first_dim(grad_output, ctx.group), None


class _GatherFromSequenceParallelRegion(SymbolicRegion):
    """What follows decides the backward.

    If a tensor-parallel layer follows, each rank's gradient is one term of the sum. If every rank
    goes on to do the same with the whole, each gradient is already the sum.
    """

    @staticmethod
    def forward(ctx, input_, group, tensor_parallel_output_grad=True, output_split_sizes=None):
        ctx.group, ctx.output_split_sizes = group, output_split_sizes
        ctx.tensor_parallel_output_grad = tensor_parallel_output_grad
        return _gather_along_first_dim(input_, group, output_split_sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        split = _split_along_first_dim
        if ctx.tensor_parallel_output_grad:
            split = _reduce_scatter_along_first_dim
        return split(grad_output, ctx.group, ctx.output_split_sizes), None, None, None


# -- The functions to call --


def scatter_to_tensor_model_parallel_region(
    input_: torch.Tensor, group: Any | None = None
) -> torch.Tensor:
    """[..., n] -> this rank's [..., n/t]. Raises ValueError if t does not divide n."""
    return _apply(_ScatterToModelParallelRegion, input_, group)


def gather_from_tensor_model_parallel_region(
    input_: torch.Tensor, group: Any | None = None
) -> torch.Tensor:
    """[..., n/t] -> [..., n], the same on every rank."""
    return _apply(_GatherFromModelParallelRegion, input_, group)


def scatter_to_sequence_parallel_region(
    input_: torch.Tensor, group: Any | None = None
) -> torch.Tensor:
    """[s, ...] -> this rank's [s/t, ...]. Raises ValueError if t does not divide s."""
    return _apply(_ScatterToSequenceParallelRegion, input_, group)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Any | None = None,
    output_split_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """[s/t, ...] -> [s, ...], the same on every rank.

    `tensor_parallel_output_grad`: a tensor-parallel layer consumes the result, so that gradients
    are to be summed; False if every rank computes the same from it. `output_split_sizes`: how many
    rows come from each rank, where ranks differ in that. Raises ValueError if they do not fit.
    """
    options = (tensor_parallel_output_grad, output_split_sizes)
    return _apply(_GatherFromSequenceParallelRegion, input_, group, *options)
