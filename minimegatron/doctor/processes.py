"""What the system tells of a process: whether it runs, computes or is stopped, and its Python stack.

Torch-free. Megatron has no counterpart.
"""

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

STACK_SIGNAL = signal.SIGUSR2
"""Sent to a rank to make it write its Python stacks to its file, whatever it is doing."""

STACK_SECONDS = 2.0
"""How long to wait for stacks. A stopped process writes none, one just begun has no file yet."""

FRAME = re.compile(r'File "([^"]*)", line (\d+)(?: in (\S+))?')
"""A line of a Python stack: file, number, function."""
OWN_THREADS = (
    "_die_with_parent",
    "doctor/session.py",
    "doctor/inquiry.py",
    "training/failures.py",
)
"""Threads that wait in every rank and say nothing about what it does."""

OWN_FRAMES = (
    "multiprocessing/",
    "minimegatron/launching/launcher.py",
    "<frozen runpy>",
    "<string>",
)
"""The outermost frames of every launched rank, likewise."""


IN_BACKWARD = re.compile(
    r'(torch/autograd/graph.py", line \d+ in _engine_run_backward'
    r'|pipeline_parallel/steps.py", line \d+ in run_backward)$'
)
"""Where the main thread stands while autograd works in threads of its own, one per GPU."""
OF_PYTHON = re.compile(r'/threading.py", line \d+ in _bootstrap$')
"""The outermost frame of a thread that Python has started. Autograd starts its own without Python."""
BACKWARD_NOTE = "  (above: autograd's own thread; below: the main thread, which waits for it)"

BETWEEN = (
    "minimegatron/core/tracing.py",
    "minimegatron/doctor/",
    "minimegatron/backend/",
    "distributed/c10d_logger.py",
)
"""Frames between the ones a reader looks for."""


class Sample(NamedTuple):
    """A process at a moment."""

    letter: str
    """The state of its main thread: R runs or is ready to, S and D wait, T is stopped, Z has ended."""
    cpu_seconds: float
    """Used so far, by all threads."""
    is_ready: bool
    """Whether a thread of it runs or is ready to: gloo carries messages in threads of its own."""


def sample(pid: int) -> Sample | None:
    """The process's state; None where the system does not tell. A process that is gone is "Z"."""
    if not _is_proc_ours():
        return None if _exists(pid) else Sample("Z", 0.0, False)
    try:
        letter, *fields = _stat(Path(f"/proc/{pid}"))
        cpu_seconds = (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
        return Sample(letter, cpu_seconds, letter == "R" or _has_ready_thread(pid))
    except (FileNotFoundError, ProcessLookupError):
        return Sample("Z", 0.0, False)
    except PermissionError:  # a container's rules
        return None


def _is_proc_ours() -> bool:
    """Whether /proc is there and has our numbers: a container may see that of the host."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _has_ready_thread(pid: int) -> bool:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        # A thread may end while we look.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if _stat(thread)[0] == "R":
                return True
    return False


def _stat(path: Path) -> list[str]:
    """The fields from the state on; before it stands a name, in which anything may stand."""
    return (path / "stat").read_text().rpartition(")")[2].split()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# -- Stacks --


def offer_stacks(path: str | os.PathLike) -> IO[str]:
    """In a rank: from now on `read_stacks` works. The file must stay open; close it after the end."""
    stack_file = open(f"{path}.new", "w")  # noqa: SIM115
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
    # The file under its own name says that the signal would not end us any more.
    os.rename(stack_file.name, path)
    return stack_file


def read_stacks(pids: Mapping[int, int], files: Mapping[int, Path]) -> dict[int, str]:
    """What each rank is doing now: its Python stacks, innermost call first. By a signal.

    For a rank that does not answer otherwise (`inquiry`): the signal may end one that computes in
    Python at this very moment. It works in a rank stuck inside a C++ wait too, which goes on as
    before. `pids` and `files` are by rank. Empty for a rank that does not answer.
    """
    before = {rank: len(_text(files[rank])) for rank in pids if files[rank].exists()}
    for rank in before:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pids[rank], STACK_SIGNAL)
    stacks, waiting = dict.fromkeys(pids, ""), set(before)
    last: dict[int, str] = dict.fromkeys(before, "")
    give_up = time.monotonic() + STACK_SECONDS
    while waiting and time.monotonic() < give_up:
        time.sleep(0.05)
        for rank in list(waiting):
            # The file grows line by line: done when it has grown, and then stays as it is.
            text = _text(files[rank])[before[rank] :]
            if text and text == last[rank]:
                waiting.discard(rank)
            last[rank] = stacks[rank] = text
    return {rank: without_own_threads(text) for rank, text in stacks.items()}


def read_last_words(file: Path) -> str:
    """Where the rank was when a bad access to memory ended it; "" if none did. See `offer_stacks`."""
    _, fatal, stacks = _text(file).rpartition("Fatal Python error")
    return without_own_threads(f"{fatal}{stacks}".partition("Extension modules:")[0])


def without_own_threads(stacks: str) -> str:
    """The threads' stacks but those of the threads that this package starts in every rank."""
    threads = [
        part
        for part in stacks.split("\n\n")
        if not any(own in part for own in OWN_THREADS if not part.startswith("Current"))
    ]
    return "\n\n".join(threads).strip()


def main_stack(stacks: str) -> str:
    """Of several threads' stacks, the one of the main thread, without what is in every rank.

    A backward pass on a GPU runs in a thread of autograd's; then that one's frames stand above.
    Each line of source stands below its frame, where it can be read.

    >>> print(main_stack('''Thread 0x1 (most recent call first):
    ...   File "a.py", line 1 in wait
    ...
    ... Current thread 0x2 (most recent call first):
    ...   File "b.py", line 7 in train
    ...   File "minimegatron/launching/launcher.py", line 9 in _report'''))
      File "b.py", line 7 in train
    """
    threads = [part.strip("\n") for part in stacks.split("\n\n") if part.strip()]
    # The system hands a signal to the main thread, unless that one refuses signals.
    chosen = next((part for part in threads if part.startswith("Current thread")), None)
    if chosen is None:
        chosen = threads[-1] if threads else ""
    frames = _frames(chosen)
    if frames and IN_BACKWARD.search(frames[0]):
        frames = [*_frames_in_backward(threads), *frames]
    while frames and any(own in frames[-1] for own in OWN_FRAMES):
        frames.pop()
    lines = []
    for frame in frames:
        place = FRAME.search(frame)
        source = linecache.getline(place[1], int(place[2])).strip() if place else ""
        lines += [frame, f"    {source}"] if source else [frame]
    return "\n".join(lines)


def _frames(thread: str) -> list[str]:
    """The lines of one thread's stack that a reader looks for."""
    return [line for line in thread.splitlines()[1:] if not any(b in line for b in BETWEEN)]


def _frames_in_backward(threads: list[str]) -> list[str]:
    """Those of the thread of autograd's that runs Python, and a note; empty if none does."""
    for thread in threads:
        frames = [] if thread.startswith("Current thread") else _frames(thread)
        if frames and FRAME.search(frames[-1]) and not OF_PYTHON.search(frames[-1]):
            return [*frames, BACKWARD_NOTE]
    return []


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
