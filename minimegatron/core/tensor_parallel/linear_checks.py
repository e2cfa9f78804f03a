"""What a tensor-parallel linear layer refuses, and a cut of its stacked matrices, in words.

Megatron has no counterpart.
"""

from collections.abc import Sequence

import torch


def refuse_weight(weight: torch.Tensor | None, own_shape: tuple[int, int]) -> None:
    """Raises ValueError: a column-parallel layer has no weight, or was given one of another shape."""
    if weight is None:
        raise ValueError(
            "this ColumnParallelLinear was built with skip_weight_param_allocation and has "
            "no weight; pass weight= to forward"
        )
    raise ValueError(
        f"weight is {list(weight.shape)}, but this rank's rows of it are {list(own_shape)}; "
        "pass this rank's slice"
    )


def check_input_is_cut(sequence_parallel: bool, input_is_parallel: bool) -> None:
    """Raises ValueError where a row-parallel layer is to cut its input under sequence parallelism."""
    if sequence_parallel and not input_is_parallel:
        raise ValueError(
            "a row-parallel layer under sequence_parallel takes features that are cut "
            "already; set input_is_parallel=True or turn sequence_parallel off"
        )


def check_sections(dim: int, length: int, sizes: Sequence[int], tp_size: int) -> None:
    """Raises ValueError where dimension `dim`, of `length`, is no whole number of such matrices."""
    if length % (tp_size * sum(sizes)):
        raise ValueError(
            f"dimension {dim} has {length} elements, which cannot be "
            f"{len(sizes)} stacked matrices of sizes {':'.join(map(str, sizes))}, each cut over "
            f"{tp_size} ranks; make it a multiple of {tp_size * sum(sizes)} (partition_sizes are "
            "those of one rank's pieces)"
        )
