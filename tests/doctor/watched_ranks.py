"""Ranks that are watched as under torchrun: by a process beside them, not by who launched them."""

import os

import torch.distributed as dist

from minimegatron.doctor import session
from tests.doctor import hangs


def run(log: str, name: str, hang_timeout: float, ranks_per_machine: int | None) -> str:
    """Runs one of `hangs` under watch, if need be as if on several machines."""
    # A launched rank's standard error is that of the process it was forked from.
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if ranks_per_machine is not None:
        machine = f"machine {dist.get_rank() // ranks_per_machine}"
        session.machine_id = lambda: machine
    session.watch_ranks(hang_timeout)
    result = getattr(hangs, name)()
    dist.barrier()
    session.stop_watching()
    return result
