"""A process group over shared memory, with gloo inside: what `torch.distributed` calls.

The names and arguments of the methods are torch's (`torch_names`). Each method checks its arguments,
and then picks the way, by what all ranks of the group know alike:

* shared memory: collectives up to `MAX_BYTES` in groups up to `MAX_RANKS`, and all messages;
* gloo inside: everything else, or everything where the ranks cannot share memory.

Megatron has no counterpart.
"""

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.backend.calls import (
    CollectiveCall,
    check_all_to_all,
    check_list,
    check_one,
    check_root,
    check_shares,
    name_of,
)
from minimegatron.backend.gloo_inside import Begun, GlooInside, make_gloo, seconds_of
from minimegatron.backend.mesh import Mesh, check_op, connect
from minimegatron.backend.step_methods import StepMethods
from minimegatron.backend.torch_names import with_torch_names
from minimegatron.backend.works import SharedMemoryWork, Works

MAX_BYTES = 1 << 20
"""Collectives beyond go over gloo: it has threads of its own, and a computation goes on meanwhile."""
MAX_RANKS = 8
"""Collectives of larger groups go over gloo: there each rank would send to too many others."""
MAX_CONNECTED = 32
"""Larger groups share no memory at all: each rank has a socket and a file for each other."""

_MOST_WAYS = 1024
_NOTHING = torch.empty(0, dtype=torch.uint8)
Tensors = list[torch.Tensor]


@with_torch_names
class SharedMemoryGroup(StepMethods, dist.ProcessGroup):
    """The ranks of one host, or of several; made by `dist.init_process_group("cpu:shm")`.

    Collective: all ranks of the group make it, and wait for each other.

    Args:
        store: the group's own.
        rank: of this process, within the group.
        size: of the group.
        timeout: how long a collective, a message, or another rank's coming may take.

    Raises ConnectionError, naming the rank, if one does not come in time.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        dist.ProcessGroup.__init__(self, rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._gloo = make_gloo(store, rank, size, timeout)
        self._seconds = seconds_of(self._gloo)
        # What torch asks a group's C++ side for, gloo answers.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.mesh = self._make_mesh(timeout)
        tells = self.mesh if size <= MAX_RANKS else None
        inside = (self._gloo, tells, rank, size, Begun())
        self._inside = GlooInside(*inside, hears_first=False)
        self._inside_at_once = GlooInside(*inside, hears_first=True)
        self._num_splits, self._is_closed = 0, False
        self._ways: dict[tuple, tuple[Mesh | None, int]] = {}

    def _make_mesh(self, timeout: timedelta) -> Mesh | None:
        if not 1 < self._size <= MAX_CONNECTED:
            return None
        store = dist.PrefixStore("shared memory", self._store)
        connections = connect(store, self._rank, self._size, timeout)
        if connections is None:
            return None
        for connection in connections.values():
            connection.ask_timeout = self._seconds
        return Mesh(self._rank, connections)

    # -- What a group says of itself --

    def name(self) -> str:
        """The backend's."""
        return "shm"

    getBackendName = name

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedMemoryGroup":
        """Itself: what is copied shares its groups."""
        return self

    def get_group_store(self) -> dist.Store:
        """The group's own."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """From now on, no wait takes longer."""
        self._gloo.options._timeout = timeout
        self._gloo._set_default_timeout(timeout)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "SharedMemoryGroup | None":
        """A group of these ranks of this one, for each of them; None for the others.

        Every rank of this group calls it, each with the ranks of its own part.
        """
        self._num_splits += 1
        if self._rank not in ranks:
            return None
        store = dist.PrefixStore(f"split {self._num_splits} {list(ranks)}", self._store)
        timeout = timeout or timedelta(seconds=self._seconds())
        part = SharedMemoryGroup(store, list(ranks).index(self._rank), len(ranks), timeout)
        part._set_group_name(group_name or f"{self.group_name}:split:{self._num_splits}")
        part._set_group_desc(group_desc or "split")
        return part

    def shutdown(self) -> None:
        """Ends the group on this rank; who waits for this rank is told."""
        if not self._is_closed:
            self._is_closed = True
            self._ways.clear()
            for connection in self.mesh.to.values() if self.mesh else ():
                connection.close()
            for inside in (self._inside, self._inside_at_once):
                inside.keep_if_busy()
            self._gloo.shutdown()

    abort = shutdown

    # -- Which way --

    def _way(
        self,
        kind: str,
        tensor: torch.Tensor,
        op: str = "SUM",
        root: int | None = None,
        num_bytes: int | None = None,
    ) -> tuple[Mesh | None, int]:
        """The mesh for a collective, or None for gloo; and the call's number, for all its messages.

        `num_bytes` is what moves on each rank: the tensor's unless given. Raises ValueError where `op`
        has no meaning for the dtype.
        """
        key = (kind, tensor.nbytes if num_bytes is None else num_bytes, tensor.dtype, op, root)
        found = self._ways.get(key)
        return self._find_way(*key) if found is None else found

    def _find_way(
        self, kind: str, num_bytes: int, dtype: torch.dtype, op: str, root: int | None
    ) -> tuple[Mesh | None, int]:
        self._check_open()
        check_op(op, dtype)
        if root is not None:
            check_root(root, self._size)
        # Of a reduce-scatter, a tensor is one rank's share.
        moved = num_bytes * self._size if kind == "reduce_scatter" else num_bytes
        is_small = moved <= MAX_BYTES and self._size <= MAX_RANKS
        number = CollectiveCall(kind, num_bytes, dtype, op, root).number()
        if len(self._ways) >= _MOST_WAYS:
            self._ways.clear()
        found = self._ways[kind, num_bytes, dtype, op, root] = (
            self.mesh if is_small else None,
            number,
        )
        return found

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this group has been destroyed; make a new one")

    def _gloo_for(self, opts: Any) -> GlooInside:
        """Gloo inside, for a caller that waits at once or later."""
        is_async = opts is None or getattr(opts, "asyncOp", True)
        return self._inside if is_async else self._inside_at_once

    def _alone(self, outputs: Tensors, inputs: Tensors) -> SharedMemoryWork:
        """In a group of one, what goes in comes out."""
        for output, input in zip(outputs, inputs, strict=True):
            output.detach().copy_(input.detach().view_as(output))
        return SharedMemoryWork(outputs)

    def _each(self, start: Callable[..., dist.Work], *columns: Sequence, opts: Any) -> Works:
        """One work for several calls."""
        works = [start(*row, opts) for row in zip(*columns, strict=True)]
        return Works(works, [tensor for work in works for tensor in work.result()])

    # -- Reductions --

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduces the tensor in place, the same bits on every rank."""
        tensor, op = check_one(tensors), _op_of(opts)
        mesh, call = self._way("all_reduce", tensor, op)
        if self._size == 1:
            return SharedMemoryWork([tensor])
        if mesh:
            return mesh.all_reduce(tensor, op, call)
        return self._gloo_for(opts).all_reduce(tensor, op)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduces each of the tensors in place."""
        return self._each(self.allreduce, [[tensor] for tensor in tensors], opts=opts)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Reduces the tensor in place on the root; elsewhere it stays as it is."""
        tensor, op, root = check_one(tensors), _op_of(opts), opts.rootRank
        mesh, call = self._way("reduce", tensor, op, root)
        if self._size == 1:
            return SharedMemoryWork(tensors)
        if mesh:
            return mesh.reduce(tensor, op, root, call)
        return self._gloo_for(opts).reduce(tensor, op, root)

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> dist.Work:
        """Reduces the i-th input tensor of all ranks into rank i's output."""
        output, shares, op = check_one(outputs), check_one(inputs), _op_of(opts)
        check_shares(output, shares, self._size)
        mesh, call = self._way("reduce_scatter", output, op)
        if self._size == 1:
            return self._alone([output], shares)
        if mesh:
            return mesh.reduce_scatter(output, shares, op, call)
        return self._gloo_for(opts).reduce_scatter(output, shares, op)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """The same for one input, cut along dimension 0 or into rows of the output's size."""
        shares = _cut(input, output, self._size, "input")
        return self.reduce_scatter([output], [shares], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """The same for each pair of an output and an input."""
        return self._each(self.reduce_scatter_single, outputs, inputs, opts=opts)

    # -- Copies from one rank --

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Copies the root's tensor to all ranks, in place."""
        tensor, root = check_one(tensors), opts.rootRank
        mesh, call = self._way("broadcast", tensor, root=root)
        if self._size == 1:
            return SharedMemoryWork(tensors)
        if mesh:
            return mesh.broadcast(tensor, root, call)
        return self._gloo_for(opts).broadcast(tensor, root)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        """Copies the root's i-th input tensor to rank i's output."""
        output, root = check_one(outputs), check_root(opts.rootRank, self._size)
        shares = check_list(inputs, output, self._size, root == self._rank, "input")
        if self._size == 1:
            return self._alone([output], shares)
        mesh, call = self._way("scatter", output, root=root)
        if mesh:
            return mesh.scatter(output, shares, root, call)
        return self._gloo_for(opts).scatter(output, shares, root)

    # -- Copies to one rank, or to all --

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        """Copies rank i's input to the root's i-th output tensor."""
        input, root = check_one(inputs), check_root(opts.rootRank, self._size)
        places = check_list(outputs, input, self._size, root == self._rank, "output")
        if self._size == 1:
            return self._alone(places, [input])
        mesh, call = self._way("gather", input, root=root)
        if mesh:
            return mesh.gather(places, input, root, call)
        return self._gloo_for(opts).gather(places, input, root)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> dist.Work:
        """Copies all inputs to one output on the root, in the order of the ranks."""
        root, places, finish = check_root(opts.rootRank, self._size), [], None
        if root == self._rank:
            whole, finish = _whole(output)
            places = _cut(whole, input, self._size, "output")
        work = self.gather([places] if places else [], [input], opts)
        if finish is None:
            return work.giving([output])
        return Works([work], [output], finish)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Copies rank i's input to the i-th output tensor of every rank."""
        input = check_one(inputs)
        places = check_list(outputs, input, self._size, True, "output")
        return self._all_gather(places, input, opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """The same for each input; `outputs[i][j]` becomes rank i's input number j."""
        places = [[list(column)] for column in zip(*outputs, strict=True)]
        return self._each(self.allgather, places, [[one] for one in inputs], opts=opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Copies all inputs to one output, in the order of the ranks."""
        whole, finish = _whole(output)
        places = _cut(whole, input, self._size, "output")
        return self._all_gather(places, input, opts, finish, [output], whole)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """The same for each pair of an output and an input."""
        return self._each(self.all_gather_single, outputs, inputs, opts=opts)

    def _all_gather(
        self,
        places: Tensors,
        input: torch.Tensor,
        opts: Any,
        finish: Callable[[], None] | None = None,
        outputs: Tensors | None = None,
        whole: torch.Tensor | None = None,
    ) -> dist.Work:
        mesh, call = self._way("all_gather", input)
        if self._size == 1:
            work = self._alone(places, [input])
            if finish:
                finish()
        elif mesh:
            work = mesh.all_gather(places, input, call, finish)
        else:
            work = self._gloo_for(opts).all_gather(places, input, finish, whole)
        return work.giving(outputs or places)

    # -- From all ranks to all ranks --

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Copies rank i's input tensor number j to rank j's output tensor number i."""
        check_all_to_all(outputs, inputs, self._rank, self._size)
        return self._all_to_all(outputs, inputs, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """The same for rows of one tensor; without splits, each rank gets as many."""
        whole, finish = _whole(output)
        places = _split(whole, output_splits, self._size, "output")
        parts = _split(input, input_splits, self._size, "input")
        check_all_to_all(places, parts, self._rank, self._size)
        is_even = not len(output_splits) and not len(input_splits)
        num_bytes = input.nbytes if is_even else 0
        return self._all_to_all(places, parts, [output], opts, num_bytes, finish)

    def _all_to_all(
        self,
        places: Tensors,
        parts: Tensors,
        outputs: Tensors,
        opts: Any,
        num_bytes: int = 0,
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        # Uneven parts: no rank knows how many bytes the others move, so shared memory takes them all.
        mesh, call = self._way("all_to_all", parts[0], num_bytes=num_bytes)
        if self._size == 1:
            work = self._alone(places, parts)
            if finish:
                finish()
        elif mesh:
            work = mesh.all_to_all(places, parts, call, finish)
        else:
            work = self._gloo_for(opts).all_to_all(places, parts, num_bytes, finish)
        return work.giving(outputs)

    # -- Messages --

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        """Sends the tensor; it may be changed at once."""
        tensor, mesh = check_one(tensors), self.mesh
        if mesh is not None and dst in mesh.to and not self._is_closed:
            return mesh.send(tensor, dst, tag)
        check_root(dst, self._size, self._rank)
        self._check_open()
        return self._inside.send(tensor, dst, self.tag_in_step(tag))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        """Receives into the tensor."""
        tensor, mesh = check_one(tensors), self.mesh
        if mesh is not None and src in mesh.to and not self._is_closed:
            return mesh.receive(tensor, src, tag)
        check_root(src, self._size, self._rank)
        self._check_open()
        return self._inside.receive(tensor, src, self.tag_in_step(tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receives into the tensor what any rank sends; the work's `_source_rank` says which."""
        tensor = check_one(tensors)
        self._check_open()
        if self.mesh is None:
            return self._inside.receive(tensor, None, self.tag_in_step(tag))
        return self.mesh.receive_from_any(tensor, tag, self._seconds())

    def barrier(self, opts: Any = None) -> dist.Work:
        """Is done once all ranks have called it."""
        if self._size == 1:
            return SharedMemoryWork([])
        mesh, call = self._way("barrier", _NOTHING)
        if mesh:
            return mesh.barrier(call)
        return self._gloo_for(opts).barrier()

    # -- For `dist._coalescing_manager` with a device: what is called in it starts at once --

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing is held back."""

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return Works([], [])


def _op_of(opts: Any) -> str:
    return "SUM" if opts is None else name_of(opts.reduceOp)


def _whole(output: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """A contiguous tensor to fill, and what brings it to `output`, if it is another one."""
    if output.is_contiguous():
        return output, None
    whole = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    return whole, partial(output.detach().copy_, whole)


def _cut(whole: torch.Tensor, part: torch.Tensor, size: int, name: str) -> Tensors:
    """`whole` in as many parts as there are ranks, each as large as `part`."""
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"the {name} has {whole.numel()} elements of {whole.dtype}; {size} ranks with "
            f"{part.numel()} elements of {part.dtype} each make {size * part.numel()}"
        )
    return list(whole.detach().contiguous().view(size, *part.shape))


def _split(tensor: torch.Tensor, given: Sequence[int], size: int, name: str) -> Tensors:
    """The rows of `tensor`, by rank. Raises ValueError if they cannot be shared so."""
    rows = tensor.size(0) if tensor.dim() else 0
    splits = [int(one) for one in given]  # numpy's numbers too, as torch takes them
    if not splits:
        if rows % size:
            raise ValueError(
                f"the {name} has {rows} rows, which {size} ranks cannot share equally; give splits"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"{name} splits {splits} are {len(splits)} numbers with sum {sum(splits)}, but there are "
            f"{size} ranks and {rows} rows; give each rank its rows"
        )
    return list(tensor.detach().split(splits))


# -- torch knows it, once `minimegatron.backend` is imported --

NAME = "shm"
"""For `init_process_group("cpu:shm")`."""


def _make(options: Any, _: Any) -> SharedMemoryGroup | dist.ProcessGroupGloo:
    given = (options.store, options.group_rank, options.group_size, options.timeout)
    if reason := why_not():
        warnings.warn(f"{reason}; gloo carries everything in this group", stacklevel=2)
        return dist.ProcessGroupGloo(*given)
    return SharedMemoryGroup(*given)


def why_not() -> str | None:
    """Why this torch cannot have a group that is written in Python; None if it can."""
    needs = [(dist.ProcessGroup, name) for name in ("_register_backend", "_set_default_backend")]
    names = ("create_default_device", "create_device", "_Options")
    needs += [(dist.ProcessGroupGloo, name) for name in names]
    missing = [f"{cls.__name__}.{name}" for cls, name in needs if not hasattr(cls, name)]
    return f"torch {torch.__version__} has no {', '.join(missing)}" if missing else None


def in_place_of(name: str) -> str:
    """The backend for groups beside one of this name: shared memory in the place of gloo.

    >>> in_place_of("gloo"), in_place_of("nccl")
    ('shm', 'nccl')
    """
    return NAME if name == "gloo" and is_available() else name


def is_available() -> bool:
    """Whether this torch knows the backend by its name."""
    return hasattr(dist.Backend, NAME.upper())


if not is_available():
    dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
