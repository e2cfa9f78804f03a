"""Connections between all ranks of a group, where they can share memory.

Megatron has no counterpart.
"""

import json
import resource
from datetime import timedelta

import torch
import torch.distributed as dist

from minimegatron.backend.channels import Connection
from minimegatron.backend.handshake import is_supported, meet
from minimegatron.backend.slots import Arena

Connections = dict[int, Connection]


def get_timeout(group: dist.ProcessGroup) -> float:
    """Seconds after which a collective or a message of `group` gives up, as the group was told."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def connect(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Connections | None:
    """Connects this rank with all others of a group that has a store and nothing else yet.

    Collective. Returns the connections by rank; or None on every rank if the group spans hosts or
    containers, or if a rank has no memory to share, as on another system than Linux. Raises
    ConnectionError, naming the rank, if one does not come in time.
    """

    def gather(mine: list) -> list[list]:
        store.set(f"address of {rank}", json.dumps(mine))
        return [json.loads(_read(store, other, timeout)) for other in range(size)]

    # A rank without memory says so to the others: all of them must come to the same answer.
    arena, seconds = _new_arena() if is_supported() else None, timeout.total_seconds()
    descriptor = None if arena is None else arena.descriptor
    lower, higher = list(range(rank)), list(range(rank + 1, size))
    found = meet(rank, gather, lower, higher, descriptor, seconds)
    if found is None:
        return None
    met = found[0] | found[1]
    return {peer: Connection(met[peer], arena, peer, seconds) for peer in met}


def _read(store: dist.Store, rank: int, timeout: timedelta) -> bytes:
    key = f"address of {rank}"
    try:
        store.wait([key], timeout)
    except RuntimeError as error:  # DistStoreError is one
        raise ConnectionError(
            f"rank {rank} of the group has not come within {timeout.total_seconds():g} s: {error}"
        ) from error
    return store.get(key)


def _new_arena() -> Arena | None:
    """None where a container's rules, or its limits on files, leave no memory to share."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return None
    try:
        return Arena()
    except OSError:
        return None
