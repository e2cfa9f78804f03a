"""Parts that go wrong in every way that a part on a GPU may: for test_report.py. None needs torch."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.gpu.place import Finding, Place, each

FOLDER = "MINIMEGATRON_PLANTED_FOLDER"
"""Where `hangs` notes the processes that it has started."""


def holds(place: Place) -> Iterator[Finding]:
    yield Finding("x", "1", "at most 2")


def does_not_hold(place: Place) -> Iterator[Finding]:
    yield Finding("x", "3", "at most 2", False)


def finds_nothing(place: Place) -> Iterator[Finding]:
    yield from ()


def raises(place: Place) -> Iterator[Finding]:
    yield Finding("before", "1")
    raise ArithmeticError("planted\nsecond line")


def floods(place: Place) -> Iterator[Finding]:
    """More output than a report has room for."""
    yield Finding("before", "1")
    for _ in range(300):
        os.write(1, b"x" * (1 << 20))
    os.write(1, b"\nlast words\n")


def goes_on(place: Place) -> Iterator[Finding]:
    """A section that fails does not take the next one along."""

    def fails() -> Iterator[Finding]:
        yield Finding("before", "1")
        raise ArithmeticError("planted")

    yield from each(fails, partial(holds, place))


def is_killed(place: Place) -> Iterator[Finding]:
    yield Finding("before", "1")
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(place: Place) -> Iterator[Finding]:
    """Ends as if all were well, in the middle."""
    yield Finding("before", "1")
    os._exit(0)


def prints_nonsense(place: Place) -> Iterator[Finding]:
    """To its output, and into the file of its findings."""
    os.write(1, bytes(range(256)) * 4000 + b"\x1b[2J last words\n")
    yield Finding("before", "\x1b[31m|*`<b>\x00")
    (file,) = [path for path in sys.argv if path.endswith("findings")]
    with Path(file).open("ab") as findings:
        findings.write(b'\xff\xfe{"what": 1}\n[1, 2\n' + b"[" * 5000 + b'\n{"done": 1}\n')
    yield Finding("after", "1")


def hangs(place: Place) -> Iterator[Finding]:
    """With children that ignore signals, one of them in a session of its own."""
    yield Finding("before", "1")
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    children = [
        subprocess.Popen([sys.executable, "-c", program], start_new_session=apart)
        for apart in (False, True)
    ]
    note = Path(os.environ[FOLDER]) / f"{os.getpid()}"
    note.write_text(" ".join(str(child.pid) for child in children))
    time.sleep(600)
