"""Small arithmetic of tensor parallelism: which part of a tensor belongs to which rank.

Counterpart: `megatron.core.tensor_parallel.utils`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from minimegatron.core import collectives, parallel_state
from minimegatron.core.utils import divide


def get_tensor_model_parallel_group_if_none(tp_group: Any | None, is_expert: bool = False) -> Any:
    """`tp_group`, or for None this rank's tensor-parallel group of `parallel_state`, or an expert's.

    Anything with `rank()` and `size()` will do for a group of one; more ranks need a
    `torch.distributed.ProcessGroup`. Mirrors: `megatron.core.utils`, same name.
    """
    if tp_group is not None:
        return tp_group
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def tensor_model_parallel_rank(tp_group: Any | None = None) -> int:
    """Our place in `tp_group`; for None what `parallel_state` says, where it may be set by hand."""
    if tp_group is None:
        return parallel_state.get_tensor_model_parallel_rank()
    return tp_group.rank()


def weight_gradient(grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor:
    """dW = dY^T X over all tokens: [n, h] from [s, b, n] and [s, b, h]."""
    return grad_output.flatten(0, -2).t() @ total_input.flatten(0, -2)


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """`num_partitions` equal pieces of the last dimension, views unless asked to be contiguous."""
    pieces = torch.split(tensor, divide(tensor.size(-1), num_partitions), dim=-1)
    if contiguous_split_chunks:
        return tuple(piece.contiguous() for piece in pieces)
    return pieces


class VocabUtility:
    """Which rows of the vocabulary a tensor-parallel rank holds: [first, last)."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Raises ValueError if `world_size` does not divide the vocabulary."""
        per_partition = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(
            per_partition, rank, world_size
        )


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


def make_viewless_tensor(inp: torch.Tensor) -> torch.Tensor:
    """`inp`, or a copy of it if it is a view of another tensor.

    A stage frees its output once it is sent (`deallocate_output_tensor`); freeing a view would free
    nothing, because the tensor it looks into still holds the memory.
    """
    return inp if inp._base is None else inp.clone()
