"""Starts a student's ranks, and collects what each says.

Megatron has no counterpart.
"""

import io
import pickle
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minimegatron.doctor.advice import WIDTH
from minimegatron.doctor.findings import NOBODY, STUCK, Diagnosis
from minimegatron.doctor.folders import shared_folder
from minimegatron.doctor.records import ranks_in_words
from minimegatron.doctor.situation import MESSAGE
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.collected import Collected, crowding, students_lines
from minimegatron.exercises.room.pipes import Pipes
from minimegatron.exercises.room.plain_data import MOST_BYTES
from minimegatron.exercises.room.rank_side import STACK, work_on_rank
from minimegatron.exercises.room.room import Job
from minimegatron.launching.launcher import HangError, RankError, RankProcesses, RankTimeout

EXERCISES = Path(__file__).parents[1]
STEP = EXERCISES.parent / "core"
TOOLS = STEP / "utils.py"
"""The recorder waits through it too."""
STACK_FILE = re.compile(r'File "([^"]+)", line')
BUSY = "All ranks are busy in your code"
LOOP = "Is there a loop that does not end?"
HANG_SECONDS = 2.5
"""Nobody begins or ends a call for so long: a hang. A check's own calls are far shorter."""
MOST_SECONDS = 6.0
"""For all cases of a check together; together with what starting takes, below 10 s."""


class StudentRanks(RankProcesses):
    """Ranks whose reports are taken for data only: unpickling them runs no code of theirs."""

    def read_report(self, data: bytes) -> Any:
        """The report, if it consists of plain values."""
        return _PlainUnpickler(io.BytesIO(data)).load()


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in (
            ("minimegatron.launching.launcher", "_Returned"),
            ("minimegatron.launching.launcher", "_Raised"),
        ):
            raise pickle.UnpicklingError(f"a rank sent {module}.{name}, which no check does")
        return super().find_class(module, name)


def collect_on_ranks(
    job: Job,
    num_ranks: int,
    patience: float,
    function: Callable[[Job], Any] = work_on_rank,
) -> Collected:
    """Calls `function(job)` on every rank; what they wrote into their files, and how it ended."""
    with shared_folder("minimegatron-check-") as folder:
        lines = folder / "lines"
        lines.mkdir()
        with Pipes(folder / "pipes", num_ranks) as pipes:
            job = replace(job, pipes=str(pipes.folder), lines=str(lines))
            ending = _run(function, num_ranks, job, patience)
        said = [_read_lines(lines / str(rank)) for rank in range(num_ranks)]
        if ending.ending == verdict.DIED and ending.rank is not None:
            stack = "\n".join(_read_lines(lines / f"{ending.rank}{STACK}"))
            ending = replace(ending, text=ending.text + _killed_words(ending, stack, job.path))
        printed = {str(rank): text for rank, text in pipes.texts().items()}
        return replace(ending, lines=said, printed=printed)


def _read_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def _run(function: Callable[[Job], Any], num_ranks: int, job: Job, patience: float) -> Collected:
    # A hang is told from slowness by who is ready to run, so it needs less patience.
    hang_timeout = HANG_SECONDS * min(patience, 1.5)
    options = {"backend": "gloo", "device": "cpu", "hang_timeout": hang_timeout}
    try:
        with StudentRanks(function, num_ranks, job, **options) as ranks:
            ranks.wait(MOST_SECONDS * patience * crowding())
            return Collected([])
    except HangError as error:
        text = _hang_words(error, job.path)
        return Collected([], verdict.HANG, text, min(error.ranks, default=None))
    except RankTimeout as error:
        return Collected([], verdict.TIMEOUT, _timeout_words(error, job.path))
    except RankError as error:
        return _failed(error)
    except pickle.UnpicklingError as error:
        return Collected([], verdict.FORGED, str(error))


def _failed(error: RankError) -> Collected:
    """How a rank ended. One that raised has told why, in its lines."""
    diagnosis = "" if error.diagnosis is None else error.diagnosis.text
    for rank in error.ranks:
        if rank in error.exit_codes:
            return Collected([], verdict.DIED, _died_words(error, rank), rank)
    told = [rank for rank in error.ranks if "Failed" in error.summaries.get(rank, "")]
    if told:
        return Collected([], verdict.RAISED, diagnosis, told[0])
    return Collected([], verdict.DEFECT, str(error))


# -- Words --


def _died_words(error: RankError, rank: int) -> str:
    code = error.exit_codes[rank]
    fate = str(error).splitlines()[0]
    if code is not None and code >= 0:
        return f"{fate}. A rank may not leave a step (os._exit?): the others wait for it. Return."
    return f"{fate}."


def _killed_words(ending: Collected, stack: str, path: str) -> str:
    """For a rank that the system has killed for touching memory that is not there; else ""."""
    if not re.search(r"SIG(SEGV|BUS)", ending.text):
        return ""
    why = (
        "It read or wrote memory that is not there any more. Operations on tensors do that only where "
        "a tensor's storage was made smaller, or taken away, while somebody still needed it: what "
        "autograd has saved for backward can share it. Let go of memory only in ways that leave a "
        "storage that others hold as it is."
    )
    where = students_lines({ending.rank: stack}, path) or [
        "",
        "It was in a call of the check then, after your functions had returned.",
    ]
    return "\n".join(["", "", textwrap.fill(why, WIDTH), *where])


def _hang_words(error: HangError, path: str) -> str:
    found = error.diagnosis
    files = {rank: STACK_FILE.findall(stack) for rank, stack in found.stacks.items()}
    done = [rank for rank, theirs in files.items() if _is_in_the_check(theirs, path)]
    inside = [rank for rank, theirs in files.items() if path in theirs]
    if done and inside and len(done) + len(inside) == len(files):
        text = _finished_words(found, done, inside)
    elif found.kind == NOBODY:
        text = f"{BUSY}, and no rank waits for another. {LOOP}"
    elif found.kind == STUCK:
        text = f"{found.cause} {LOOP}"
    else:
        text = found.text
    first = str(error).splitlines()[0]
    return "\n".join([first, "", text, *students_lines(found.stacks, path)])


def _is_in_the_check(files: Sequence[str], path: str) -> bool:
    """Whether a rank waits in a call that the check makes, after the student's code or around it.

    `files` are those of its stack, innermost call first. The check may wait through other parts of the
    package, as the recorder; but a rank that waits in a part of the step is not in the check.
    """
    if path in files:
        return False
    for file in map(Path, files):
        if file.is_relative_to(EXERCISES) or (file.is_relative_to(STEP) and file != TOOLS):
            return file.is_relative_to(EXERCISES)
    return False


def _finished_words(found: Diagnosis, done: list[int], inside: list[int]) -> str:
    """Some ranks have come out of the student's code, and others have not."""
    have, wait = ("has", "waits") if len(done) == 1 else ("have", "wait")
    rule = "Every rank of a group must make the same calls."
    if all(found.situations[rank].kind == MESSAGE for rank in inside):
        rule = "A message is one send on one rank and one receive on the other."
    lines = [
        f"R{ranks_in_words(done)[1:]} {have} come out of your code, and {wait} for the others in the "
        "check. Still in there:",
        *(f"  rank {rank} {found.situations[rank].text}" for rank in inside),
        "",
        f"{rule} Those that are still in there make one too many, or those that came out have left "
        "one out: look at an early return, and at an `if` or a loop that depends on the rank or on its "
        "data.",
    ]
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=_indent(line)) for line in lines)


def _indent(line: str) -> str:
    return "      " if line.startswith(" ") else ""


def _timeout_words(error: RankTimeout, path: str) -> str:
    first = str(error).splitlines()[0]
    lines = [f"{first}; right code takes about one. Is there a loop that does not end?"]
    return "\n".join([*lines, *students_lines(_stacks_in(str(error)), path)])


def _stacks_in(message: str) -> dict[int, str]:
    parts = re.split(r"--- Python stack of rank (\d+), innermost call first ---\n", message)
    return {int(rank): text for rank, text in zip(parts[1::2], parts[2::2], strict=True)}
