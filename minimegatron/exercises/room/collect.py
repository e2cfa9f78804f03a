"""Starts a student's room, and collects what it says: no judgement yet.

Megatron has no counterpart.
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
from dataclasses import asdict, replace
from pathlib import Path

from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.collected import Collected, Question, crowding, students_lines
from minimegatron.exercises.room.pipes import KeptText
from minimegatron.exercises.room.plain_data import MOST_BYTES
from minimegatron.exercises.room.room import Job

ALONE_SECONDS = 3.0
"""For all cases of a room without ranks."""
LOOK_SECONDS = 0.1
"""How often somebody looks whether it has ended."""
STACK_SECONDS = 1.0
"""How long it may take to say where it is."""
ROOT = str(Path(__file__).parents[3])
PROGRAM = (
    f"import sys; sys.path[:0] = [] if {ROOT!r} in sys.path else [{ROOT!r}]; "
    "from minimegatron.exercises.room.alone_side import main; main()"
)


def collect(
    question: Question, path: Path, patience: float = 1.0, control: bool = False
) -> Collected:
    """Starts the room and waits for its end."""
    job = Job(question.module, str(path.resolve()), question.cases, control)
    if question.is_alone:
        return _collect_alone(job, ALONE_SECONDS * patience * crowding())
    on_ranks = importlib.import_module("minimegatron.exercises.room.on_ranks")
    return on_ranks.collect_on_ranks(job, question.num_ranks, patience)


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
        printed, said = KeptText(), bytearray()
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
    process: subprocess.Popen, printed: KeptText, lines: int, said: bytearray, deadline: float
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
