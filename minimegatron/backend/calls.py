"""What a rank has called, as one number: all ranks of a collective must have called the same.

The number travels in the header of every message of a collective. So ranks that have called different
things are told, where other backends wait for each other or mix up their numbers.

Megatron has no counterpart.
"""

from typing import NamedTuple

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
