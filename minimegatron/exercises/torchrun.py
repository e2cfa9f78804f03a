"""The same check for a file that torchrun has started: `torchrun --nproc-per-node 4 ex06.py`.

Called by: `check.main`, on every rank. Calls: `rank_side`, the hang doctor, `ending`. Rank 0 prints.
Megatron has no counterpart.

A rank that finds something wrong leaves word in torchrun's store; a thread of rank 0 reads it there,
also while its main thread waits for a message that will never come.
"""

import importlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from minimegatron.core.device import set_device
from minimegatron.doctor.session import stop_watching, watch_ranks
from minimegatron.exercises import verdict
from minimegatron.exercises.engine import HANG_SECONDS, exercise_of, replay_path
from minimegatron.exercises.rank_side import Job, Told, check_and_record
from minimegatron.exercises.source import check_source
from minimegatron.exercises.verdict import Verdict, render
from minimegatron.launcher import CAUSE_SECONDS, GRACE_SECONDS
from minimegatron.training import failures
from minimegatron.training.ending import end_properly
from minimegatron.training.rendezvous import find_each_other

LOOK_SECONDS = 0.05
JOIN_SECONDS = 10.0
"""How long the listening thread may take to end."""
FAILED, DONE, NUM_PASSED = "exercise/failed", "exercise/done", "exercise/num_passed"


def check_in_torchrun(path: Path) -> int:
    """Checks the file together with the other ranks; returns this rank's exit code."""
    began = time.monotonic()
    exercise = exercise_of(path)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    num_ranks = max(1, exercise.num_ranks)
    if world_size != num_ranks:
        if rank == 0:
            print(
                f"{exercise.name} is checked on {num_ranks} ranks, and there are "
                f"{world_size}: torchrun --nproc-per-node {num_ranks} {path.name}"
            )
        return 2 if rank == 0 else 0
    if (found := check_source(exercise, path)) is not None:
        if rank == 0:
            print(render(found, exercise.name))
        return 1 if rank == 0 else 0
    set_device("cpu", local_rank=0)
    end_properly()
    failures.watch_launcher()
    store = find_each_other(rank, world_size, default_pg_timeout)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    found = _check(exercise, path)
    if rank == 0:
        print(render(replace(found, seconds=time.monotonic() - began), exercise.name))
    return 0


def _check(exercise, path: Path) -> Verdict:
    """The verdict when every rank has passed. Otherwise this process ends inside."""
    # Imported before anybody watches: on a busy machine this takes longer than a hang may.
    for name in (f"{exercise.module}.check", "torch._dynamo"):
        importlib.import_module(name)
    watch_ranks(HANG_SECONDS)
    with _Board(exercise.name) as board:
        try:
            achieved, recording = check_and_record(Job(exercise.module, str(path)))
        except Told as told:
            if isinstance(told.__cause__, ConnectionError):
                time.sleep(CAUSE_SECONDS)  # another rank knows why, and speaks first
            board.fail(str(told))
        finally:
            stop_watching()
        board.wait_for_all()
    replay = ""
    if board.rank == 0 and recording is not None:
        replay = str(replay_path(exercise, path.parent))
        Path(replay).parent.mkdir(parents=True, exist_ok=True)
        recording.to_html(replay)
    num_cases = len(achieved["achieved"])
    return Verdict(
        verdict.PASSED,
        num_passed=num_cases,
        num_cases=num_cases,
        achieved=tuple(achieved["achieved"]),
        replay=replay,
    )


class _Board:
    """What the ranks tell each other, through torchrun's store; a thread listens to it.

    The thread has ended when the `with` block has: it must not be inside the store when Python ends.
    """

    def __init__(self, name: str):
        self.name, self.rank = name, dist.get_rank()
        self.is_over = threading.Event()
        self.store = dist.distributed_c10d._get_default_store()
        # A connection of its own, since a waiting rank holds the other.
        self.own_store = self.store.clone()
        self.listener = threading.Thread(target=self.listen, daemon=True)

    def __enter__(self) -> "_Board":
        self.listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.listener.join(JOIN_SECONDS)

    def fail(self, told: str) -> None:
        """This rank found something; waits until rank 0 has said so."""
        self.store.compare_set(FAILED, "", told)
        while True:
            time.sleep(1)

    def wait_for_all(self) -> None:
        """Returns when every rank has passed."""
        self.store.add(NUM_PASSED, 1)
        while self.store.add(NUM_PASSED, 0) < dist.get_world_size():
            time.sleep(LOOK_SECONDS)

    def listen(self) -> None:
        """Ends this process when some rank has failed and rank 0 has printed it.

        Also when the store is gone: torchrun, which serves it, was killed.
        """
        try:
            while not self.own_store.check([FAILED if self.rank == 0 else DONE]):
                if self.is_over.wait(LOOK_SECONDS):
                    return
            if self.rank == 0:
                time.sleep(GRACE_SECONDS)
                found = Verdict.from_json(self.own_store.get(FAILED).decode())
                print(render(found, self.name), flush=True)
                self.own_store.set(DONE, "")
        except dist.DistError:
            if self.is_over.is_set():
                return
        # One rank with an exit code is enough for torchrun, which lists every such rank at length.
        os._exit(1 if self.rank == 0 else 0)
