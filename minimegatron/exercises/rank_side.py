"""The part of a check that runs on the ranks, in the same process as the student's code.

Called by: `engine`, through the launcher, and under torchrun. Calls: the exercise's `check`, the
student's file, through `user_file`. Megatron has no counterpart.
"""

import importlib
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.exercises import verdict
from minimegatron.exercises.feedback import Wrong
from minimegatron.exercises.integrity import Seal
from minimegatron.exercises.recording import set_folder
from minimegatron.tracing.trace_view import Trace
from minimegatron.user_file import load_user_file


@dataclass(frozen=True)
class Job:
    """What the ranks are asked to do."""

    exercise: str
    """The dotted path of the exercise's folder."""
    path: str
    """The student's file."""
    seed: int = 0
    folder: str = ""
    """Where recordings go; "" where none is kept."""
    pipes: str = ""
    """The folder of the pipes that take what is printed; "" to print as usual."""
    control: bool = False
    """Check the stub's functions instead, after the student's file was loaded."""


class Told(Exception):
    """Carries a verdict out of a rank: its text is the verdict as JSON, in a line."""


class _Forged(Exception):
    """The student's code changes what checks it."""


@dataclass
class Found:
    """What one rank has found when every case passed."""

    achieved: list[dict[str, Any]]
    recording: str
    num_cases: int = 0


def check_on_rank(job: Job) -> dict[str, Any]:
    """Runs every case on this rank. Raises Told, with the verdict, at the first that fails."""
    with printing_to(job.pipes):
        return asdict(_Work(job).run())


def check_and_record(job: Job) -> tuple[dict[str, Any], Trace | None]:
    """The same, and the last recording itself, if a case made one: no file is needed for it."""
    with printing_to(job.pipes):
        work = _Work(job)
        return asdict(work.run()), work.recording


class _Work:
    def __init__(self, job: Job):
        self.recording: Trace | None = None
        self.job, self.path = job, job.path
        self.case_name, self.num_passed, self.num_cases = "", 0, 0

    def run(self) -> Found:
        found = Found([], "")
        try:
            check = importlib.import_module(f"{self.job.exercise}.check")
            seal = Seal()
            path = Path(self.job.path)
            student = load_user_file(path, path.stem)
            if self.job.control:
                student = importlib.import_module(f"{self.job.exercise}.stub")
                self.path = student.__file__
            cases = check.cases(self.job.seed)
            self.num_cases = found.num_cases = len(cases)
            for number, case in enumerate(cases):
                self.case_name = str(case)
                folder = f"{self.job.folder}/{number}" if self.job.folder else None
                set_folder(folder)
                result = check.run(student, case)
                self._look_at(seal)
                words = {key: str(value) for key, value in result.achieved.items()}
                found.achieved.append({"case": self.case_name} | words)
                if result.recording is not None:
                    self.recording, found.recording = result.recording, folder or ""
                self._tidy()
                self.num_passed += 1
        except BaseException as error:
            raise Told(self._verdict(error).to_json()) from error
        return found

    def _look_at(self, seal: Seal) -> None:
        if (name := seal.broken()) is not None:
            raise _Forged(
                f"After your code has run, {name} is another function than before. Leave everything "
                "outside your own file as it is; the check needs it."
            )

    def _tidy(self) -> None:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()

    def _verdict(self, error: BaseException) -> verdict.Verdict:
        found = verdict_on(error, self.path)
        counts = {"num_passed": self.num_passed, "num_cases": self.num_cases}
        return replace(found, case=self.case_name, **counts)


def verdict_on(error: BaseException, path: str) -> verdict.Verdict:
    """What an exception says, to whoever wrote the file at `path`."""
    kind, text = _words(error, path)
    return verdict.Verdict(kind, text, rank=dist.get_rank())


def _words(error: BaseException, path: str) -> tuple[str, str]:
    if isinstance(error, Wrong):
        return verdict.WRONG, str(error)
    if isinstance(error, _Forged):
        return verdict.FORGED, str(error)
    where = student_frames(error, path)
    if isinstance(error, NotImplementedError) and where and where[-1] == last_frame(error):
        return verdict.UNWRITTEN, f"{error}\n\n{_place(where[-1])}"
    if where:
        return verdict.RAISED, _raised_words(error, where)
    if isinstance(error, SystemExit):
        return verdict.RAISED, f"rank {dist.get_rank()} called sys.exit(); return instead"
    return verdict.DEFECT, "".join(traceback.format_exception(error))


# -- Exceptions in the student's own lines --


def student_frames(error: BaseException, path: str) -> list[traceback.FrameSummary]:
    """The frames of the traceback that are lines of the student's file, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename == path]


def last_frame(error: BaseException) -> traceback.FrameSummary:
    """Where it was raised."""
    return traceback.extract_tb(error.__traceback__)[-1]


def _place(frame: traceback.FrameSummary) -> str:
    line = linecache.getline(frame.filename, frame.lineno).strip()
    return f"  {os.path.basename(frame.filename)}:{frame.lineno}, in {frame.name}:  {line}"


def _raised_words(error: BaseException, where: list[traceback.FrameSummary]) -> str:
    summary = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        summary = f"sys.exit({error.code!r}): a rank may not leave; return instead"
    lines = [f"rank {dist.get_rank()}: {summary}", "", "In your file, innermost call last:"]
    lines += [_place(frame) for frame in where[-6:]]
    inner = last_frame(error)
    if inner != where[-1]:
        lines.append(f"  from there, in {inner.filename}:{inner.lineno}, in {inner.name}")
    return "\n".join(lines)


# -- What the student's code prints --


@contextmanager
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


def told_verdict(summary: str) -> verdict.Verdict | None:
    """The verdict in a rank's exception, as the launcher sums it up; None if it is another one."""
    start = summary.find("{")
    if "Told" not in summary[:start] or start < 0:
        return None
    try:
        told = verdict.Verdict.from_json(summary[start:])
    except ValueError:
        return None
    # One rank alone cannot say that all is right.
    return None if told.has_passed else told
