"""The grader's side of cells: starts the process that makes them, and asks each what its file answers.

Torch-free. Megatron has no counterpart.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import Any

from minimegatron.core.json_text import parse_json
from minimegatron.exercises.check.runner import ROOT
from minimegatron.exercises.room.collected import Collected, Question

KEPT = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "TMPDIR")
"""Of the environment, what cells get."""
MOST_ANSWER = 256 << 20
"""Bytes of one answer of a cell."""
NUM_ROOMS = 1000
"""Numbers of one grading's rooms: far more than exist at a time."""
MOST_GRADINGS = 32
"""With users of their own, beside each other on one machine."""
SPARE_SECONDS = 30
"""How long after its limit a cell may take to end."""
PROGRAM = (
    "import sys; sys.path[:0] = [] if {root!r} in sys.path else [{root!r}]; "
    "from minimegatron.exercises.grading.template import serve; serve({file})"
)


class Template:
    """The process that cells are forked from, for the length of a `with` block."""

    def __enter__(self) -> "Template":
        ours, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._first_number, self._claim = 0, None
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        if path := environment.get("PYTHONPATH"):
            environment["PYTHONPATH"] = os.pathsep.join(
                map(os.path.abspath, path.split(os.pathsep))
            )
        program = PROGRAM.format(root=ROOT, file=theirs.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-c", program],
            stdin=subprocess.DEVNULL,
            cwd="/",
            env=environment | {"OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        if not ours.recv(1):
            raise RuntimeError("the process that cells are made from did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        self._process.wait(timeout=30)
        if self._claim is not None:
            self._claim.close()

    def claim_users(self) -> None:
        """From here on, rooms have numbers that no other grading on this machine has.

        A room kills every process of its user. Raises ValueError if all numbers are taken.
        """
        for grading in range(MOST_GRADINGS):
            # The kernel keeps such a name for one socket, and forgets it with the process.
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0minimegatron-users-{grading}")
            except OSError:
                claim.close()
                continue
            self._claim, self._first_number = claim, grading * NUM_ROOMS
            return
        raise ValueError(f"{MOST_GRADINGS} gradings go on here already; wait for one of them")

    def cell(self, room: dict[str, Any], file: str, source: str, seconds: float) -> "Cell":
        """A new cell, in which `source` is `file`."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._control, [b"c"], [theirs.fileno()])
        room = room | {"number": self._first_number + room["number"]}
        asked = {"room": room, "file": file, "source": source}
        return Cell(ours, asked, seconds)


class CellEnded(Exception):
    """The cell gave no answer; the message says why."""


class Cell:
    """A cell, for the length of a `with` block: closing the connection ends it."""

    def __init__(self, connection: socket.socket, asked: dict[str, Any], seconds: float):
        self._connection = connection
        connection.settimeout(seconds + SPARE_SECONDS)
        self._lines = connection.makefile("rb")
        self._send(asked)

    def __enter__(self) -> "Cell":
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._connection.close()

    def end(self) -> None:
        """Ends it from another thread: whoever waits for its answer hears that there is none."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def collect(self, question: Question, patience: float, control: bool = False) -> Collected:
        """What the room says. Raises CellEnded."""
        asked = {"question": asdict(question), "patience": patience, "control": control}
        try:
            self._send(asked)
            line = self._lines.readline(MOST_ANSWER)
            answer = parse_json(line, "the cell's answer") if line else {}
            if "collected" in answer:
                return Collected.from_line(answer["collected"])
        except (ValueError, TypeError) as error:
            raise CellEnded(f"it answered nonsense: {error}") from None
        except OSError as error:
            raise CellEnded(f"it cannot be reached: {error}") from None
        for key in ("defect", "ended"):
            if isinstance(answer, dict) and answer.get(key):
                raise CellEnded(str(answer[key]))
        raise CellEnded("it ended without an answer")

    def _send(self, words: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(words).encode() + b"\n")
