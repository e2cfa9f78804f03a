"""Ranks that may die: `run_mortal(fn, 3, ...)` says of each rank what it returned, or how it ended.

`run_ranks` ends all ranks as soon as one has died, so it cannot tell what the others would see.
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minimegatron.core.network import keep_to_loopback, loopback_address
from minimegatron.launching import launcher
from minimegatron.launching.packing import main_left_out
from tests.ranks import call_without_shared_memory, has_shared_memory


class Ended(NamedTuple):
    """How one rank came out: what it returned or what it raised, in words; how its process ended."""

    value: Any
    error: str
    exit_code: int | None


class Job:
    """The processes of one job; a `with` statement ends those that are left."""

    def __init__(self, fn: Callable[..., Any], nprocs: int, *args: Any):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(launcher.PRELOADED)
        address = loopback_address()
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.processes, self._channels = [], []
        if not has_shared_memory():
            fn, args = call_without_shared_memory, (fn, *args)
        for rank in range(nprocs):
            ours, theirs = context.Pipe()
            seat = (rank, nprocs, address, self._store.port)
            process = context.Process(target=_run_rank, args=(seat, theirs, fn, args), daemon=True)
            with main_left_out():
                process.start()
            theirs.close()
            self.processes.append(process)
            self._channels.append(ours)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def results(self, timeout: float) -> list[Ended]:
        """Of all ranks; raises TimeoutError if one has neither answered nor ended in time."""
        found = []
        for rank, channel in enumerate(self._channels):
            if not connection.wait([channel], timeout):
                raise TimeoutError(f"rank {rank} has neither answered nor died in {timeout:g} s")
            value, error = None, "no answer"
            with contextlib.suppress(EOFError, ConnectionError):
                value, error = channel.recv()
            found.append((value, error))
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send("leave")
        for process in self.processes:
            process.join(timeout)
        codes = [process.exitcode for process in self.processes]
        return [Ended(*answer, code) for answer, code in zip(found, codes, strict=True)]


def run_mortal(fn: Callable[..., Any], nprocs: int, *args: Any, timeout: float = 60) -> list[Ended]:
    """Calls `fn(*args)` in `nprocs` ranks over gloo on the CPU. Ranks may die."""
    with Job(fn, nprocs, *args) as job:
        return job.results(timeout)


def _run_rank(seat: tuple, channel: connection.Connection, fn: Callable, args: tuple) -> None:
    rank, nprocs, address, port = seat
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(nprocs)})
    keep_to_loopback(os.environ)
    store = dist.TCPStore(address, port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=nprocs, timeout=timedelta(minutes=5)
    )
    # A rank that died while others still connect would fail them in there.
    store.add("connected", 1)
    while store.add("connected", 0) < nprocs:
        time.sleep(0.01)
    try:
        answer = (fn(*args), "")
    except Exception as error:
        answer = (None, f"{type(error).__name__}: {error}")
    channel.send(answer)
    with contextlib.suppress(EOFError):
        channel.recv()
    os._exit(0)
