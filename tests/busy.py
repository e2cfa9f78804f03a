"""Other work for the processors, for tests that must not depend on a quiet machine.

Used by: `stress`, `stress_exits`.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(9999))"
"""Ends with the process that started it, however that one ends."""


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen]]:
    """That many processes that compute all the time, for the length of a `with` block."""
    loops: list[subprocess.Popen] = []
    try:
        for _ in range(count):
            command = [sys.executable, "-c", LOOP, str(os.getpid())]
            loops.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
