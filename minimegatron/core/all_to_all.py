"""Collectives that move rows between single ranks: each to each, or each to the next.

Megatron has no counterpart: it calls `torch.distributed` directly. They are importable from
`minimegatron.core.collectives` too, whose rules hold here.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import Done, Pending
from minimegatron.core.tracing import of_collective, traced

__all__ = ["all_to_all", "pass_to_next"]


def _of_all_to_all(arguments: dict[str, Any]) -> dict[str, Any]:
    """`bytes` are those of the input, as elsewhere; `bytes_sent` go to other ranks."""
    seen = of_collective(arguments)
    tensor, group = arguments["input"], arguments["group"]
    splits = _splits(tensor, arguments["input_splits"], group, "input")
    row = seen["bytes"] // max(tensor.size(0), 1)
    return seen | {
        "bytes_sent": row * (sum(splits) - splits[group.rank()]),
        "input_splits": splits,
        "output_splits": _splits(arguments["output"], arguments["output_splits"], group, "output"),
    }


def _splits(
    tensor: torch.Tensor, given: Sequence[int] | None, group: dist.ProcessGroup, name: str
) -> list[int]:
    """How many rows of `tensor` belong to each rank. Raises ValueError if that cannot be."""
    rows, size = tensor.size(0), group.size()
    if given is None:
        if rows % size:
            raise ValueError(
                f"all-to-all: the {name} has {rows} rows, which {size} ranks cannot share equally; "
                f"give {name}_splits"
            )
        return [rows // size] * size
    given = list(given)
    if len(given) != size or sum(given) != rows or min(given) < 0:
        raise ValueError(
            f"all-to-all: {name}_splits {given} are {len(given)} numbers with sum {sum(given)}, but "
            f"the group has {size} ranks and the {name} {rows} rows; give each rank its rows"
        )
    return given


@traced("all-to-all", _of_all_to_all)
def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    async_op: bool = False,
) -> Any:
    """Sends to each rank of `group` its rows of `input`; `output` is what came, in group order.

    `input_splits[j]` rows go to rank j, `output_splits[j]` come from it; None: the same for all. Until
    `wait`, `input` must stay as it is.

    Raises:
        ValueError: there is not one split per rank, or they are not all rows; rows of `input` and of
            `output` are not alike, or `output` is not contiguous. Nothing is sent then.
    """
    if (output.dtype, output.shape[1:]) != (input.dtype, input.shape[1:]):
        raise ValueError(
            f"all-to-all: rows of the input are {input.dtype} {list(input.shape[1:])}, those of the "
            f"output {output.dtype} {list(output.shape[1:])}; make them alike"
        )
    if not output.is_contiguous():
        raise ValueError(
            f"all-to-all: the output of shape {list(output.shape)} is not contiguous; make a new one"
        )
    input_splits = _splits(input, input_splits, group, "input")
    output_splits = _splits(output, output_splits, group, "output")
    if group.size() == 1:
        output.copy_(input)
        return Done() if async_op else None
    splits = (output_splits, input_splits, group, async_op)
    work = dist.all_to_all_single(output, input.contiguous(), *splits)
    return Pending(work, "all-to-all") if async_op else None


def _of_hop(arguments: dict[str, Any]) -> dict[str, Any]:
    seen = of_collective(arguments)
    seen["bytes_sent"] = seen["bytes"] if seen["group_size"] > 1 else 0
    return seen | {name: arguments[name] for name in ("hop", "layer", "direction", "payload")}


@traced("ring-hop", _of_hop)
def pass_to_next(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    hop: int = 0,
    layer: int = 0,
    direction: str = "forward",
    payload: str = "kv",
) -> Any:
    """Sends `input` to the next rank of the group, the last one's to the first; returns its handle.

    After `wait`, `output` is what the rank before has sent: as large as `input` on every rank, of its
    dtype, and contiguous. Until then, `input` must stay as it is. It is an all-to-all in which a rank
    has rows for one other alone. `hop`, `layer`, `direction` and `payload` are for who watches: which
    hop of a ring this is (from 0), of which layer (from 1), in "forward" or "backward", and what moves.
    """
    size, rank = group.size(), group.rank()
    if size == 1:
        output.copy_(input)
        return Done()
    rows = len(input)
    given = [rows if other == (rank + 1) % size else 0 for other in range(size)]
    taken = [rows if other == (rank - 1) % size else 0 for other in range(size)]
    work = dist.all_to_all_single(output, input.contiguous(), taken, given, group, True)
    return Pending(work, "ring-hop")
