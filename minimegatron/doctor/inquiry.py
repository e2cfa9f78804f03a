"""A question to a rank, where its program stands and what its GPU waits for; and the rank's answers.

The first answer is its Python stacks, the second what torch's flight recorder knows, as JSON, which
`flight_recorder` reads. Torch-free: a rank looks for torch among what it has imported. Megatron has no
counterpart.

A thread of the rank reads a pipe in the watch's folder. Who watches writes a number there, and the
thread writes its answers into files with that number. The thread can run while the program computes
in Python. It can also run while the program waits in a call that lets other threads run, such as
`.item()` and `torch.cuda.synchronize`. Otherwise there is no answer. The doctor then gets the stacks by
a signal (`processes`), and does not learn what the GPU waits for.

While a program computes, that signal is dangerous: it may read a frame that is just being made, and
then the system ends the rank. A thread reads frames while no other thread of Python's runs.
"""

import contextlib
import itertools
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ANSWER_SECONDS = 2.0
"""How long to wait for both answers, of all ranks together."""
JOIN_SECONDS = 1.0
"""How long the thread of a rank may take to end. It may be stuck in a call to the GPU."""
MOST_BYTES = 1 << 24
"""A longer answer is not read. torch writes some 700 bytes per call, and remembers 2000."""

_STOP = b"\0"
_MOST_QUESTIONS = 255
"""Questions are numbered 1 to this, and again from 1; each is one byte."""
_questions = itertools.count()


def question_path(folder: Path, rank: int) -> Path:
    """The pipe on which a rank is asked."""
    return folder / f"{rank}.question"


def stacks_path(folder: Path, rank: int, number: int) -> Path:
    """Where a rank puts its stacks, in answer to a question."""
    return folder / f"{rank}.stacks-{number}"


def answer_path(folder: Path, rank: int, number: int) -> Path:
    """Where it puts what the flight recorder knows."""
    return folder / f"{rank}.answer-{number}"


# -- In the rank --


@contextlib.contextmanager
def offer_answers(folder: Path, rank: int) -> Iterator[None]:
    """In a rank, for the length of a `with` block: it can be asked, if the folder may have pipes."""
    path = question_path(folder, rank)
    try:
        os.mkfifo(path)
        # For writing too, so that a read waits when nobody asks.
        pipe = os.open(path, os.O_RDWR)
    except OSError:
        yield
        return
    thread = threading.Thread(
        target=_answer, args=(pipe, folder, rank), name="hang doctor's questions", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        os.write(pipe, _STOP)
        thread.join(JOIN_SECONDS)
        if not thread.is_alive():
            os.close(pipe)


def _answer(pipe: int, folder: Path, rank: int) -> None:
    while (question := os.read(pipe, 1)) != _STOP:
        # The stacks first: to ask for the other may take for ever.
        for path_of, say in ((stacks_path, _stacks), (answer_path, _flight_record)):
            path = path_of(folder, rank, question[0])
            # An error here must not end the rank: it may only be slow.
            with contextlib.suppress(Exception):
                new = path.with_name(f"{path.name}.new")
                new.write_bytes(say())
                os.rename(new, path)


def _stacks() -> bytes:
    """Of all threads but this one, as `faulthandler` writes them."""
    own, main = threading.get_ident(), threading.main_thread().ident
    lines = []
    for thread, frame in sys._current_frames().items():
        if thread == own:
            continue
        which = "Current thread" if thread == main else "Thread"
        lines += ["", f"{which} {thread:#018x} (most recent call first):"]
        while frame is not None:
            code, line = frame.f_code, frame.f_lineno or "???"
            lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
            frame = frame.f_back
    return "\n".join(lines[1:]).encode(errors="replace")


def _flight_record() -> bytes:
    """What torch remembers of NCCL's calls, as JSON; empty where this torch has no NCCL."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return b""
    # With its calls, also those that are over: of a batch, only its own entry is over, its parts never.
    text = dump(True, False)
    return text if isinstance(text, bytes) else text.encode()


# -- In the process that watches --


class Inquiry:
    """One question to several ranks, which they may answer while something else is asked of them."""

    def __init__(self, folder: Path, ranks: Iterable[int]):
        # By its number, an answer that comes too late is not taken for one to the next question.
        self._folder, self._number = folder, 1 + next(_questions) % _MOST_QUESTIONS
        self._give_up = time.monotonic() + ANSWER_SECONDS
        self._asked = [rank for rank in ranks if self._ask(rank)]

    def _ask(self, rank: int) -> bool:
        """False if nobody would hear it."""
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW
            pipe = os.open(question_path(self._folder, rank), flags)
            try:
                if stat.S_ISFIFO(os.fstat(pipe).st_mode):
                    return os.write(pipe, bytes([self._number])) == 1
            finally:
                os.close(pipe)
        return False

    def stacks(self) -> dict[int, str]:
        """By rank, the stacks that have come within `ANSWER_SECONDS` after the question."""
        found = self._collect(stacks_path)
        return {rank: text.decode(errors="replace") for rank, text in found.items()}

    def answers(self) -> dict[int, bytes]:
        """By rank, the flight recorders' answers that have come within that time."""
        return self._collect(answer_path)

    def _collect(self, path_of: Callable[[Path, int, int], Path]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        waiting = list(self._asked)
        while True:
            for rank in list(waiting):
                text = _read(path_of(self._folder, rank, self._number))
                if text is not None:
                    waiting.remove(rank)
                    found[rank] = text
            if not waiting or time.monotonic() > self._give_up:
                return found
            time.sleep(0.02)


def _read(path: Path) -> bytes | None:
    """Reads an answer's file and removes it. None if there is no file yet; empty if the file is not
    an answer."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError:
        return b""
    try:
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode) or state.st_size > MOST_BYTES:
            return b""
        with open(file, "rb", closefd=False) as opened:
            return opened.read(MOST_BYTES)
    finally:
        os.close(file)
        with contextlib.suppress(OSError):
            path.unlink()
