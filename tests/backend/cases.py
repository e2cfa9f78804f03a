"""Drawn collectives: what each rank gives, how it is called, and what must come out.

Every rank draws the same cases from the same seed, and can compute what every other rank gives. So
what must come out can be computed without any message.
"""

import operator
import random
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)
ARITHMETIC = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
OF_BITS = ("BAND", "BOR", "BXOR")
LAYOUTS = ("contiguous", "offset", "transposed", "strided", "expanded")
SMALL = ((0,), (1,), (7,), (3, 5), (2, 0, 3), (1023,), (4, 33), (), (5, 1, 3))
LARGE = ((65_536,), (65_537,), (262_143,), (262_144,), (262_145,), (300, 1000), (131_072,))
"""In elements; with 4 and 8 bytes each, the border of 1 MiB lies among them."""


@dataclass(frozen=True)
class Case:
    """One call of one function of `torch.distributed`, the same on all members of its group.

    `root` is a rank within the group; `splits[i][j]` says how many rows member i gives to member j.
    """

    name: str
    seed: int
    members: tuple[int, ...]
    dtype: torch.dtype
    op: str
    shape: tuple[int, ...]
    layout: str
    root: int
    splits: tuple[tuple[int, ...], ...]
    is_async: bool
    tag: int

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def reduce_op(self) -> dist.ReduceOp:
        return getattr(dist.ReduceOp, self.op)

    def is_for(self, rank: int) -> bool:
        return rank in self.members


def draw_case(drawn: random.Random, names: list[str], groups: list[tuple[int, ...]]) -> Case:
    """The next case of `drawn`, on one of `groups`."""
    members = drawn.choice(groups)
    name = drawn.choice(names)
    dtype = drawn.choice(DTYPES)
    ops = ARITHMETIC if dtype in FLOATS else (*ARITHMETIC, *OF_BITS)
    if dtype == torch.complex64:
        ops = ("SUM", "AVG")
    if dtype in INTEGERS:
        ops = tuple(op for op in ops if op != "AVG")
    if dtype == torch.bool:
        ops = ("MIN", "MAX", *OF_BITS)
    shape = drawn.choice(LARGE) if drawn.random() < 0.12 else drawn.choice(SMALL)
    layout = drawn.choice(LAYOUTS)
    num_rows = [[drawn.choice((0, 1, 2, 5)) for _ in members] for _ in members]
    return Case(
        name=name,
        seed=drawn.randrange(1 << 30),
        members=members,
        dtype=dtype,
        op=drawn.choice(ops),
        shape=shape,
        layout=layout,
        root=drawn.randrange(len(members)),
        splits=tuple(map(tuple, num_rows)),
        is_async=drawn.random() < 0.5,
        tag=drawn.randrange(5),
    )


def values(case: Case, member: int, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """What a member gives as its tensor of this number; contiguous."""
    generator = torch.Generator().manual_seed(case.seed + 1000 * member + number)
    if case.dtype.is_floating_point or case.dtype.is_complex:
        drawn = torch.float32 if case.dtype in (torch.float16, torch.bfloat16) else case.dtype
        return torch.randn(shape, generator=generator, dtype=drawn).to(case.dtype)
    lowest = 0 if case.dtype in (torch.uint8, torch.bool) else -4
    return torch.randint(
        lowest, 2 if case.dtype == torch.bool else 5, shape, generator=generator
    ).to(case.dtype)


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in a view of other memory."""
    if layout == "offset":
        wide = tensor.new_zeros(tensor.numel() + 3)
        wide[3:] = tensor.reshape(-1)
        return wide[3:].view(tensor.shape)
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided":
        wide = tensor.new_zeros(*tensor.shape, 2)
        wide[..., 0] = tensor
        return wide[..., 0]
    return tensor


def give(case: Case, member: int) -> list[torch.Tensor]:
    """What a member gives: a tensor for each member. Many functions use the first one alone."""
    given = []
    for number in range(case.size):
        shape = case.shape
        if case.name.endswith("uneven"):
            shape = (case.splits[member][number], *case.shape[1:])
        if case.layout == "expanded" and shape and not takes_in_place(case):
            tensor = values(case, member, number, (1, *shape[1:])).expand(shape)
        else:
            tensor = lay_out(values(case, member, number, shape), case.layout)
        given.append(tensor)
    return given


def takes_in_place(case: Case) -> bool:
    """Whether the function writes to the tensor that it is given."""
    return case.name in ("all_reduce", "reduce", "broadcast") or "coalesc" in case.name


def combine(case: Case, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The reduction of `tensors`, in the order of ranks."""
    with_two = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": operator.and_,
        "BOR": operator.or_,
        "BXOR": operator.xor,
    }[case.op]
    if case.dtype in (torch.float16, torch.bfloat16):
        tensors = [tensor.double() for tensor in tensors]
    total = reduce(with_two, [tensor.contiguous() for tensor in tensors])
    if case.op == "AVG":
        total = total / case.size
    return total.to(case.dtype)


def is_exact(case: Case, is_reduction: bool) -> bool:
    """Whether the result has the same bits whatever the order of the ranks."""
    is_whole = not (case.dtype.is_floating_point or case.dtype.is_complex)
    return not is_reduction or is_whole or case.op in ("MIN", "MAX") or case.size == 1


TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 2e-1,
}
"""For sums and products of up to eight numbers of size one."""
