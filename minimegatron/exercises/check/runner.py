"""A process that answers questions in lines: checks for the command, which imports no torch itself.

Megatron has no counterpart.

One line of JSON per question and per answer. Answers come through a pipe that the ranks do not have:
what a student's code prints, or the code it exits with, is never taken for an answer.
"""

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

from minimegatron.doctor.folders import keep_sockets
from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.verdict import Verdict

PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "minimegatron.launching.launcher",
    "minimegatron.exercises.room.rank_side",
    "minimegatron.exercises.bench.gpt_step_judge",
    "minimegatron.pretrain_gpt",
]
"""Imported once, by the process that ranks are forked from."""
PR_SET_DUMPABLE = 4
ROOT = str(Path(__file__).parents[3])
PROGRAM = (
    f"import sys; sys.path[:0] = [] if {ROOT!r} in sys.path else [{ROOT!r}]; "
    "from minimegatron.exercises.check.runner import serve; serve()"
)
COMMAND = [sys.executable, "-P", "-c", PROGRAM]
"""-P: a student's own `random.py` is not to be taken for Python's."""


# -- The side that asks --


class LineProcess:
    """A process that answers each line with a line, for the length of a `with` block."""

    def __init__(self, command: Sequence[str], environment: dict | None = None):
        self._command, self._environment = list(command), environment

    def __enter__(self) -> "LineProcess":
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            # Ctrl-C is for the command, which then ends this process and its ranks.
            start_new_session=True,
        )
        self._heard = b""
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def answer(self, question: dict[str, object], timeout: float) -> str:
        """The answer's line. Raises TimeoutError, and RuntimeError if the process has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError("the check did not answer in time")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise RuntimeError("the process that checks ended without an answer")
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()


class Runner(LineProcess):
    """Checks files."""

    def __init__(self, command: Sequence[str] = COMMAND, environment: dict | None = None):
        super().__init__(command, environment)

    def ask(self, exercise: Exercise, path: Path, timeout: float, **options: object) -> Verdict:
        """The verdict on a file."""
        question = {"exercise": exercise.module, "path": str(path), **options}
        return Verdict.from_json(self.answer(question, timeout))


# -- The process --


def serve() -> None:
    """Answers until its input ends."""
    questions, answers = take_pipes()
    hide_memory()
    engine = importlib.import_module("minimegatron.exercises.check.engine")
    with questions, answers:
        for line in questions:
            answers.write(_answer(engine, json.loads(line)).to_json() + "\n")
            answers.flush()


def warm_up() -> None:
    """Begins to import torch, in the process that ranks are forked from, while this one does too."""
    keep_sockets()
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def _answer(engine, question: dict) -> Verdict:
    exercise = importlib.import_module(question.pop("exercise")).EXERCISE
    if (exercise.folder / "check.py").is_file():
        warm_up()
    path, replay = Path(question.pop("path")), question.pop("replay", None)
    try:
        return engine.check_file(
            exercise, path, replay=None if replay is None else Path(replay), **question
        )
    except Exception as error:
        return Verdict(verdict.DEFECT, f"{type(error).__name__}: {error}")


def take_pipes() -> tuple:
    """Input and output for this process alone: those it starts get none, and standard error."""
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return questions, answers


def hide_memory() -> None:
    """Other processes of the same user may not look into this one, nor open its files (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
