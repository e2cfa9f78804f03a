"""Gloo inside a group: for what is large, and for ranks that cannot share memory.

With each collective of gloo's, every rank tells the others what it has called, and how many collectives
it has begun over gloo. So ranks that have called different things are told, as over shared memory; and
so are ranks that a failed call or step has left apart: gloo pairs the n-th collective of one rank with
the n-th of another.

Megatron has no counterpart.
"""

import atexit
import ctypes
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from minimegatron.backend.calls import CollectiveCall
from minimegatron.backend.gloo_works import GlooMessage, GlooWork, hear
from minimegatron.backend.incoming import WireError
from minimegatron.backend.mesh import Mesh
from minimegatron.backend.waiting import reader

Tensors = Sequence[torch.Tensor]
Finish = Callable[[], None] | None
_NUM_THREADS = 2
"""For each interface, as torch's own group has."""
LAST_SECONDS = 5.0
"""How long the end of the process waits for what gloo does."""
SECONDS_TO_LEAVE = 0.25
"""Time for a thread to return from its last call of Python, on a machine that is busy."""


def make_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """A gloo group that connects when it is first used: many groups never use theirs.

    As torch's own, it uses the interfaces that `GLOO_SOCKET_IFNAME` names, or else the one that this
    machine's name leads to.
    """
    options = dist.ProcessGroupGloo._Options()
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        make = partial(dist.ProcessGroupGloo.create_device, lazy_init=True)
        options._devices = [make(interface=name) for name in names.split(",")]
    else:
        options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    options._threads, options._timeout = _NUM_THREADS * len(options._devices), timeout
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)


def seconds_of(gloo: dist.ProcessGroupGloo) -> Callable[[], float]:
    """Asks for the time-out, which torch may change.

    It knows gloo's options and not gloo: who has it may be a handle that nobody but gloo's own thread
    has, and gloo must not end in a thread of its own.
    """
    options = gloo.options
    return lambda: options._timeout.total_seconds()


class Begun:
    """How many collectives a group has begun over gloo, on this rank."""

    count = 0


class GlooInside:
    """What a group does over gloo. Tensors may be on any device, and have any layout.

    Args:
        gloo: torch's own backend.
        mesh: through which ranks hear what the others call; None where they cannot.
        rank: of this process, within the group.
        size: of the group.
        begun: how many collectives were begun over gloo.
        hears_first: whether the caller waits at once. Then gloo is started after all ranks have been
            heard: it ends a process in which more bytes come than were expected.
    """

    def __init__(
        self,
        gloo: dist.ProcessGroupGloo,
        mesh: Mesh | None,
        rank: int,
        size: int,
        begun: "Begun",
        hears_first: bool,
    ):
        self._gloo, self._mesh, self._rank, self._size = gloo, mesh, rank, size
        self._begun, self._hears_first = begun, hears_first
        self._seconds = seconds_of(gloo)
        self._works: weakref.WeakSet[GlooWork] = weakref.WeakSet()
        _living.add(self)

    def is_busy(self) -> bool:
        """Whether something is under way."""
        return any(not work.gloo_is_done for work in list(self._works))

    def keep_if_busy(self) -> None:
        """Lets gloo live for ever if something of it is under way.

        What ends gloo waits for gloo's threads, and they wait for the thread that ends it.
        """
        if self.is_busy():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    # -- Reductions --

    def all_reduce(self, tensor: torch.Tensor, op: str) -> GlooWork:
        """Reduces `tensor` in place, on all ranks."""
        options = c10d.AllreduceOptions()
        options.reduceOp = _op(op)
        host, back = _staged(tensor)
        start = partial(self._gloo.allreduce, [host], options)
        finish = self._finish_reduction(host, op, back)
        return self._start(_call("all_reduce", tensor, op), start, [tensor], finish)

    def reduce(self, tensor: torch.Tensor, op: str, root: int) -> GlooWork:
        """Reduces `tensor` in place, on rank `root`."""
        options = c10d.ReduceOptions()
        options.reduceOp, options.rootRank = _op(op), root
        # Gloo leaves a part of the sum in what the other ranks give.
        is_root = self._rank == root
        host, back = _staged(tensor if is_root else tensor.clone())
        finish = self._finish_reduction(host, op, back) if is_root else None
        start = partial(self._gloo.reduce, [host], options)
        return self._start(_call("reduce", tensor, op, root), start, [tensor], finish)

    def reduce_scatter(self, output: torch.Tensor, shares: Tensors, op: str) -> GlooWork:
        """Reduces `shares[i]` of all ranks into `output` of rank i."""
        # As gloo does it itself; its own handle of a reduce-scatter has no future.
        options = c10d.AllreduceOptions()
        options.reduceOp = _op(op)
        whole = torch.stack([share.detach().cpu() for share in shares])
        part = whole[self._rank]
        finish = self._finish_reduction(part, op, partial(output.detach().copy_, part))
        start = partial(self._gloo.allreduce, [whole], options)
        return self._start(_call("reduce_scatter", output, op), start, [output], finish)

    def _finish_reduction(self, host: torch.Tensor, op: str, back: Finish) -> Finish:
        if op != "AVG":
            return back

        def divide() -> None:
            host.div_(self._size)
            if back is not None:
                back()

        return divide

    # -- Copies: of bytes, since gloo does not know every dtype --

    def broadcast(self, tensor: torch.Tensor, root: int) -> GlooWork:
        """Copies `tensor` of rank `root` to all ranks, in place."""
        options = c10d.BroadcastOptions()
        options.rootRank = root
        host, back = _staged(tensor)
        start = partial(self._gloo.broadcast, [_raw(host)], options)
        finish = None if self._rank == root else back
        return self._start(_call("broadcast", tensor, root=root), start, [tensor], finish)

    def all_gather(
        self, outputs: Tensors, input: torch.Tensor, finish: Finish, whole: torch.Tensor | None
    ) -> GlooWork:
        """Copies `input` of rank i to `outputs[i]`, on all ranks: parts of `whole`, if there is one."""
        if whole is not None and whole.is_cpu:
            given = (_raw(whole.detach()), _raw(_staged(input)[0]), c10d.AllgatherOptions())
            start = partial(self._gloo._allgather_base, *given)
            return self._start(_call("all_gather", input), start, outputs, finish)
        hosts, back = _staged_list(outputs)
        start = partial(self._gloo.allgather, [_raws(hosts)], [_raw(_staged(input)[0])])
        return self._start(_call("all_gather", input), start, outputs, _both(back, finish))

    def gather(self, outputs: Tensors, input: torch.Tensor, root: int) -> GlooWork:
        """Copies `input` of rank i to `outputs[i]` of rank `root`."""
        options = c10d.GatherOptions()
        options.rootRank = root
        hosts, back = _staged_list(outputs)
        places = [_raws(hosts)] if hosts else []
        start = partial(self._gloo.gather, places, [_raw(_staged(input)[0])], options)
        return self._start(_call("gather", input, root=root), start, outputs, back)

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int) -> GlooWork:
        """Copies `inputs[i]` of rank `root` to `output` of rank i."""
        options = c10d.ScatterOptions()
        options.rootRank = root
        host, back = _staged(output)
        parts = [_raws([_staged(one)[0] for one in inputs])] if inputs else []
        start = partial(self._gloo.scatter, [_raw(host)], parts, options)
        return self._start(_call("scatter", output, root=root), start, [output], back)

    def all_to_all(
        self, outputs: Tensors, inputs: Tensors, num_bytes: int, finish: Finish
    ) -> GlooWork:
        """Copies `inputs[j]` of rank i to `outputs[i]` of rank j."""
        given = torch.cat([_raw(_staged(one)[0]) for one in inputs])
        sizes = [one.numel() * one.element_size() for one in outputs]
        taken = torch.empty(sum(sizes), dtype=torch.uint8)

        def share_out() -> None:
            for output, part in zip(outputs, taken.split(sizes), strict=True):
                # A copy: the part may begin where the dtype's numbers may not.
                output.detach().copy_(part.clone().view(output.dtype).view(output.shape))

        options = c10d.AllToAllOptions()
        splits = [one.numel() * one.element_size() for one in inputs]
        start = partial(self._gloo.alltoall_base, taken, given, sizes, splits, options)
        call = CollectiveCall("all_to_all", num_bytes, inputs[0].dtype)
        return self._start(call, start, outputs, _both(share_out, finish))

    def barrier(self) -> GlooWork:
        """Is done once all ranks have called it."""
        return self._start(
            CollectiveCall("barrier"), partial(self._gloo.barrier, c10d.BarrierOptions()), []
        )

    # -- Messages --

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> GlooMessage:
        """Sends `tensor` to one rank."""
        work = self._gloo.send([_raw(_staged(tensor)[0])], peer, tag)
        return GlooMessage(tensor, work, None, self._seconds)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> GlooMessage:
        """Receives from one rank; from any, where `peer` is None."""
        host, back = _staged(tensor)
        if peer is None:
            work = self._gloo.recv_anysource([_raw(host)], tag)
        else:
            work = self._gloo.recv([_raw(host)], peer, tag)
        return GlooMessage(tensor, work, back, self._seconds)

    # -- All of them --

    def _start(
        self,
        call: CollectiveCall,
        start: Callable[..., Any],
        outputs: Tensors,
        finish: Finish = None,
    ) -> GlooWork:
        """Tells all ranks what is called, and starts it; its handle hears what the others call."""
        num_begun, heard = self._begun.count + 1, []
        if self._mesh is not None:
            number = call._replace(is_over_gloo=True).number()
            heard = self._mesh.compare(num_begun, number)
            reader.read_what_came()
        compare = partial(_compare, heard, num_begun)
        if self._hears_first or any(arrival.is_wrong() for arrival in heard):
            hear(heard, self._mesh, time.monotonic() + self._seconds())
            compare()
        self._begun.count = num_begun  # not where a wait above has failed: gloo has not begun it
        work = GlooWork(outputs, heard, start(), finish, compare, self._seconds, self._mesh)
        self._works.add(work)
        return work


def _compare(heard: list, num_begun: int) -> None:
    for arrival in heard:
        if (count := int(arrival.tensor)) != num_begun:
            raise WireError(
                f"rank {arrival.peer} of the group has begun {count} collectives over gloo, and this "
                f"rank {num_begun}: a call or step that failed has left them apart, and gloo would "
                "pair the wrong ones; make the group anew"
            )


def _op(name: str) -> dist.ReduceOp:
    return getattr(dist.ReduceOp, "SUM" if name == "AVG" else name)


def _call(
    kind: str, tensor: torch.Tensor, op: str = "SUM", root: int | None = None
) -> CollectiveCall:
    return CollectiveCall(kind, tensor.numel() * tensor.element_size(), tensor.dtype, op, root)


def _staged(tensor: torch.Tensor) -> tuple[torch.Tensor, Finish]:
    """The tensor as contiguous memory of the host, and what brings it back if that is a copy."""
    tensor = tensor.detach()
    if tensor.is_cpu and tensor.is_contiguous():
        return tensor, None
    host = tensor.cpu().contiguous()
    return host, partial(tensor.copy_, host)


def _staged_list(tensors: Tensors) -> tuple[list[torch.Tensor], Finish]:
    staged = [_staged(tensor) for tensor in tensors]
    backs = [back for _, back in staged if back is not None]

    def bring_back() -> None:
        for back in backs:
            back()

    return [host for host, _ in staged], bring_back if backs else None


def _both(first: Finish, second: Finish) -> Finish:
    if first is None or second is None:
        return first or second

    def one_after_the_other() -> None:
        first()
        second()

    return one_after_the_other


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, whatever the stride of a dimension of one number."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _raws(tensors: Tensors) -> list[torch.Tensor]:
    return [_raw(tensor) for tensor in tensors]


_living: weakref.WeakSet[GlooInside] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    # What has timed out here is about to do so in gloo, whose thread then calls Python. While Python
    # ends, that would end the process with an error.
    deadline = time.monotonic() + LAST_SECONDS
    reader.wait(lambda: not any(inside.is_busy() for inside in list(_living)), deadline)
    # Gloo's thread says so while it is still in Python; nothing says when it has left.
    time.sleep(max(0.0, GlooWork.last_call + SECONDS_TO_LEAVE - time.monotonic()))
    for inside in list(_living):
        inside.keep_if_busy()
