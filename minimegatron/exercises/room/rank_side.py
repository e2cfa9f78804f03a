"""The room of an exercise on ranks: this part runs on each of them.

Megatron has no counterpart.
"""

import contextlib
import faulthandler
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.exercises.bench import noting
from minimegatron.exercises.bench.apart import meet
from minimegatron.exercises.room.room import Job, Room

STACK = ".stack"
"""Behind the name of a rank's file of lines: its Python stack, if it was killed by a bad access."""


class Failed(Exception):
    """This rank has told what went wrong."""


def work_on_rank(job: Job) -> None:
    """Answers every case on this rank; its lines go into its file. Raises Failed.

    Raised, and not returned: the other ranks wait for this one, and must be ended.
    """
    path = f"{job.lines}/{dist.get_rank()}"
    with (
        printing_to(job.pipes),
        open(path, "w", encoding="utf-8") as file,
        open(path + STACK, "w", encoding="utf-8") as stack,
    ):
        # Where it is when the system kills it for reading memory that is not its own.
        faulthandler.enable(file=stack, all_threads=False)
        try:
            answer_cases(job, lambda line: print(line, file=file, flush=True))
        finally:
            faulthandler.disable()


def answer_cases(job: Job, tell: Callable[[str], None]) -> None:
    """The same with lines that go to `tell`."""
    meet()
    room = Room(job, tell, dist.get_rank(), between=tidy)
    with noting.noted_by(room.note):
        error = room.work()
    if error is not None:
        raise Failed from error


def tidy() -> None:
    """Removes the groups of a case, once no rank needs them."""
    meet()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def printing_to(pipes: str) -> Iterator[None]:
    """Standard output and error go into this rank's pipe, which the engine reads and shortens."""
    torch.set_num_threads(1)
    if not pipes:
        yield
        return
    pipe = os.open(f"{pipes}/{dist.get_rank()}", os.O_WRONLY)
    for number in (1, 2):
        os.dup2(pipe, number)
    os.close(pipe)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        yield
    finally:
        sys.stdout.flush()
