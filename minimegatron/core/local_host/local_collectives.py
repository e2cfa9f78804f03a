"""Collectives between ranks on one host, through shared memory instead of gloo.

Megatron has no counterpart.

Every rank sends its part to each of the others, and combines what it gets in the order of the
ranks, so that all ranks get the same bits. That is (t - 1) n bytes sent per rank, where a ring sends
2 (t - 1) n / t: equal for t = 2, twice as much for t = 4. What counts for a small tensor is that
each rank is woken once, where gloo's threads wake each other several times.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from minimegatron.backend.channels import IN_PLACE, STEPS, Connection, PendingReceive, Sent
from minimegatron.backend.connecting import connect, get_timeout
from minimegatron.backend.epochs import is_in_step, next_part, next_step
from minimegatron.backend.incoming import FIRST_LANE_OF_NO_STEP

MAX_BYTES = 1 << 20
"""Beyond, gloo: it works in threads of its own, behind a computation that goes on."""

MAX_RANKS = 8

MAX_BROADCASTS_AHEAD = 4
"""How many broadcasts a source may begin before the others take the first of them. In all other
collectives a rank takes a message from every peer that it sends one to, and cannot run ahead."""

_COMBINE: dict[dist.ReduceOp, Callable] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.PRODUCT: torch.mul,
}
_meshes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_num_lanes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_epochs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""Of every group that has begun a step, also without a mesh: it may get one later."""


def get_mesh(
    group: dist.ProcessGroup,
    tensor: torch.Tensor,
    lane: int = STEPS,
    num_bytes: int | None = None,
) -> "LocalMesh | None":
    """What carries `tensor` over `group` in gloo's place; None for gloo, or whatever it has.

    The answer must be the same on every rank, so it depends on what all know: the group, and the
    size of a tensor that is as large on each, or else `num_bytes`. The first call for a group is
    collective.
    """
    if not tensor.is_cpu:
        return None
    if num_bytes is None:
        num_bytes = tensor.numel() * tensor.element_size()
    is_small = 0 < num_bytes <= MAX_BYTES
    mesh = _mesh_of(group) if is_small else _meshes.get(group)
    if mesh is None:
        return None
    if not mesh.is_in_step:  # `begin_step` has asked for that of the whole step
        mesh.set_timeout(get_timeout(group))
    if not is_small and lane == STEPS:
        mesh.count_over_gloo()
    return mesh if is_small else None


def count_over_gloo(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Before a collective that gloo carries whatever its size; see `LocalMesh.count_over_gloo`."""
    mesh = _meshes.get(group) if tensor.is_cpu else None
    if mesh is not None:
        mesh.count_over_gloo()


def new_lane(group: dist.ProcessGroup) -> int:
    """A lane over `group` for collectives that belong to no step; see `channels`.

    Every rank of the group must ask for its lanes in one order. A stand-in for a group has none.
    """
    if not isinstance(group, dist.ProcessGroup):
        return STEPS
    _num_lanes[group] = _num_lanes.get(group, 0) + 1
    return FIRST_LANE_OF_NO_STEP + _num_lanes[group] - 1


def _mesh_of(group: dist.ProcessGroup) -> "LocalMesh | None":
    if group not in _meshes:
        _meshes[group] = _make_mesh(group)
    return _meshes[group]


def begin_step(
    groups: Iterable[dist.ProcessGroup],
    others: Iterable[dist.ProcessGroup] = (),
    forward_only: bool = False,
) -> None:
    """All ranks of `groups` begin a step: what a failed one left behind is not taken for it.

    Every rank must give its groups in one order, because the first call for a group is collective.
    `others` are groups that a step may use too; of them nobody is waited for. In a forward-only step
    their ranks may be those of several copies of the model.
    """
    for group in groups:
        _mesh_of(group)
        _begin(group, next_step(_epochs.get(group, 0)))
    count = next_part if forward_only else next_step
    for group in others:
        _begin(group, count(_epochs.get(group, 0)))


def _begin(group: dist.ProcessGroup, epoch: int) -> None:
    _epochs[group] = epoch
    if (mesh := _meshes.get(group)) is not None:
        mesh.begin_step(get_timeout(group), epoch)


def end_step(groups: Iterable[dist.ProcessGroup]) -> None:
    """The step has ended on this rank."""
    for group, mesh in _in_step(groups):
        _epochs[group] += 1
        if mesh is not None:
            mesh.end_step()


def abandon(groups: Iterable[dist.ProcessGroup], reason: str) -> None:
    """Tells the other ranks of these groups that this rank does not end its step. Never waits."""
    for group, mesh in _in_step(groups):
        _epochs[group] += 1
        if mesh is not None:
            mesh.abandon(reason)


def _in_step(
    groups: Iterable[dist.ProcessGroup],
) -> "Iterator[tuple[dist.ProcessGroup, LocalMesh | None]]":
    """Those of the groups that have begun a step, each with its mesh, if it has one by now."""
    for group in groups:
        if is_in_step(_epochs.get(group, 0)):
            yield group, _meshes.get(group)


def _make_mesh(group: dist.ProcessGroup) -> "LocalMesh | None":
    rank, size = group.rank(), group.size()
    if not 1 < size <= MAX_RANKS or dist.get_backend(group) != "gloo":
        return None
    connections = connect(group, list(range(rank)), list(range(rank + 1, size)))
    if connections is None:
        return None
    # A group's first collective may come in the middle of a step.
    return LocalMesh(rank, connections[0] | connections[1], _epochs.get(group, 0))


class LocalMesh:
    """This rank's connections to every other rank of a group."""

    def __init__(self, rank: int, connections: dict[int, Connection], epoch: int):
        self._rank, self._peers, self._to = rank, sorted(connections), connections
        for connection in connections.values():
            connection.epoch = epoch
        self._broadcasts: deque[list[Sent]] = deque()
        # Of this group's collectives, how many gloo has carried since the mesh is there; whether a
        # step has failed here since the ranks have compared that number.
        self._num_over_gloo, self._has_failed = 0, False

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun here that has not ended or failed."""
        return is_in_step(self._to[self._peers[0]].epoch)

    def set_timeout(self, seconds: float) -> None:
        """From now on, no collective waits longer."""
        for connection in self._to.values():
            connection.set_timeout(seconds)

    def begin_step(self, timeout: float, epoch: int) -> None:
        """See `local_collectives.begin_step`. No collective waits longer than `timeout` seconds."""
        self.set_timeout(timeout)
        for connection in self._to.values():
            connection.begin_step(epoch)
            connection.tell_count(self._num_over_gloo)

    def end_step(self) -> None:
        """See `local_collectives.end_step`."""
        for connection in self._to.values():
            connection.end_step()

    def abandon(self, reason: str) -> None:
        """See `local_collectives.abandon`."""
        self._broadcasts.clear()
        self._has_failed = True
        for connection in self._to.values():
            connection.abandon(reason)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp) -> "Exchange":
        """See `collectives.all_reduce`."""
        for peer in self._peers:
            self._to[peer].send(tensor)
        return Exchange(self._parts(tensor), functools.partial(_combine, tensor, op))

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, lane: int = STEPS
    ) -> "Exchange":
        """See `collectives.all_gather`."""
        for peer in self._peers:
            self._to[peer].send(input, None if lane == STEPS else "lanes", lane)
        parts = self._parts(input, lane)
        return Exchange(parts, functools.partial(_concatenate, output), lane != STEPS)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: dist.ReduceOp
    ) -> "Exchange":
        """See `collectives.reduce_scatter`."""
        shares = input.reshape(-1, *output.shape)
        for peer in self._peers:
            self._to[peer].send(shares[peer])
        parts = self._parts(shares[self._rank])
        return Exchange(parts, functools.partial(_combine, output, op))

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
    ) -> "Exchange":
        """See `collectives.all_to_all`. No rows are a message too: so sizes that differ are noticed."""
        given, taken = input.split(input_splits), output.detach().split(output_splits)
        for peer in self._peers:
            self._to[peer].send(given[peer])
        parts = [self._to[peer].expect(taken[peer]) for peer in self._peers]
        taken[self._rank].copy_(given[self._rank])
        return Exchange(parts, _is_in_place)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """See `collectives.broadcast`."""
        if self._rank == source:
            self._broadcasts.append([self._to[peer].send(tensor) for peer in self._peers])
            while len(self._broadcasts) > MAX_BROADCASTS_AHEAD:
                for sent in self._broadcasts.popleft():
                    sent.wait()
        else:
            self._to[source].expect(tensor).wait()

    # -- Before what gloo carries --

    def count_over_gloo(self) -> None:
        """Raises ConnectionError if a failed step has left the ranks at different collectives of gloo.

        gloo pairs the n-th collective of one rank with the n-th of another. Every rank tells its n
        when it begins a step. Whoever has failed since compares: the others have done all of theirs.
        """
        if self._has_failed and self.is_in_step:
            for peer in self._peers:
                count = self._to[peer].read_count()
                if count != self._num_over_gloo:
                    raise ConnectionError(
                        f"rank {peer} of the group has begun {count} collectives over gloo, and this "
                        f"rank {self._num_over_gloo}: a step that failed has left them apart, and "
                        "gloo would pair the wrong ones; call destroy_model_parallel and "
                        "initialize_model_parallel"
                    )
            self._has_failed = False
        self._num_over_gloo += 1

    def _parts(self, own: torch.Tensor, lane: int = STEPS) -> list[torch.Tensor | PendingReceive]:
        """By rank: this rank's part, and what the others' will become."""
        # What is waited for in a lane may outlive its model, and must not keep the model's memory.
        like = own if lane == STEPS else torch.empty_like(own, device="meta")
        parts: list = [self._to[peer].expect(like, IN_PLACE, lane) for peer in self._peers]
        parts.insert(self._rank, own)
        return parts


class Exchange:
    """The handle of a collective under way; `wait` combines the parts of all ranks.

    If `wait` raises, it may be called again later where `may_be_repeated`; elsewhere nothing will come.
    """

    def __init__(
        self,
        parts: list[torch.Tensor | PendingReceive],
        finish: Callable,
        may_be_repeated: bool = False,
    ):
        self._parts, self._finish, self._may_be_repeated = parts, finish, may_be_repeated

    def wait(self) -> bool:
        try:
            for arrival in self._arrivals():
                arrival.wait()
            if self._parts:
                self._finish(
                    [p.tensor if isinstance(p, PendingReceive) else p for p in self._parts]
                )
        except BaseException:
            if not self._may_be_repeated:
                self._release()
            raise
        self._release()
        return True

    def _arrivals(self) -> list[PendingReceive]:
        return [part for part in self._parts if isinstance(part, PendingReceive)]

    def _release(self) -> None:
        for arrival in self._arrivals():
            arrival.release()
        self._parts = []


def _combine(target: torch.Tensor, op: dist.ReduceOp, parts: list[torch.Tensor]) -> None:
    total = functools.reduce(_COMBINE[op], parts)
    target.copy_(total / len(parts) if op == dist.ReduceOp.AVG else total)


def _is_in_place(parts: list[torch.Tensor]) -> None:
    """Nothing is left to do: each part was copied to its place."""


def _concatenate(target: torch.Tensor, parts: list[torch.Tensor]) -> None:
    # Piece by piece, because this rank's own part may lie in `target` already.
    for place, part in zip(target.chunk(len(parts)), parts, strict=True):
        place.copy_(part)
