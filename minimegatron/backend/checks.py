"""What the methods of a group refuse, before anything is sent: with the numbers, and what to change.

Megatron has no counterpart.
"""

from collections.abc import Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]


def check_one(given: Any) -> Any:
    """The one tensor, or list of tensors, in the list that torch passes. Raises ValueError.

    In a few places torch passes a tensor without a list.
    """
    if isinstance(given, torch.Tensor):
        given = [given]
    if len(given) != 1:
        raise ValueError(
            f"{len(given)} tensors where a process has one; call the function for each"
        )
    if isinstance(given[0], torch.Tensor) and given[0].layout != torch.strided:
        raise ValueError(f"a tensor of layout {given[0].layout}; convert it to a dense one")
    return given[0]


def check_root(root: int, size: int, rank: int | None = None) -> int:
    """The root, or the other end of a message of rank `rank`. Raises ValueError."""
    if not 0 <= root < size:
        raise ValueError(f"rank {root} is not in a group of {size} ranks; give one below {size}")
    if root == rank:
        raise ValueError(f"rank {rank} cannot exchange messages with itself; copy the tensor")
    return root


def check_list(
    given: Sequence[Tensors], like: torch.Tensor, size: int, is_needed: bool, name: str
) -> list[torch.Tensor]:
    """The list in the list: one tensor for each rank, all as large as `like`. Raises ValueError.

    Empty where it is not needed.
    """
    if not is_needed:
        return []
    tensors = check_one(given)
    if len(tensors) != size:
        raise ValueError(f"a list of {len(tensors)} {name} tensors; {size} ranks need {size}")
    _check_alike(like, tensors, name)
    return list(tensors)


def check_shares(output: torch.Tensor, shares: Tensors, size: int) -> None:
    """Raises ValueError if these cannot be the inputs of a reduce-scatter."""
    if len(shares) != size:
        raise ValueError(f"a list of {len(shares)} input tensors; {size} ranks need {size}")
    _check_alike(output, shares, "input")


def _check_alike(like: torch.Tensor, tensors: Tensors, name: str) -> None:
    for number, tensor in enumerate(tensors):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise ValueError(
                f"{name} tensor {number} has {tensor.numel()} elements of {tensor.dtype}, where "
                f"{like.numel()} of {like.dtype} belong; make them alike"
            )


def check_all_to_all(outputs: Tensors, inputs: Tensors, rank: int, size: int) -> None:
    """Raises ValueError if these cannot be the outputs and inputs of an all-to-all."""
    if not len(outputs) == len(inputs) == size:
        raise ValueError(
            f"{len(outputs)} outputs and {len(inputs)} inputs; {size} ranks need {size} of each"
        )
    if len(dtypes := {tensor.dtype for tensor in (*outputs, *inputs)}) > 1:
        raise ValueError(f"tensors of {sorted(map(str, dtypes))}; make them of one dtype")
    if outputs[rank].numel() != inputs[rank].numel():
        raise ValueError(
            f"rank {rank} sends itself {inputs[rank].numel()} elements and has room for "
            f"{outputs[rank].numel()}; make its part of the output as large as that of the input"
        )
