"""Before a save or a load begins: whether every rank has called it.

A usual mistake is `if rank == 0: save(...)`. Megatron has no counterpart: there that rank waits,
without a word, until its group's time-out, or takes another collective's message for its own.
"""

import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from minimegatron.core.collectives import is_tagged
from minimegatron.core.dist_checkpointing.core import CheckpointingException
from minimegatron.core.utils import get_device
from minimegatron.core.words import first_few

SECONDS_TO_A_WORD = 30.0
"""After these, a rank names those that it waits for, and goes on waiting."""
SHARE_OF_TIME_LIMIT = 0.9
"""Of the group's time-out: the others may wait in another collective, which ends with less to say."""


def await_all_ranks(what: str, verb: str) -> None:
    """Returns when every rank has called it for this `verb`; at once where there is one rank.

    It asks the store over which the ranks found each other, and sends nothing over a group.

    Args:
        what: for messages: what is done with which folder.
        verb: "save", say. Calls with another verb are not waited for.

    Raises CheckpointingException, naming the ranks that have not called it, at nine tenths of the
    default group's time-out. The call then counts as not made.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    store, begin = dist.distributed_c10d._get_default_store(), time.monotonic()
    # No rank calls twice while another is missing, so this many arrivals are one meeting.
    arrivals = store.add(f"minimegatron/{verb}", 1)
    meeting = f"minimegatron/{verb}/{(arrivals - 1) // num_ranks}"
    store.set(f"{meeting}/{rank}", "")
    if arrivals % num_ranks == 0:
        store.set(meeting, "all are here")
    limit = SHARE_OF_TIME_LIMIT * _time_limit(dist.group.WORLD)
    try:
        if _comes(store, meeting, min(SECONDS_TO_A_WORD, limit)):
            return
        warnings.warn(_missing(store, meeting, what, begin), stacklevel=3)
        if _comes(store, meeting, limit - (time.monotonic() - begin)):
            return
        store.add(f"minimegatron/{verb}", -1)
        raise CheckpointingException(_missing(store, meeting, what, begin))
    finally:
        store.delete_key(f"{meeting}/{rank}")


def _comes(store: dist.Store, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(seconds, 0.001)))
    except dist.DistStoreError:  # the time is over
        return store.check([key])
    return True


def _time_limit(group: dist.ProcessGroup) -> float:
    device = torch.device("cpu") if is_tagged(group) else get_device()
    return group._get_backend(device).options._timeout.total_seconds()


def _missing(store: dist.Store, meeting: str, what: str, begin: float) -> str:
    num_ranks = dist.get_world_size()
    missing = [rank for rank in range(num_ranks) if not store.check([f"{meeting}/{rank}"])]
    return (
        f"rank {dist.get_rank()} has waited {time.monotonic() - begin:.1f} s to {what}: "
        f"{len(missing)} of {num_ranks} ranks have not come: {first_few(missing, most=8)}; every rank "
        "must call it, not rank 0 alone"
    )
