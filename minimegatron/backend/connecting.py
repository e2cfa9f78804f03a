"""Connections between all ranks of a group, or between neighbours, where they can share memory.

Megatron has no counterpart.
"""

import json
import resource
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from minimegatron.backend.channels import Connection
from minimegatron.backend.handshake import Met, is_supported, meet
from minimegatron.backend.shared_memory import Arena

Connections = dict[int, Connection]


def get_timeout(group: dist.ProcessGroup) -> float:
    """Seconds after which a collective or a message of `group` gives up, as the group was told."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def connect(
    group: dist.ProcessGroup,
    callees: list[int],
    callers: list[int],
    kind: Callable[[Met, Arena, int, float], Connection] = Connection,
) -> tuple[Connections, Connections] | None:
    """Connects ranks of `group` with each other, if all of them can share memory and sockets.

    Collective over `group`; ranks are those within it. This rank calls `callees`, and is called by
    `callers`; of two ranks that talk to each other, one calls. Returns both sorts of connections by
    rank, each made by `kind`; or None on every rank if the group spans hosts or containers, or if a
    rank has no memory to share, as on another system than Linux. Raises ConnectionError if a rank does
    not come within the group's time-out.
    """

    def gather(mine: list) -> list[list]:
        everyone: list = [None] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
        return everyone

    if not is_supported():
        return None
    return _connect(group.rank(), gather, callees, callers, get_timeout(group), kind)


def connect_over_store(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> Connections | None:
    """Connects this rank with all others of a group that has a store and nothing else yet.

    Collective. Returns the connections by rank; or None on every rank, as `connect` does. Raises
    ConnectionError, naming the rank, if one does not come in time.
    """

    def gather(mine: list) -> list[list]:
        store.set(f"address of {rank}", json.dumps(mine))
        return [json.loads(_read(store, other, timeout)) for other in range(size)]

    found = _connect(
        rank,
        gather,
        list(range(rank)),
        list(range(rank + 1, size)),
        timeout.total_seconds(),
        Connection,
    )
    return None if found is None else found[0] | found[1]


def _read(store: dist.Store, rank: int, timeout: timedelta) -> bytes:
    key = f"address of {rank}"
    try:
        store.wait([key], timeout)
    except RuntimeError as error:  # DistStoreError is one
        raise ConnectionError(
            f"rank {rank} of the group has not come within {timeout.total_seconds():g} s: {error}"
        ) from error
    return store.get(key)


def _connect(
    rank: int,
    gather: Callable[[list], list[list]],
    callees: list[int],
    callers: list[int],
    timeout: float,
    kind: Callable[[Met, Arena, int, float], Connection],
) -> tuple[Connections, Connections] | None:
    # A rank without memory says so to the others: all of them must come to the same answer.
    arena = _new_arena() if is_supported() else None
    descriptor = None if arena is None else arena.descriptor
    found = meet(rank, gather, callees, callers, descriptor, timeout)
    if found is None:
        return None
    called, came = (
        {rank: kind(met, arena, rank, timeout) for rank, met in those.items()} for those in found
    )
    return called, came


def _new_arena() -> Arena | None:
    """None where a container's rules, or its limits on files, leave no memory to share."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return None
    try:
        return Arena()
    except OSError:
        return None
