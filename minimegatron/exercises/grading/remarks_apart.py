"""Asks for remarks in a process of its own, with limits: a file may be made so that reading it is slow.

Torch-free. Megatron has no counterpart.

Python's own reader can take minutes and gigabytes for some lines; meanwhile its process stands still.
"""

import contextlib
import importlib
import json
import resource
import subprocess
import sys
from pathlib import Path

from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.grading.remarks import remarks_on

MEMORY, SECONDS, MOST_WAIT = 1 << 30, 10, 60
"""Of the process: bytes, seconds of a processor, and seconds on the clock."""
UNREAD = (
    f"it was not looked at: reading it takes more than {MEMORY >> 20} MiB of memory or {SECONDS} s"
)
ROOT = str(Path(__file__).parents[3])
PROGRAM = (
    f"import sys; sys.path[:0] = [] if {ROOT!r} in sys.path else [{ROOT!r}]; "
    "from minimegatron.exercises.grading.remarks_apart import serve; serve()"
)


def remarks_apart(exercise: Exercise, source: str, seconds: int = SECONDS) -> tuple[str, ...]:
    """What `remarks_on` says; where it says nothing in time, that."""
    asked = json.dumps([exercise.module, source, seconds]).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-s", "-c", PROGRAM],
            input=asked,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=MOST_WAIT,
        )
        return tuple(json.loads(done.stdout))
    except (subprocess.TimeoutExpired, ValueError):
        return (UNREAD,)


def serve() -> None:
    """Reads what is asked from the standard input; writes JSON."""
    module, source, seconds = json.load(sys.stdin)
    for kind, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, seconds)):
        # macOS has no limit on memory.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))
    print(json.dumps(remarks_on(importlib.import_module(module).EXERCISE, source)))
