"""The collectives everything above uses: `torch.distributed`, traced.

Megatron calls `torch.distributed` directly everywhere. Here each call is a link of the chain, which
observers see. What moves the tensors is the group's: NCCL; or, on a CPU and where ranks share a GPU,
memory that the ranks of a machine share (`minimegatron.backend`); or gloo.

Every function takes its process group as an argument and is a no-op, or a copy, for a group of one.
Asynchronous forms return an object with `wait()`.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.tracing import traced

ReduceOp = dist.ReduceOp

# Renamed in torch 2.13; the old names warn there, the new ones do not exist before.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Done:
    """The handle of a collective that had nothing to do."""

    def wait(self) -> bool:
        return True


class Pending:
    """The handle of a collective under way. To wait for it is a link of the chain, as to start it."""

    def __init__(self, work: Any, name: str):
        self.work, self.name = work, name

    def wait(self) -> bool:
        _wait_for(self)
        return True


@traced("collective-wait", lambda a: {"collective": a["handle"].name})
def _wait_for(handle: Pending) -> None:
    handle.work.wait()


# -- The edges of a step --
# A group over shared memory knows steps (`backend.step_methods`). Over gloo and NCCL, collectives are
# matched by their order alone: after a step that failed there, make new groups.

_num_begun: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""Steps of each group that does not know steps; the tags of its messages have this number."""


def begin_step(
    groups: Sequence[dist.ProcessGroup],
    others: Sequence[dist.ProcessGroup] = (),
    forward_only: bool = False,
) -> None:
    """All ranks of `groups` begin a step: what a failed step left behind is not taken for it.

    `others` are groups that the step may use too. In a forward-only step, ranks of theirs may belong to
    copies of the model that begin it at another time, or never.
    """
    for group in (*groups, *others):
        if hasattr(group, "begin_step"):
            group.begin_step(forward_only and group in others)
        else:
            _num_begun[group] = num_begun(group) + 1


def num_begun(group: dist.ProcessGroup) -> int:
    """How many steps the group has begun that does not know steps itself."""
    return _num_begun.get(group, 0)


def meet(groups: Sequence[dist.ProcessGroup]) -> None:
    """Returns when all ranks of `groups` have come here; raises where one has failed its step.

    Not over NCCL, which tells nobody of a failure: a step that failed is not tried again there. It is
    not traced: it reduces nothing of the model's, and Megatron has no such call.
    """
    for group in groups:
        if is_tagged(group):
            group.barrier().wait()


def end_step(groups: Sequence[dist.ProcessGroup]) -> None:
    """The step has ended well on this rank. What it has launched may still be waited for."""
    for group in groups:
        if hasattr(group, "end_step"):
            group.end_step()


def abandon(groups: Sequence[dist.ProcessGroup], reason: str) -> None:
    """Ends a step that failed on this rank; tells the other ranks of `groups`, where it can."""
    for group in groups:
        if hasattr(group, "abandon"):
            group.abandon(reason)


# -- The collectives --


def is_tagged(group: dist.ProcessGroup) -> bool:
    """Whether messages over `group` have tags, and wait for nobody. NCCL pairs them by their order."""
    return group.name() in ("gloo", "shm")


def _describe(arguments: dict[str, Any]) -> dict[str, Any]:
    tensor, group = arguments.get("tensor", arguments.get("input")), arguments["group"]
    for name, value in (("tensor", tensor), ("group", group)):
        if value is None:
            raise TypeError(f"a collective needs a {name}, and got None")
    return {
        "bytes": tensor.numel() * tensor.element_size(),
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "group_size": group.size(),
    }


@traced("all-reduce", _describe)
def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    op: Any = ReduceOp.SUM,
    async_op: bool = False,
) -> Any:
    """Reduces `tensor` in place over `group`, the same result on every rank."""
    if group.size() == 1:
        return Done() if async_op else None
    work = dist.all_reduce(tensor, op, group, async_op)
    return Pending(work, "all-reduce") if async_op else None


@traced("broadcast", _describe)
def broadcast(tensor: torch.Tensor, group_src: int, group: dist.ProcessGroup) -> None:
    """Copies `tensor` of rank `group_src` (a rank within `group`) to every rank, in place."""
    if group.size() > 1:
        dist.broadcast(tensor, group=group, group_src=group_src)


@traced("all-gather", _describe)
def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    async_op: bool = False,
    lane: int | None = None,
) -> Any:
    """Concatenates every rank's `input` along dimension 0 into `output`, in group order.

    With a `lane` of `new_lane`, what a failed step began may still be waited for in the next one: it is
    paired with what the other ranks send in the same lane, then or later.
    """
    if group.size() == 1:
        output.copy_(input)
        return Done() if async_op else None
    if lane is None:
        work = _all_gather(output, input.contiguous(), group, async_op)
    else:
        work = group.all_gather_of_no_step(output, input, lane, async_op)
    return Pending(work, "all-gather") if async_op else None


def new_lane(group: dist.ProcessGroup) -> int | None:
    """For `all_gather`; None where `group` knows no steps. All ranks ask for lanes in one order."""
    return group.new_lane() if hasattr(group, "new_lane") else None


@traced("reduce-scatter", _describe)
def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    op: Any = ReduceOp.SUM,
    async_op: bool = False,
) -> Any:
    """Reduces `input` over `group`; slice number `group.rank()` of dimension 0 goes to `output`."""
    if group.size() == 1:
        output.copy_(input)
        return Done() if async_op else None
    work = _reduce_scatter(output, input.contiguous(), op, group, async_op)
    return Pending(work, "reduce-scatter") if async_op else None


def _describe_all_to_all(arguments: dict[str, Any]) -> dict[str, Any]:
    """`bytes` are those of the input, as elsewhere; `bytes_sent` go to other ranks."""
    seen = _describe(arguments)
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


@traced("all-to-all", _describe_all_to_all)
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


def _describe_hop(arguments: dict[str, Any]) -> dict[str, Any]:
    seen = _describe(arguments)
    seen["bytes_sent"] = seen["bytes"] if seen["group_size"] > 1 else 0
    return seen | {name: arguments[name] for name in ("hop", "layer", "direction", "payload")}


@traced("ring-hop", _describe_hop)
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
