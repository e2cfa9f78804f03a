"""A tensor cut in equal pieces, of its last dimension or flat, and put together again.

Counterpart: the functions of the same names in `megatron.core.tensor_parallel.utils`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from minimegatron.core import collectives
from minimegatron.core.tensor_parallel.utils import get_tensor_model_parallel_group_if_none
from minimegatron.core.utils import divide

__all__ = [
    "gather_split_1d_tensor",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
]
"""`core.tensor_parallel.utils` offers these."""


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """`num_partitions` equal pieces of the last dimension, views unless asked to be contiguous."""
    pieces = torch.split(tensor, divide(tensor.size(-1), num_partitions), dim=-1)
    if contiguous_split_chunks:
        return tuple(piece.contiguous() for piece in pieces)
    return pieces


# -- Any tensor, cut flat --
# Recompute may keep only 1/t of a layer's input per rank: all ranks hold the same one anyway.


def split_tensor_into_1d_equal_chunks(
    tensor: torch.Tensor, *, tp_group: Any = None
) -> torch.Tensor:
    """This rank's copy of an equal share of the flattened `tensor`; ValueError if uneven."""
    group = get_tensor_model_parallel_group_if_none(tp_group)
    share = divide(tensor.numel(), group.size())
    return tensor.reshape(-1)[group.rank() * share : (group.rank() + 1) * share].clone()


def gather_split_1d_tensor(tensor: torch.Tensor, tp_group: Any = None) -> torch.Tensor:
    """The inverse: every rank's share, of any shape, one after the other, flat."""
    group = get_tensor_model_parallel_group_if_none(tp_group)
    gathered = tensor.new_empty(group.size() * tensor.numel())
    collectives.all_gather(gathered, tensor.reshape(-1), group)
    return gathered
