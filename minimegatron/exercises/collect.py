"""Starts a student's room, and collects what it says: no judgement yet.

Called by: `engine`, and inside the grader's cells. Calls: `alone_side` (as a program), `on_ranks` (only
where ranks are needed: it imports torch). Megatron has no counterpart.
"""

import contextlib
import importlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from minimegatron.exercises import verdict
from minimegatron.exercises.cases import Case
from minimegatron.exercises.pipes import Kept
from minimegatron.exercises.plain_data import MOST_BYTES, from_line, to_line
from minimegatron.exercises.room import Job

ALONE, CHECK = "alone", "check"
"""The modules of an exercise that ask something: without torch, and on ranks."""
ALONE_SECONDS = 3.0
"""For all cases of a room without ranks."""
LOOK_SECONDS = 0.1
"""How often somebody looks whether it has ended."""
STACK_SECONDS = 1.0
"""How long it may take to say where it is."""
ROOT = str(Path(__file__).parents[2])
PROGRAM = (
    f"import sys; sys.path[:0] = [] if {ROOT!r} in sys.path else [{ROOT!r}]; "
    "from minimegatron.exercises.alone_side import main; main()"
)


@dataclass(frozen=True)
class Question:
    """What one room is asked: plain data, since it travels."""

    module: str
    """The dotted path of the exercise's `alone` or `check`."""
    num_ranks: int
    cases: str
    """[[name, part, values], ...], as `to_line` writes it."""
    hangs: bool = False
    """Right when the ranks wait for each other for ever."""

    @classmethod
    def of(cls, module: str, num_ranks: int, cases: Sequence[Case]) -> "Question":
        """The question that asks these cases."""
        plain = [[case.name, case.part, case.values] for case in cases]
        return cls(module, num_ranks, to_line(plain), cases[0].hangs)

    @property
    def is_alone(self) -> bool:
        """Whether it needs no ranks, and no torch."""
        return self.module.rpartition(".")[2] == ALONE


@dataclass(frozen=True)
class Collected:
    """All that a room has said, and how it ended: plain data."""

    lines: list[list[str]]
    """Of each rank."""
    ending: str = ""
    """A verdict's kind: `HANG`, `TIMEOUT`, `DIED`, `DEFECT`; "" where all ranks came to their end."""
    text: str = ""
    rank: int | None = None
    printed: Mapping[str, str] = field(default_factory=dict)

    def to_line(self) -> str:
        """One line, for another process."""
        return to_line(asdict(self))

    @classmethod
    def from_line(cls, line: str | bytes) -> "Collected":
        """The inverse. Raises ValueError for anything else."""
        data = from_line(line)
        try:
            found = cls(**data)
        except TypeError as error:
            raise ValueError(f"not what a room collects: {error}") from None
        is_right = isinstance(found.lines, list) and all(
            isinstance(lines, list) and all(isinstance(line, str) for line in lines)
            for lines in found.lines
        )
        if not (is_right and isinstance(found.text, str) and isinstance(found.printed, dict)):
            raise ValueError("not what a room collects: fields of other types")
        return found


def collect(
    question: Question, path: Path, patience: float = 1.0, control: bool = False
) -> Collected:
    """Starts the room and waits for its end."""
    job = Job(question.module, str(path.resolve()), question.cases, control)
    if question.is_alone:
        return _collect_alone(job, ALONE_SECONDS * patience * crowding())
    on_ranks = importlib.import_module("minimegatron.exercises.on_ranks")
    return on_ranks.collect_on_ranks(job, question.num_ranks, patience)


def crowding() -> float:
    """How many times slower this machine is for other work that it has: 1 for none, 4 at most."""
    load, _, _ = os.getloadavg()
    return min(4.0, max(1.0, load / (os.cpu_count() or 1)))


# -- The room without ranks --


def _collect_alone(job: Job, seconds: float) -> Collected:
    ours, theirs = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-P", "-s", "-c", PROGRAM, str(theirs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(theirs,),
        start_new_session=True,
    ) as process:
        os.close(theirs)
        process.stdin.write(json.dumps(asdict(replace(job, seconds=seconds))).encode() + b"\n")
        process.stdin.close()
        printed, said = Kept(), bytearray()
        deadline = time.monotonic() + seconds + STACK_SECONDS
        is_over = _listen(process, printed, ours, said, deadline)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    os.close(ours)
    # Where it was at the time limit begins a line; within one it is an exception's own words.
    lines, *stacks = re.split(r"^Timeout \(", said.decode(errors="replace"), maxsplit=1, flags=re.M)
    stack = "".join(stacks)
    shown = {"0": printed.text()} if printed.size else {}
    found = Collected([lines.splitlines()], printed=shown)
    if stack or not is_over:
        return replace(found, ending=verdict.TIMEOUT, text=_late_words(stack, job.path, seconds))
    return found


def _listen(
    process: subprocess.Popen, printed: Kept, lines: int, said: bytearray, deadline: float
) -> bool:
    """Reads until the room has closed its lines; False if it says too much, or takes too long."""
    printing = process.stdout.fileno()
    with selectors.DefaultSelector() as files:
        files.register(printing, selectors.EVENT_READ)
        files.register(lines, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0 and len(said) <= MOST_BYTES:
            # Looked at first: what it said before its end is then there to be read.
            has_ended = process.poll() is not None
            ready = files.select(0 if has_ended else min(left, LOOK_SECONDS))
            if has_ended and not ready:
                return True  # a process that it left behind still holds the pipe
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                (printed.add if key.fd == printing else said.extend)(data)
                if not data:
                    files.unregister(key.fd)
                    if key.fd == lines:
                        return True
    return False


def _late_words(stack: str, path: str, seconds: float) -> str:
    lines = [
        f"not done after {seconds:.0f} s; right code takes a moment. Is there a loop without end, or "
        "does it try too many combinations?"
    ]
    return "\n".join([*lines, *students_lines({0: stack}, path)])


def students_lines(stacks: Mapping[int, str], path: str) -> list[str]:
    """Which line of the student's file each rank is at, from its Python stack."""
    found = []
    pattern = re.compile(rf'File "{re.escape(path)}", line (\d+),? in (\S+)')
    source = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    for rank, stack in sorted(stacks.items()):
        if (match := pattern.search(stack)) and int(match[1]) <= len(source):
            number, who = int(match[1]), f"rank {rank} is" if len(stacks) > 1 else "it is"
            text = source[number - 1].strip()
            found.append(f"  {who} at {Path(path).name}:{number}, in {match[2]}:  {text}")
    return ["", "In your file:", *found] if found else []
