"""Small arithmetic of tensor parallelism: which part of a tensor belongs to which rank.

Counterpart: `megatron.core.tensor_parallel.utils`.
"""

from typing import Any

import torch

from minimegatron.core import parallel_state
from minimegatron.core.utils import divide
from minimegatron.exports import all_of

# Megatron has these here.
__getattr__, __dir__ = all_of(__name__, "minimegatron.core.tensor_parallel.tensor_pieces")


def get_tensor_model_parallel_group_if_none(tp_group: Any | None, is_expert: bool = False) -> Any:
    """`tp_group`, or for None this rank's tensor-parallel group of `parallel_state`, or an expert's.

    Anything with `rank()` and `size()` will do for a group of one; more ranks need a
    `torch.distributed.ProcessGroup`. Mirrors: `megatron.core.utils`, same name.
    """
    if tp_group is None and is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group


def tensor_model_parallel_rank(tp_group: Any | None = None) -> int:
    """Our place in `tp_group`; for None what `parallel_state` says, where it may be set by hand."""
    return parallel_state.get_tensor_model_parallel_rank() if tp_group is None else tp_group.rank()


def weight_gradient(grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor:
    """dW = dY^T X over all tokens: [n, h] from [s, b, n] and [s, b, h]."""
    return grad_output.flatten(0, -2).t() @ total_input.flatten(0, -2)


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


def make_viewless_tensor(inp: torch.Tensor) -> torch.Tensor:
    """`inp`, or a copy of it if it is a view of another tensor.

    A stage frees its output once it is sent (`deallocate_output_tensor`); freeing a view would free
    nothing, because the tensor it looks into still holds the memory.
    """
    return inp if inp._base is None else inp.clone()
