"""What a rank calls: what is refused before anything is sent; and as one number, for the others.

The number travels in the header of every message of a collective: all ranks of one must have called
the same. So ranks that have called different things are told, where other backends wait for each other
or mix up their numbers.

Megatron has no counterpart.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

KINDS = (
    "a message",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_NAMED = {value for value in list(vars(torch).values()) if isinstance(value, torch.dtype)}
_DTYPES = tuple(sorted(_NAMED, key=str))
_KIND_OF = {kind: number for number, kind in enumerate(KINDS)}
_OP_OF = {op: number for number, op in enumerate(OPS)}
_DTYPE_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}
_ROOT, _DTYPE, _OP, _KIND, _GLOO = 40, 50, 56, 59, 63
"""First bits of the parts above the size; the root is counted from 1, 0: none."""
_MOST_BYTES = (1 << _ROOT) - 1


class CollectiveCall(NamedTuple):
    """A collective, as one rank has called it."""

    kind: str
    num_bytes: int = 0
    """Of the tensor that is as large on every rank; 0 where none is."""
    dtype: torch.dtype = torch.uint8
    op: str = "SUM"
    root: int | None = None
    is_over_gloo: bool = False

    def number(self) -> int:
        """The call in 64 bits."""
        return (
            min(self.num_bytes, _MOST_BYTES)
            | (0 if self.root is None else self.root + 1) << _ROOT
            | _DTYPE_OF[self.dtype] << _DTYPE
            | _OP_OF[self.op] << _OP
            | _KIND_OF[self.kind] << _KIND
            | self.is_over_gloo << _GLOO
        )

    def __str__(self) -> str:
        if self.kind == "barrier":
            return "barrier"
        dtype = str(self.dtype).removeprefix("torch.")
        words = [f"{self.kind} of {self.num_bytes} bytes of {dtype}"]
        if "reduce" in self.kind:
            words.append(f"op {self.op}")
        if self.root is not None:
            words.append(f"root {self.root}")
        return ", ".join(words)


def read_call(number: int) -> CollectiveCall:
    """The call that `number` stands for.

    >>> str(read_call(CollectiveCall("reduce", 16, torch.float32, "MAX", 1).number()))
    'reduce of 16 bytes of float32, op MAX, root 1'
    """

    def part(first: int, after: int) -> int:
        return number >> first & (1 << after - first) - 1

    root = part(_ROOT, _DTYPE)
    return CollectiveCall(
        KINDS[part(_KIND, _GLOO)],
        part(0, _ROOT),
        _DTYPES[part(_DTYPE, _OP)],
        OPS[part(_OP, _KIND)],
        root - 1 if root else None,
        bool(number >> _GLOO),
    )


def name_of(op: dist.ReduceOp) -> str:
    """The op's name. Raises ValueError for one that only NCCL knows, as PREMUL_SUM."""
    # By the hash, which is the op's number: a ReduceOp is equal to a member of its enum in one order
    # alone, so it is not found as a key.
    name = _NAMES.get(hash(op))
    if name is None:
        raise ValueError(f"an op that is not one of {', '.join(OPS)}: CPU tensors know these alone")
    return name


_NAMES = {hash(getattr(dist.ReduceOp, name)): name for name in OPS}


# -- What the methods of a group refuse: with the numbers, and what to change --


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
