"""What grids of ranks refuse: sizes, orders and layouts that cannot be.

Torch-free. Megatron has no counterpart: it asserts most of this where it makes its groups.
"""

from collections.abc import Mapping
from math import prod
from typing import Any


def check_grid(name_to_size: Mapping[str, int], order: str, example: str) -> None:
    """What `RankGenerator` asks of its sizes and its order; `example` is an order that is right."""
    for name, size in name_to_size.items():
        _check_size(name, size)
    ep, cp = name_to_size["ep"], name_to_size["cp"]
    if ep > 1 and cp > 1:
        raise ValueError(
            f"one grid cannot have both ep={ep} and cp={cp}; make one grid with ep=1 for the "
            "dense layers and one with cp=1 for the experts"
        )
    words = order.lower().split("-")
    known = " ".join(name_to_size)
    for word in words:
        if word not in name_to_size:
            raise ValueError(
                f'order {order!r} has the word {word!r}; use {known}, joined by "-", '
                f"as in {example!r}"
            )
        if words.count(word) > 1:
            raise ValueError(f"order {order!r} has {word!r} twice; name each coordinate once")
    for name, size in name_to_size.items():
        if name not in words and size > 1:
            raise ValueError(f"{name} is {size} but order {order!r} lacks it; add {name!r}")


def _check_size(name: str, size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} is {size!r}; give a whole number, 1 or more")


def check_token(token: str, names: Mapping[str, int]) -> None:
    """`token` names coordinates, joined by "-"."""
    unknown = [word for word in token.lower().split("-") if word not in names]
    if unknown:
        raise ValueError(
            f'{token!r} names {unknown[0]!r}; use words of {sorted(names)} joined by "-"'
        )


def check_cell(cell: int, num_cells: int, rank_offset: int) -> None:
    """A grid whose first rank is `rank_offset` has the cell."""
    if not 0 <= cell < num_cells:
        last = rank_offset + num_cells - 1
        raise ValueError(f"rank {rank_offset + cell} is outside {rank_offset}..{last}")


def check_layout(world_size: int, tp: int, pp: int, cp: int, ep: int, etp: int) -> None:
    """Both grids divide the world."""
    sizes = {"world size": world_size, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
    for name, size in sizes.items():
        _check_size(name, size)
    for names in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
        cells = prod(sizes[name] for name in names)
        if world_size % cells:
            factors = " x ".join(f"{name}={sizes[name]}" for name in names)
            raise ValueError(
                f"world size {world_size} is not divisible by {factors} = {cells}; "
                f"use a multiple of {cells} ranks or smaller sizes"
            )


def check_same_pipelines(dense: Any, expert: Any, order: str, example: str) -> None:
    """Two `RankGenerator`s have the same pipelines; `example` is an order in which they always do."""
    if dense.pp > 1 and dense.stride["pp"] != expert.stride["pp"]:
        raise ValueError(
            f"order {order!r} puts the stages of a pipeline {dense.stride['pp']} ranks apart for "
            f"the dense layers (tp={dense.tp} cp={dense.cp} dp={dense.dp}) but "
            f"{expert.stride['pp']} for the experts (etp={expert.tp} ep={expert.ep} "
            f"edp={expert.dp}); put pp last in the order, as in {example!r}"
        )
    if dense.pp > 1 and dense.dp != expert.dp and not order.lower().endswith("pp"):
        raise ValueError(
            f"order {order!r} does not end in pp, which needs equal data-parallel sizes, but dp="
            f"{dense.dp} and the experts' is {expert.dp}; put pp last, or choose etp * ep = "
            f"tp * cp = {dense.tp * dense.cp}"
        )
