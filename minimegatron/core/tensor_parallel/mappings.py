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

Here are three rows: copy and reduce, which are a pair, and reduce-scatter. `standalone_regions` has the
cuts and gathers, `uneven_rows` the all-to-all. A plain GPT's layers call reduce or reduce-scatter; a
column-parallel layer has copy or gather built into its product (see `layers`).

The sequence is dimension 0 and features are the last: activations are [s, b, h]. Tokens on their way
to experts are [n, h], with another n on each rank: hence the sizes that three of the rows take.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minimegatron.core import collectives
from minimegatron.core.tensor_parallel import uneven_rows
from minimegatron.core.tensor_parallel.megatron_methods import SymbolicRegion
from minimegatron.core.tensor_parallel.utils import divide, get_tensor_model_parallel_group_if_none
from minimegatron.exports import all_of

# Megatron has all rows of the table here.
__getattr__, __dir__ = all_of(__name__, "minimegatron.core.tensor_parallel.standalone_regions")

Sizes = Sequence[int] | None  # rows of each rank; None where all have as many

# -- The moves themselves, without gradients --


def _reduce(tensor: Tensor, group: Any) -> Tensor:
    """The sum over `group`, in a new tensor: autograd forbids changing the caller's."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(total, group)
    return total


def _gather_along_first_dim(tensor: Tensor, group: Any, sizes: Sizes = None) -> Tensor:
    if sizes is not None:
        return uneven_rows.gather_uneven(tensor, group, sizes)
    gathered = tensor.new_empty((group.size() * tensor.size(0), *tensor.shape[1:]))
    collectives.all_gather(gathered, tensor.contiguous(), group)
    return gathered


def _reduce_scatter_along_first_dim(tensor: Tensor, group: Any, sizes: Sizes = None) -> Tensor:
    if sizes is not None:
        return uneven_rows.reduce_scatter_uneven(tensor, group, sizes)
    share = tensor.new_empty((divide(tensor.size(0), group.size()), *tensor.shape[1:]))
    collectives.reduce_scatter(share, tensor.contiguous(), group)
    return share


# -- The table, row by row --
# The group and sizes are all that backward needs; a context has them under Megatron's names, for who
# calls backward with one of their own. Groups of one never get here (see below).


class _CopyToModelParallelRegion(SymbolicRegion):
    """One value in t copies enters t different computations: their gradients add up."""

    @staticmethod
    def forward(ctx, input_, group):
        ctx.group = group
        return input_.view_as(input_)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return _reduce(grad_output, ctx.group), None


class _ReduceFromModelParallelRegion(SymbolicRegion):
    """t terms become their sum: each term gets the sum's gradient."""

    @staticmethod
    def forward(ctx, input_, group):
        return _reduce(input_, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return grad_output, None


class _ReduceScatterToSequenceParallelRegion(SymbolicRegion):
    @staticmethod
    def forward(ctx, input_, group, input_split_sizes=None):
        ctx.group, ctx.input_split_sizes = group, input_split_sizes
        return _reduce_scatter_along_first_dim(input_, group, input_split_sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        return _gather_along_first_dim(grad_output, ctx.group, ctx.input_split_sizes), None, None


# -- The functions to call --


def _apply(function: Any, input_: Tensor, group: Any | None, *options: Any) -> Tensor:
    """A group of one has nothing to exchange; all of them are then the identity."""
    group = get_tensor_model_parallel_group_if_none(group)
    if group.size() == 1:
        return input_
    return function.apply(input_, group, *options)


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Any | None = None) -> Tensor:
    """Enters a tensor-parallel region: the same tensor; backward sums its gradient over `group`."""
    return _apply(_CopyToModelParallelRegion, input_, group)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Any | None = None) -> Tensor:
    """Leaves a tensor-parallel region: the sum over `group`; backward hands the gradient on."""
    return _apply(_ReduceFromModelParallelRegion, input_, group)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, group: Any | None = None, input_split_sizes: Sizes = None
) -> Tensor:
    """[s, ...] -> this rank's [s/t, ...] of the sum, or as many rows as `input_split_sizes` says.

    Raises ValueError if t does not divide s, or the sizes do not fit.
    """
    return _apply(_ReduceScatterToSequenceParallelRegion, input_, group, input_split_sizes)
