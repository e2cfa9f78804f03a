"""The functions of `torch.distributed` that drawn cases call, and what must come out of each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tests.backend.cases import Case, combine

Tensors = list[torch.Tensor]

# Torch 2.13 has renamed these.
all_gather_one = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_one = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
lazy_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
lazy_scatter = getattr(functional, "reduce_scatter_single", None)
lazy_scatter = lazy_scatter or functional.reduce_scatter_tensor


class Operation(NamedTuple):
    """How a function is called, what must come out, and whether it reduces.

    `call(case, group, given)` returns the handles and the tensors that are right once all handles
    have been waited for. `expect(case, given, me)` computes them from what all members give.
    """

    call: Callable[[Case, dist.ProcessGroup, Tensors], tuple[list[Any], Tensors]]
    expect: Callable[[Case, list[Tensors], int], Tensors]
    is_reduction: bool = False
    is_same_everywhere: bool = False


def handles(work: Any) -> list[Any]:
    """A list of the one handle; an empty one where the call was not asynchronous."""
    return [] if work is None else [work]


def empty(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Memory of the same type that holds a value which no case gives."""
    return torch.full(shape or tuple(tensor.shape), 99, dtype=torch.int64).to(tensor.dtype)


def rooted(case: Case) -> int:
    return case.members[case.root]


def join(tensors: Tensors) -> torch.Tensor:
    """One tensor for functions that take one: along the first dimension, if there is one."""
    return torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors)


# -- One tensor in, one out --


def call_all_reduce(case, group, given):
    work = dist.all_reduce(given[0], case.reduce_op, group, case.is_async)
    return handles(work), [given[0]]


def expect_reduced(case, given, me):
    return [combine(case, [tensors[0] for tensors in given])]


def call_reduce(case, group, given):
    work = dist.reduce(given[0], rooted(case), case.reduce_op, group, case.is_async)
    return handles(work), [given[0]] if dist.get_rank(group) == case.root else []


def expect_at_root(case, given, me):
    return expect_reduced(case, given, me) if me == case.root else []


def call_broadcast(case, group, given):
    return handles(dist.broadcast(given[0], rooted(case), group, case.is_async)), [given[0]]


def expect_broadcast(case, given, me):
    return [given[case.root][0]]


# -- Many out --


def call_all_gather(case, group, given):
    out = [empty(given[0]) for _ in case.members]
    return handles(dist.all_gather(out, given[0], group, case.is_async)), out


def expect_gathered(case, given, me):
    return [tensors[0] for tensors in given]


def call_all_gather_one(case, group, given):
    out = empty(join([given[0]] * case.size))
    return handles(all_gather_one(out, given[0], group, case.is_async)), [out]


def expect_gathered_one(case, given, me):
    return [join([tensors[0] for tensors in given])]


def call_gather(case, group, given):
    is_root = dist.get_rank(group) == case.root
    out = [empty(given[0]) for _ in case.members] if is_root else None
    work = dist.gather(given[0], out, rooted(case), group, case.is_async)
    return handles(work), out or []


def expect_gathered_at_root(case, given, me):
    return expect_gathered(case, given, me) if me == case.root else []


# -- Many in --


def call_scatter(case, group, given):
    out, is_root = empty(given[0]), dist.get_rank(group) == case.root
    parts = given if is_root else None
    return handles(dist.scatter(out, parts, rooted(case), group, case.is_async)), [out]


def expect_scattered(case, given, me):
    return [given[case.root][me]]


def call_reduce_scatter(case, group, given):
    out = empty(given[0])
    return handles(dist.reduce_scatter(out, given, case.reduce_op, group, case.is_async)), [out]


def expect_reduce_scattered(case, given, me):
    return [combine(case, [tensors[me] for tensors in given])]


def call_reduce_scatter_one(case, group, given):
    whole = join(given)
    out = empty(given[0])
    work = reduce_scatter_one(out, whole, case.reduce_op, group, case.is_async)
    return handles(work), [out]


def call_all_to_all(case, group, given):
    out = [empty(tensor) for tensor in given]
    return handles(dist.all_to_all(out, given, group, case.is_async)), out


def call_all_to_all_uneven(case, group, given):
    me = dist.get_rank(group)
    out = [empty(given[0], case.splits[peer][me], *given[0].shape[1:]) for peer in range(case.size)]
    return handles(dist.all_to_all(out, given, group, case.is_async)), out


def expect_exchanged(case, given, me):
    return [tensors[me] for tensors in given]


def call_all_to_all_single(case, group, given):
    whole = torch.stack(given)
    out = empty(whole)
    return handles(dist.all_to_all_single(out, whole, group=group, async_op=case.is_async)), [out]


def expect_exchanged_whole(case, given, me):
    return [torch.stack(expect_exchanged(case, given, me))]


def call_all_to_all_single_uneven(case, group, given):
    me, whole = dist.get_rank(group), torch.cat(given)
    come = [case.splits[peer][me] for peer in range(case.size)]
    out = empty(whole, sum(come), *whole.shape[1:])
    go = numpy.array(case.splits[me])  # numpy's numbers are taken as well as Python's
    work = dist.all_to_all_single(out, whole, come, go, group, case.is_async)
    return handles(work), [out]


def expect_exchanged_uneven(case, given, me):
    return [torch.cat(expect_exchanged(case, given, me))]


# -- Messages --


def neighbours(case, group):
    me = dist.get_rank(group)
    return case.members[(me + 1) % case.size], case.members[(me - 1) % case.size]


def call_ring(case, group, given):
    """Two messages to the next rank; those with the second tag are asked for first."""
    to, source = neighbours(case, group)
    out = [empty(given[0]), empty(given[1])]
    works = [dist.isend(given[i], to, group, tag=case.tag + i) for i in range(2)]
    works += [dist.irecv(out[i], source, group, tag=case.tag + i) for i in (1, 0)]
    return works, out


def expect_ring(case, given, me):
    return given[(me - 1) % case.size][:2]


def call_send(case, group, given):
    """In turn: each rank waits for the one before it, which sends with `send`."""
    me, (to, source) = dist.get_rank(group), neighbours(case, group)
    out = empty(given[0])
    if me:
        assert dist.recv(out, source, group, tag=case.tag) == source
    dist.send(given[0], to, group, case.tag)
    if not me:
        dist.recv(out, source, group, tag=case.tag)
    return [], [out]


def expect_previous(case, given, me):
    return [given[(me - 1) % case.size][0]]


def call_any_source(case, group, given):
    tag = 100 + case.seed  # another one for each case: a message of the next may come first
    if dist.get_rank(group) != case.root:
        dist.send(given[0], rooted(case), group, tag)
        return [], []
    out = {}
    for _ in range(case.size - 1):
        tensor = empty(given[0])
        out[dist.recv(tensor, None, group, tag)] = tensor
    return [], [out[rank] for rank in sorted(out)]


def expect_any_source(case, given, me):
    if me != case.root:
        return []
    return [given[peer][0] for peer in range(case.size) if peer != me]


def call_batch(case, group, given):
    """With every other rank: one message to it, one from it."""
    me, out, messages = dist.get_rank(group), [], []
    for peer, rank in enumerate(case.members):
        if peer != me:
            out.append(empty(given[peer]))
            messages.append(dist.P2POp(dist.irecv, out[-1], rank, group, case.tag))
            messages.append(dist.P2POp(dist.isend, given[peer], rank, group, case.tag))
    return dist.batch_isend_irecv(messages), out


def expect_batch(case, given, me):
    return [given[peer][me] for peer in range(case.size) if peer != me]


# -- Several at once, and functional ones --


def call_coalesced_all_reduce(case, group, given):
    with dist._coalescing_manager(group=group, async_ops=case.is_async) as manager:
        for tensor in given:
            dist.all_reduce(tensor, case.reduce_op, group)
    return handles(manager if case.is_async else None), given


def expect_all_reduced(case, given, me):
    return [combine(case, list(tensors)) for tensors in zip(*given, strict=True)]


def call_coalesced_gather(case, group, given):
    out = [empty(join([tensor] * case.size)) for tensor in given[:2]]
    with dist._coalescing_manager(group=group, async_ops=case.is_async) as manager:
        for whole, tensor in zip(out, given[:2], strict=True):
            all_gather_one(whole, tensor, group)
    return handles(manager if case.is_async else None), out


def expect_coalesced_gather(case, given, me):
    return [join(list(tensors)) for tensors in zip(*(g[:2] for g in given), strict=True)]


def call_coalesced_scatter(case, group, given):
    whole, out = join(given), [empty(given[0]) for _ in range(2)]
    with dist._coalescing_manager(group=group, async_ops=case.is_async) as manager:
        for part in out:
            reduce_scatter_one(part, whole, case.reduce_op, group)
    return handles(manager if case.is_async else None), out


def expect_coalesced_scatter(case, given, me):
    return expect_reduce_scattered(case, given, me) * 2


def call_functional(case, group, given):
    whole = join(given)
    lazy = [
        functional.all_reduce(given[0], case.op.lower(), group),
        functional.broadcast(given[0], case.root, group),
        lazy_gather(whole, 0, group),
        lazy_scatter(whole, case.op.lower(), 0, group),
        functional.all_to_all_single(whole, None, None, group),
    ]
    return [], [functional.wait_tensor(tensor) for tensor in lazy]


def expect_functional(case, given, me):
    return [
        *expect_reduced(case, given, me),
        *expect_broadcast(case, given, me),
        torch.cat([join(tensors) for tensors in given]),
        join(expect_reduce_scattered(case, given, me)),
        join(expect_exchanged(case, given, me)),
    ]


OPERATIONS = {
    "all_reduce": Operation(call_all_reduce, expect_reduced, True, True),
    "reduce": Operation(call_reduce, expect_at_root, True),
    "broadcast": Operation(call_broadcast, expect_broadcast, False, True),
    "all_gather": Operation(call_all_gather, expect_gathered, False, True),
    "all_gather one": Operation(call_all_gather_one, expect_gathered_one, False, True),
    "gather": Operation(call_gather, expect_gathered_at_root),
    "scatter": Operation(call_scatter, expect_scattered),
    "reduce_scatter": Operation(call_reduce_scatter, expect_reduce_scattered, True),
    "reduce_scatter one": Operation(call_reduce_scatter_one, expect_reduce_scattered, True),
    "all_to_all": Operation(call_all_to_all, expect_exchanged),
    "all_to_all uneven": Operation(call_all_to_all_uneven, expect_exchanged),
    "all_to_all_single": Operation(call_all_to_all_single, expect_exchanged_whole),
    "all_to_all_single uneven": Operation(call_all_to_all_single_uneven, expect_exchanged_uneven),
    "ring": Operation(call_ring, expect_ring),
    "send": Operation(call_send, expect_previous),
    "any source": Operation(call_any_source, expect_any_source),
    "batch": Operation(call_batch, expect_batch),
    "coalesced all_reduce": Operation(call_coalesced_all_reduce, expect_all_reduced, True, True),
    "coalesced all_gather": Operation(call_coalesced_gather, expect_coalesced_gather, False, True),
    "coalesced reduce_scatter": Operation(call_coalesced_scatter, expect_coalesced_scatter, True),
    "functional": Operation(call_functional, expect_functional, True),
}


def gloo_dies(case: Case) -> bool:
    """Whether gloo kills the process, or waits for ever, where it should refuse."""
    if case.name in ("reduce_scatter one", "coalesced reduce_scatter", "functional"):
        return not case.shape
    if case.name == "all_to_all uneven":
        return True  # it looks at the sizes of its own rank only
    return case.name == "any source" and 0 in case.shape


MESSAGES = ("ring", "send", "any source", "batch")
