"""The same check for a file that torchrun has started: `torchrun --nproc-per-node 4 ex06.py`.

Rank 0 prints. Megatron has no counterpart.

Each rank is a room: what it says goes into torchrun's store. A thread of rank 0 reads it there, also
while its main thread waits for a message that will never come.
"""

import importlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from minimegatron.backend import in_place_of
from minimegatron.core.device_choice import set_device
from minimegatron.doctor.session import stop_watching, watch_ranks
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.check.engine import Sheet, exercise_of, replay_path
from minimegatron.exercises.check.judge import Judge
from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.collect import collect
from minimegatron.exercises.room.collected import Collected, Question
from minimegatron.exercises.room.on_ranks import HANG_SECONDS
from minimegatron.exercises.room.rank_side import Failed, answer_cases
from minimegatron.exercises.room.reading import check_source
from minimegatron.exercises.room.room import Job
from minimegatron.exercises.room.verdict import Verdict, render
from minimegatron.launching.launcher import CAUSE_SECONDS, GRACE_SECONDS
from minimegatron.training import failures
from minimegatron.training.ending import end_properly
from minimegatron.training.process_group import find_each_other

LOOK_SECONDS = 0.05
JOIN_SECONDS = 10.0
"""How long the listening thread may take to end."""
NOT_ASKED = "Not tried under torchrun; `minimegatron exercises check` does."
LINES, FAILED, OVER, ENDED = (f"exercise/{word}" for word in ("lines", "failed", "over", "ended"))


def check_in_torchrun(path: Path) -> int:
    """Checks the file together with the other ranks; returns this rank's exit code."""
    began = time.monotonic()
    exercise = exercise_of(path)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    num_ranks = max(1, exercise.num_ranks)
    if world_size != num_ranks:
        if rank == 0:
            print(
                f"{exercise.name} is checked on {num_of(num_ranks, 'rank')}, and there "
                f"{'is' if world_size == 1 else 'are'} {world_size}: torchrun --nproc-per-node "
                f"{num_ranks} {path.name}"
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
    dist.init_process_group(in_place_of("gloo"), rank=rank, world_size=world_size, store=store)
    return _check(exercise, path, began)


def _check(exercise: Exercise, path: Path, began: float) -> int:
    """The exit code if all is right. Otherwise this process ends inside."""
    sheet = Sheet(exercise, seed=0)
    with _Board(exercise, path, began) as board:
        for number, question in enumerate(sheet.questions):
            if question.hangs:
                board.leave_out(number)
                continue
            board.begin(number, question)
            if question.is_alone:
                board.ask_alone()
            else:
                _answer(board, Job(question.module, str(path), question.cases))
            board.wait_for_all()
    return 0


def _answer(board: "_Board", job: Job) -> None:
    """This rank's answers to the cases on ranks."""
    # Imported before anybody watches: on a busy machine this takes longer than a hang may.
    for name in (job.module, "torch._dynamo"):
        importlib.import_module(name)
    watch_ranks(HANG_SECONDS)
    try:
        answer_cases(job, board.tell)
    except Failed as failed:
        if isinstance(failed.__cause__, ConnectionError):
            time.sleep(CAUSE_SECONDS)  # another rank knows why, and speaks first
        board.fail()
    finally:
        stop_watching()


class _Board:
    """What the ranks tell each other, through torchrun's store; a thread listens to it.

    The thread has ended when the `with` block has: it must not be inside the store when Python ends.
    """

    def __init__(self, exercise: Exercise, path: Path, began: float):
        self.exercise, self.path, self.began = exercise, path, began
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.is_over = threading.Event()
        self.store = dist.distributed_c10d._get_default_store()
        # A connection of its own, since a waiting rank holds the other.
        self.own_store = self.store.clone()
        self.number, self.question = 0, None
        self.judge = Judge() if self.rank == 0 else None
        self.listener = threading.Thread(target=self.listen, daemon=True)

    def __enter__(self) -> "_Board":
        if self.judge is not None:
            self.judge.__enter__()
            self.judge.open(self.exercise, seed=0)
        self.listener.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.judge is not None and error[0] is None:
            replay = replay_path(self.exercise, self.path.parent)
            self._print(self.judge.verdict(replay))
        self.is_over.set()
        self.listener.join(JOIN_SECONDS)
        if self.judge is not None:
            self.judge.__exit__()

    # -- On every rank --

    def begin(self, number: int, question: Question) -> None:
        """The next question."""
        self.number, self.question = number, question

    def leave_out(self, number: int) -> None:
        """A question whose ranks hang would end this job; `minimegatron exercises check` asks it."""
        if self.rank == 0:
            self.judge.judge(number, Collected([], verdict.HANG, NOT_ASKED))

    def tell(self, line: str) -> None:
        """A line of this rank's."""
        self.store.append(f"{LINES}/{self.number}/{self.rank}", line + "\n")

    def ask_alone(self) -> None:
        """Rank 0 starts a room for what needs no ranks."""
        if self.rank == 0:
            self._judge(collect(self.question, self.path))

    def _judge(self, collected: Collected) -> None:
        """Ends all ranks unless it is right."""
        if not self.judge.judge(self.number, collected):
            self._end(self.judge.verdict())

    def fail(self) -> None:
        """This rank has told what is wrong; waits until rank 0 has said so."""
        self.store.compare_set(FAILED, "", str(self.rank))
        while True:
            time.sleep(1)

    def wait_for_all(self) -> None:
        """Returns when every rank has answered, and the answers are right."""
        self.store.add(f"{OVER}/{self.number}", 1)
        while self.store.add(f"{OVER}/{self.number}", 0) < self.world_size:
            time.sleep(LOOK_SECONDS)
        if self.rank == 0 and not self.question.is_alone:
            self._judge(self._collected("", None))
        self.store.add(f"{OVER}/{self.number}/judged", int(self.rank == 0))
        while self.store.add(f"{OVER}/{self.number}/judged", 0) < 1:
            time.sleep(LOOK_SECONDS)

    # -- The listening thread --

    def listen(self) -> None:
        """Ends this process when some rank has failed and rank 0 has printed it.

        Also when the store is gone: torchrun, which serves it, was killed.
        """
        try:
            while not self.own_store.check([FAILED if self.rank == 0 else ENDED]):
                if self.is_over.wait(LOOK_SECONDS):
                    return
            if self.rank == 0:
                time.sleep(GRACE_SECONDS)
                first = int(self.own_store.get(FAILED))
                self.judge.judge(self.number, self._collected(verdict.RAISED, first))
                self._end(self.judge.verdict())
        except dist.DistError:
            if self.is_over.is_set():
                return
        os._exit(1 if self.rank == 0 else 0)

    def _collected(self, ending: str, rank: int | None) -> Collected:
        lines = []
        for other in range(self.world_size):
            key = f"{LINES}/{self.number}/{other}"
            text = self.own_store.get(key).decode() if self.own_store.check([key]) else ""
            lines.append(text.splitlines())
        return Collected(lines, ending, "", rank)

    def _end(self, found: Verdict) -> None:
        """Says what is wrong, and ends all ranks."""
        self._print(found)
        self.own_store.set(ENDED, "")
        self.judge.__exit__()
        # One rank with an exit code is enough for torchrun, which lists every such rank at length.
        os._exit(1)

    def _print(self, found: Verdict) -> None:
        seconds = time.monotonic() - self.began
        print(render(replace(found, seconds=seconds), self.exercise.name), flush=True)
