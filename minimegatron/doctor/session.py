"""What the ranks of a job under torchrun do to be watched: records, and a watchman per machine.

Megatron has no counterpart.

>>> watch_ranks(hang_timeout=30)     # on every rank, after init_process_group     # doctest: +SKIP
>>> stop_watching()                  # on every rank, at the end                   # doctest: +SKIP
"""

import atexit
import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch.distributed as dist

from minimegatron.core import network
from minimegatron.doctor.folders import lock_of, make_folder
from minimegatron.doctor.inquiry import offer_answers
from minimegatron.doctor.observer import start_recording
from minimegatron.doctor.processes import offer_stacks
from minimegatron.doctor.records import RETURNED, RUNNING
from minimegatron.doctor.shared_record import RecordWriter
from minimegatron.doctor.watch import record_path, stack_path
from minimegatron.doctor.watchman import HANG_EXIT_CODE, ending_path, port_path

START_SECONDS = 30.0
"""How long a watchman may take to start."""

JOIN_SECONDS = 5.0
"""How long the thread of a rank may take to end."""

_TO_STOP = b"\1"
"""What a rank tells its own thread; the watchman says something else."""


@dataclass
class _Watched:
    """What a watched rank keeps until it is watched no longer."""

    record: RecordWriter
    answers: contextlib.ExitStack
    """As long as it is open, this rank can be asked what its GPU waits for."""
    pipe: int
    """On which this rank is told to end, by the watchman, or its thread to stop, by itself."""
    thread: threading.Thread


_watched: _Watched | None = None
_stack_file: IO[str] | None = None
"""Stays open at the end too: a signal for stacks may still be under way."""


def watch_ranks(hang_timeout: float, head_address: str = "localhost") -> None:
    """From now on, a hang of the job is found, explained and ended. Every rank must call it.

    When no rank has begun or ended a traced call for `hang_timeout` seconds, the diagnosis is
    printed and all ranks end with exit code 75; those that cannot, because they are stopped, are
    killed. `head_address` is where other machines reach rank 0's. Does nothing for a job of one
    rank, which waits for nobody, and for ranks that are watched already.
    """
    global _watched, _stack_file
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1 or _watched is not None:
        return
    machines: list = [None] * world_size
    dist.all_gather_object(machines, network.machine_id())
    mine = [other for other in range(world_size) if machines[other] == machines[rank]]
    first_ranks = sorted({machines.index(machine) for machine in machines})

    # -- The head comes first: other watchmen must know where it is --
    folder, where = None, None
    token = secrets.token_hex(16)
    if rank == 0:
        folder = make_folder("minimegatron-doctor-", has_keeper=False)
        _start_watchman(folder, hang_timeout, mine, token, "--head-of", len(first_ranks) - 1)
        where = (head_address, _wait_for_port(folder), token)
    told: list = [where]
    dist.broadcast_object_list(told, src=0)
    address, port, token = told[0]
    if rank != 0 and rank in first_ranks:
        folder = make_folder("minimegatron-doctor-", has_keeper=False)
        _start_watchman(folder, hang_timeout, mine, token, "--branch-of", address, port)

    # -- Then every rank takes its place in its machine's folder --
    folders: list = [None] * world_size
    dist.all_gather_object(folders, folder)
    folder = folders[mine[0]]
    _stack_file = offer_stacks(stack_path(folder, rank))
    os.mkfifo(ending_path(folder, rank))
    pipe = os.open(ending_path(folder, rank), os.O_RDWR)
    thread = threading.Thread(target=_end_when_told, args=(pipe,), name="hang doctor", daemon=True)
    record = start_recording(record_path(folder, rank), rank, world_size)
    answers = contextlib.ExitStack()
    answers.enter_context(offer_answers(folder, rank))
    _watched = _Watched(record, answers, pipe, thread)
    thread.start()
    record.set_state(RUNNING)
    # What a process does after its last line, such as closing connections, is no hang.
    atexit.register(stop_watching)


def stop_watching() -> None:
    """This rank has come to its end: nobody need wait for it. Does nothing where nobody watches."""
    global _watched
    watched, _watched = _watched, None
    if watched is None:
        return
    watched.record.set_state(RETURNED)
    watched.answers.close()
    os.write(watched.pipe, _TO_STOP)
    watched.thread.join(JOIN_SECONDS)
    if not watched.thread.is_alive():
        os.close(watched.pipe)


def _start_watchman(
    folder: Path, hang_timeout: float, ranks: list[int], token: str, *options: object
) -> None:
    # The package may be on this process's path for reasons that a new process does not share.
    root = str(Path(__file__).parents[2])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); "
        "from minimegatron.doctor.watchman import main; sys.exit(main())"
    )
    arguments = [folder, hang_timeout, *ranks, "--starter", os.getpid(), *options]
    watchman = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # The folder is in use as long as the watchman lives.
        pass_fds=[lock_of(folder)],
        # Signals to the ranks' process group are not for it: it ends after them.
        start_new_session=True,
    )
    watchman.stdin.write(f"{token}\n".encode())
    watchman.stdin.close()


def _wait_for_port(folder: Path) -> int:
    deadline = time.monotonic() + START_SECONDS
    while not port_path(folder).exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the hang doctor's process did not start in {START_SECONDS:g} s")
        time.sleep(0.01)
    return int(port_path(folder).read_text())


def _end_when_told(pipe: int) -> None:
    # A read in a thread: the main thread may be in a wait where no Python runs.
    if os.read(pipe, 1) != _TO_STOP:
        os._exit(HANG_EXIT_CODE)
