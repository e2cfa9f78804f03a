"""A program with a time-out, and nothing of it left afterwards.

Called by: `report`, for each part. Imports no torch.

A part starts ranks, and ranks start processes, some with a session of their own. All inherit a mark in
their environment, and what carries the mark is ended with the part, whatever it has become.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

MARK = "MINIMEGATRON_GPU_PART"
ENDING_SECONDS = 5.0
"""How long to wait for what a kill has not ended. A call into a driver may keep a process for ever."""


class Ended(NamedTuple):
    """How a program ended."""

    code: int | None
    """Its exit code, negative for a signal; None if its time was up."""
    seconds: float
    left: int = 0
    """Processes that a kill did not end."""

    def in_words(self) -> str:
        """
        >>> Ended(-9, 1.0).in_words(), Ended(None, 60.0).in_words()
        ('killed by SIGKILL', 'ended after 60 s, its time')
        """
        left = f"; {self.left} processes could not be ended" if self.left else ""
        if self.code is None:
            return f"ended after {self.seconds:.0f} s, its time{left}"
        if self.code >= 0:
            return f"exit code {self.code}{left}"
        names = {one.value: one.name for one in signal.Signals}
        return f"killed by {names.get(-self.code, f'signal {-self.code}')}{left}"


def run_limited(
    command: Sequence[str],
    seconds: float,
    log: Path,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Runs `command` in `folder` for at most so many seconds; what it prints goes into `log`.

    A file takes the output, so a process that is left behind cannot keep a reader waiting.
    """
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    begun = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**(os.environ if environment is None else environment), MARK: mark},
            start_new_session=True,
        )
    code, left = None, 0
    try:
        code = process.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        pass
    finally:
        taken = time.monotonic() - begun
        left = end_all(process, mark)
    return Ended(code, taken, left)


def end_all(process: subprocess.Popen, mark: str) -> int:
    """Ends the process and all with the mark; how many are there still."""
    if process.poll() is None:
        process.kill()
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        _send(os.killpg, process.pid)
        for pid in (found := marked(mark)):
            _send(os.kill, pid)
        if process.poll() is not None and not found:
            return 0
        if time.monotonic() > deadline:
            return len(found) or 1
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """The processes whose environment has the mark. Empty where the system has no such list."""
    wanted = f"{MARK}={mark}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes():
                found.append(int(path.parent.name))
        except (OSError, ValueError):  # it has ended, or is somebody else's
            continue
    return found


def _send(send, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, signal.SIGKILL)
