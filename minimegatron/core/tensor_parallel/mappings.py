"""The conjugate collectives: what a tensor-parallel region does on entry and exit, and backward.

Counterpart: `megatron.core.tensor_parallel.mappings`, same names.

Each row is an autograd function whose backward is the transpose of its forward, once one says
whether a tensor that lives on every rank is *one* value in t copies or t terms of a sum:

    function                                    forward                  backward
    ------------------------------------------  -----------------------  ------------------------
    copy_to_tensor_model_parallel_region        identity                 all-reduce
    reduce_from_tensor_model_parallel_region    all-reduce               identity
    scatter_to_tensor_model_parallel_region     split last dim           all-gather last dim
    gather_from_tensor_model_parallel_region    all-gather last dim      split last dim
    scatter_to_sequence_parallel_region         split first dim          all-gather first dim
    gather_from_sequence_parallel_region        all-gather first dim     reduce-scatter first dim
      (..., tensor_parallel_output_grad=False)  all-gather first dim     split first dim
    reduce_scatter_to_sequence_parallel_region  reduce-scatter first     all-gather first dim
    all_to_all                                  all-to-all               all-to-all, splits exchanged

A layer has two blocks. Without sequence parallelism each is copy, column, row, reduce: two all-reduces
per layer and direction. With it, each is gather, column, row, reduce-scatter. An all-reduce is a
reduce-scatter and an all-gather, so a forward moves the same bytes. A backward moves one all-gather
more per block: the column-parallel layer keeps its part of the input, and gathers it again. What lies
between blocks is 1/t as large (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).

The sequence is dimension 0 and features are the last: activations are [s, b, h]. Tokens on their way
to experts are [n, h], with another n on each rank: hence the sizes that three of the rows take.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from minimegatron.core import collectives
from minimegatron.core.tensor_parallel.utils import (
    divide,
    get_tensor_model_parallel_group_if_none,
    split_tensor_along_last_dim,
)

# -- The moves themselves, without gradients --


def _reduce(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over `group`, in a new tensor: autograd forbids changing the caller's."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(total, group)
    return total


def _split_along_last_dim(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    return split_tensor_along_last_dim(tensor, group.size())[group.rank()].contiguous()


def _split_along_first_dim(
    tensor: torch.Tensor, group: Any, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    if sizes is None:
        sizes = [divide(tensor.size(0), group.size())] * group.size()
    _check_sizes(sizes, group, tensor.size(0), sum(sizes))
    return tensor.split(list(sizes))[group.rank()].contiguous()


def _gather_along_first_dim(
    tensor: torch.Tensor, group: Any, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    if sizes is not None:
        _check_sizes(sizes, group, tensor.size(0), *sizes[group.rank() :][:1])
        gathered = _gather_along_first_dim(_pad_first_dim(tensor, max(sizes)), group)
        pieces = gathered.view(len(sizes), max(sizes), *tensor.shape[1:])
        return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])
    gathered = tensor.new_empty((group.size() * tensor.size(0), *tensor.shape[1:]))
    collectives.all_gather(gathered, tensor.contiguous(), group)
    return gathered


def _check_sizes(sizes: Sequence[int], group: Any, rows: int, expected: int = -1) -> None:
    if len(sizes) != group.size() or rows != expected:
        raise ValueError(
            f"split sizes {list(sizes)} for {rows} rows on rank {group.rank()} of a group of "
            f"{group.size()}; give one size per rank, the same list on all of them"
        )


def _pad_first_dim(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """With rows of zeros: gloo has no collective for shares of unequal sizes."""
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, size - tensor.size(0)])


def _gather_along_last_dim(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Collectives concatenate along dimension 0, so the pieces are laid side by side afterwards."""
    pieces = _gather_along_first_dim(tensor, group).chunk(group.size(), dim=0)
    return torch.cat(pieces, dim=-1)


def _reduce_scatter_along_first_dim(
    tensor: torch.Tensor, group: Any, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    if sizes is not None:
        _check_sizes(sizes, group, tensor.size(0), sum(sizes))
        pieces = [_pad_first_dim(piece, max(sizes)) for piece in tensor.split(list(sizes))]
        return _reduce_scatter_along_first_dim(torch.cat(pieces), group)[: sizes[group.rank()]]
    share = tensor.new_empty((divide(tensor.size(0), group.size()), *tensor.shape[1:]))
    collectives.reduce_scatter(share, tensor.contiguous(), group)
    return share


def _exchange(
    tensor: torch.Tensor,
    group: Any,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
) -> torch.Tensor:
    num_rows = tensor.size(0) if output_splits is None else sum(output_splits)
    output = tensor.new_empty((num_rows, *tensor.shape[1:]))
    collectives.all_to_all(output, tensor, group, output_splits, input_splits)
    return output


# -- The table, row by row --
# The group and sizes are all that backward needs; a context has them under Megatron's names, for who
# calls backward with one of their own. Groups of one never get here (see below).


class _Region(torch.autograd.Function):
    """A row of the table."""

    @classmethod
    def symbolic(cls, graph, input_, *options):
        """The row's forward, without a backward. Megatron's classes have it under this name."""
        return cls.forward(SimpleNamespace(), input_, *options)


class _CopyToModelParallelRegion(_Region):
    """One value in t copies enters t different computations: their gradients add up."""

    @staticmethod
    def forward(ctx, input_, group):
        ctx.group = group
        return input_.view_as(input_)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return _reduce(grad_output, ctx.group), None


class _ReduceFromModelParallelRegion(_Region):
    """t terms become their sum: each term gets the sum's gradient."""

    @staticmethod
    def forward(ctx, input_, group):
        return _reduce(input_, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return grad_output, None


class _ScatterToModelParallelRegion(_Region):
    @staticmethod
    def forward(ctx, input_, group):
        ctx.group = group
        return _split_along_last_dim(input_, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return _gather_along_last_dim(grad_output, ctx.group), None


class _GatherFromModelParallelRegion(_Region):
    @staticmethod
    def forward(ctx, input_, group):
        ctx.group = group
        return _gather_along_last_dim(input_, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return _split_along_last_dim(grad_output, ctx.group), None


class _ScatterToSequenceParallelRegion(_Region):
    @staticmethod
    def forward(ctx, input_, group):
        ctx.group = group
        return _split_along_first_dim(input_, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return _gather_along_first_dim(grad_output, ctx.group), None


class _GatherFromSequenceParallelRegion(_Region):
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


class _ReduceScatterToSequenceParallelRegion(_Region):
    @staticmethod
    def forward(ctx, input_, group, input_split_sizes=None):
        ctx.group, ctx.input_split_sizes = group, input_split_sizes
        return _reduce_scatter_along_first_dim(input_, group, input_split_sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return _gather_along_first_dim(grad_output, ctx.group, ctx.input_split_sizes), None, None


class _AllToAll(torch.autograd.Function):
    """What came from rank j goes back to rank j: the transpose has the splits exchanged."""

    @staticmethod
    def forward(ctx, group, input_, output_split_sizes, input_split_sizes):
        ctx.group, ctx.splits = group, (input_split_sizes, output_split_sizes)
        return _exchange(input_, group, output_split_sizes, input_split_sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return None, _exchange(grad_output, ctx.group, *ctx.splits), None, None


# -- The functions to call --


def _apply(function: Any, input_: torch.Tensor, group: Any | None, *options: Any) -> torch.Tensor:
    """A group of one has nothing to exchange; all of them are then the identity."""
    group = get_tensor_model_parallel_group_if_none(group)
    if group.size() == 1:
        return input_
    return function.apply(input_, group, *options)


def copy_to_tensor_model_parallel_region(
    input_: torch.Tensor, group: Any | None = None
) -> torch.Tensor:
    """Enters a tensor-parallel region: the same tensor; backward sums its gradient over `group`."""
    return _apply(_CopyToModelParallelRegion, input_, group)


def reduce_from_tensor_model_parallel_region(
    input_: torch.Tensor, group: Any | None = None
) -> torch.Tensor:
    """Leaves a tensor-parallel region: the sum over `group`; backward hands the gradient on."""
    return _apply(_ReduceFromModelParallelRegion, input_, group)


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


def reduce_scatter_to_sequence_parallel_region(
    input_: torch.Tensor,
    group: Any | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """[s, ...] -> this rank's [s/t, ...] of the sum, or as many rows as `input_split_sizes` says.

    Raises ValueError if t does not divide s, or the sizes do not fit.
    """
    return _apply(_ReduceScatterToSequenceParallelRegion, input_, group, input_split_sizes)


def all_to_all(
    group: Any,
    input_: torch.Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """[n, ...] -> [n', ...]: `input_split_sizes[j]` rows go to rank j, `output_split_sizes_[j]` come.

    None: the same number for all. Raises as `collectives.all_to_all`.
    """
    if group.size() == 1:
        return input_
    return _AllToAll.apply(group, input_, output_split_sizes_, input_split_sizes)
