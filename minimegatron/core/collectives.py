"""The collectives everything above uses: `torch.distributed`, traced, on any device.

Megatron calls `torch.distributed` directly everywhere: each of its ranks has a GPU, and NCCL unless
told otherwise. Here the same code must also run where several ranks share one GPU: then the group's
backend is gloo, which moves host memory only; device tensors are staged through it. Small tensors
between ranks on one host take a shorter way than gloo's (`local_collectives`).

Every function takes its process group as an argument and is a no-op, or a copy, for a group of one.
Asynchronous forms return an object with `wait()`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import local_host
from minimegatron.core.local_host import get_mesh
from minimegatron.core.tracing import traced
from minimegatron.core.utils import get_device

ReduceOp = dist.ReduceOp

# Renamed in torch 2.13; the old names warn there, the new ones do not exist before.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Done:
    """The handle of a collective that had nothing to do."""

    def wait(self) -> bool:
        return True


class _CopyBack:
    """The handle of a collective staged through the host: the copy back happens in `wait`."""

    def __init__(self, work: Any, staged: torch.Tensor, target: torch.Tensor):
        self._work, self._staged, self._target = work, staged, target

    def wait(self) -> bool:
        self._work.wait()
        self._target.copy_(self._staged)
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


def begin_step(
    groups: list[dist.ProcessGroup],
    others: Sequence[dist.ProcessGroup] = (),
    forward_only: bool = False,
) -> None:
    """All ranks of `groups` begin a step: what a failed step left behind is not taken for it.

    `others` are groups that the step may use too. In a forward-only step, ranks of theirs may belong to
    copies of the model that begin it at another time, or never.

    That holds for what goes through shared memory. gloo and NCCL match collectives by their order
    alone: after a step that failed there, make new groups.
    """
    if get_device().type == "cpu":
        local_host.begin_step(groups, others, forward_only)


def meet(groups: Sequence[dist.ProcessGroup]) -> None:
    """Returns when all ranks of `groups` have come here; raises where one has failed its step.

    Not on GPUs: NCCL tells nobody of a failure, and a step that failed is not tried again there. It is
    not traced: it reduces nothing of the model's, and Megatron has no such call.
    """
    if get_device().type == "cpu":
        reduce = getattr(all_reduce, "__wrapped__", all_reduce)
        for group in groups:
            reduce(torch.zeros(1), group)


def end_step(groups: list[dist.ProcessGroup]) -> None:
    """The step has ended well on this rank. What it has launched may still be waited for."""
    local_host.end_step(groups)


def abandon(groups: list[dist.ProcessGroup], reason: str) -> None:
    """Ends a step that failed on this rank; tells the other ranks of `groups`, where it can."""
    local_host.abandon(groups, reason)


def needs_staging(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """True where `tensor` lives on a device that `group`'s backend cannot read."""
    return tensor.is_cuda and dist.get_backend(group) == "gloo"


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


def _finish(work: Any, async_op: bool, name: str) -> Any:
    if async_op:
        return Pending(work, name)
    work.wait()
    return None


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
    if needs_staging(tensor, group):
        staged = tensor.cpu()
        work = dist.all_reduce(staged, op=op, group=group, async_op=True)
        work = _CopyBack(work, staged, tensor)
    elif mesh := get_mesh(group, tensor):
        work = mesh.all_reduce(tensor.detach(), op)
    else:
        work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    return _finish(work, async_op, "all-reduce")


@traced("broadcast", _describe)
def broadcast(tensor: torch.Tensor, group_src: int, group: dist.ProcessGroup) -> None:
    """Copies `tensor` of rank `group_src` (a rank within `group`) to every rank, in place."""
    if group.size() == 1:
        return
    if needs_staging(tensor, group):
        staged = tensor.cpu()
        dist.broadcast(staged, group=group, group_src=group_src)
        tensor.copy_(staged)
    elif mesh := get_mesh(group, tensor):
        mesh.broadcast(tensor.detach(), group_src)
    else:
        dist.broadcast(tensor, group=group, group_src=group_src)


@traced("all-gather", _describe)
def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    async_op: bool = False,
    lane: int = 0,
) -> Any:
    """Concatenates every rank's `input` along dimension 0 into `output`, in group order.

    With a `lane`, what a failed step began may still be waited for in the next one: shared memory
    pairs it with what the other ranks send in the same lane, then or later.
    """
    if group.size() == 1:
        output.copy_(input)
        return Done() if async_op else None
    if needs_staging(input, group):
        staged = torch.empty(output.shape, dtype=output.dtype)
        work = _all_gather(staged, input.cpu().contiguous(), group=group, async_op=True)
        work = _CopyBack(work, staged, output)
    elif mesh := get_mesh(group, input, lane):
        work = mesh.all_gather(output.detach(), input.detach(), lane)
    else:
        work = _all_gather(output, input.contiguous(), group=group, async_op=True)
    return _finish(work, async_op, "all-gather")


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
    if needs_staging(input, group):
        staged = torch.empty(output.shape, dtype=output.dtype)
        work = _reduce_scatter(staged, input.cpu().contiguous(), op=op, group=group, async_op=True)
        work = _CopyBack(work, staged, output)
    elif mesh := get_mesh(group, input):
        work = mesh.reduce_scatter(output.detach(), input.detach(), op)
    else:
        work = _reduce_scatter(output, input.contiguous(), op=op, group=group, async_op=True)
    return _finish(work, async_op, "reduce-scatter")


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
    most_rows: int | None = None,
) -> Any:
    """Sends to each rank of `group` its rows of `input`; `output` is what came, in group order.

    `input_splits[j]` rows go to rank j, `output_splits[j]` come from it; None: the same for all. Until
    `wait`, `input` must stay as it is.

    How many bytes move differs from rank to rank, so no choice of the way may depend on it. Whoever
    knows how many rows move at most from any rank to any other, the same number on each, gives
    `most_rows`: then few go through shared memory. Else the group's backend carries them always.

    Raises:
        ValueError: there is not one split per rank, they are not all rows, or one is more than
            `most_rows`; rows of `input` and of `output` are not alike, or `output` is not contiguous.
            Nothing is sent then.
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
    if most_rows is not None and max(*input_splits, *output_splits) > most_rows:
        raise ValueError(
            f"all-to-all: most_rows is {most_rows}, but the splits are {input_splits} and "
            f"{output_splits}; give the most that any two ranks of the group exchange"
        )
    if group.size() == 1:
        output.copy_(input)
        return Done() if async_op else None
    work = _start_rows(output, input, group, output_splits, input_splits, most_rows)
    return _finish(work, async_op, "all-to-all")


def _start_rows(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    output_splits: list[int],
    input_splits: list[int],
    most_rows: int | None,
) -> Any:
    splits = (output_splits, input_splits, group, True)
    if needs_staging(input, group):
        staged = torch.empty(output.shape, dtype=output.dtype)
        work = dist.all_to_all_single(staged, input.cpu().contiguous(), *splits)
        return _CopyBack(work, staged, output)
    if mesh := _mesh_of_rows(group, input, most_rows):
        return mesh.all_to_all(output, input.detach(), output_splits, input_splits)
    return dist.all_to_all_single(output, input.contiguous(), *splits)


def _mesh_of_rows(group: dist.ProcessGroup, input: torch.Tensor, most_rows: int | None) -> Any:
    """As `get_mesh`; no rank sends another more than `most_rows` rows."""
    if most_rows is None:
        return local_host.count_over_gloo(group, input)
    num_bytes = most_rows * input.element_size() * math.prod(input.shape[1:])
    return get_mesh(group, input, num_bytes=num_bytes)


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
    return Pending(_start_rows(output, input, group, taken, given, rows), "ring-hop")
