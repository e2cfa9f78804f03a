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

from minimegatron.core.tracing import of_collective, traced
from minimegatron.exports import all_of

# What moves rows between single ranks: experts and rings ask for it.
__getattr__, __dir__ = all_of(__name__, "minimegatron.core.all_to_all")

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


@traced("all-reduce", of_collective)
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


@traced("broadcast", of_collective)
def broadcast(tensor: torch.Tensor, group_src: int, group: dist.ProcessGroup) -> None:
    """Copies `tensor` of rank `group_src` (a rank within `group`) to every rank, in place."""
    if group.size() > 1:
        dist.broadcast(tensor, group=group, group_src=group_src)


@traced("all-gather", of_collective)
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


@traced("reduce-scatter", of_collective)
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
