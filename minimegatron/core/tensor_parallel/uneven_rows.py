"""Exchanges along the first dimension where ranks have different numbers of rows.

Counterpart: `all_to_all` and the sizes of rows in `megatron.core.tensor_parallel.mappings`. Tokens on
their way to experts need them: they are [n, h], with another n on each rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from minimegatron.core import collectives

# -- Shares of a tensor --


def check_sizes(sizes: Sequence[int], group: Any, rows: int, expected: int = -1) -> None:
    """Raises ValueError unless there is one size per rank and `rows`, as `expected`."""
    if len(sizes) != group.size() or rows != expected:
        raise ValueError(
            f"split sizes {list(sizes)} for {rows} rows on rank {group.rank()} of a group of "
            f"{group.size()}; give one size per rank, the same list on all of them"
        )


def _pad_first_dim(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """With rows of zeros: gloo has no collective for shares of unequal sizes."""
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, size - tensor.size(0)])


def gather_uneven(tensor: torch.Tensor, group: Any, sizes: Sequence[int]) -> torch.Tensor:
    """[n_r, ...] -> [sum of `sizes`, ...], where rank r has `sizes[r]` rows."""
    check_sizes(sizes, group, tensor.size(0), *sizes[group.rank() :][:1])
    padded = _pad_first_dim(tensor, max(sizes))
    gathered = tensor.new_empty((len(sizes) * max(sizes), *tensor.shape[1:]))
    collectives.all_gather(gathered, padded.contiguous(), group)
    pieces = gathered.view(len(sizes), max(sizes), *tensor.shape[1:])
    return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])


def reduce_scatter_uneven(tensor: torch.Tensor, group: Any, sizes: Sequence[int]) -> torch.Tensor:
    """[sum of `sizes`, ...] -> this rank's rows of the sum over `group`."""
    check_sizes(sizes, group, tensor.size(0), sum(sizes))
    pieces = [_pad_first_dim(piece, max(sizes)) for piece in tensor.split(list(sizes))]
    share = tensor.new_empty((max(sizes), *tensor.shape[1:]))
    collectives.reduce_scatter(share, torch.cat(pieces), group)
    return share[: sizes[group.rank()]]


# -- All-to-all --


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
