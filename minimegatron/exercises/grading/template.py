"""A process that has imported torch once, and is forked for every cell.

Started by: `grade`. Calls: `cell`, `engine`. Runs no student's code itself. Megatron has no
counterpart.

It takes the ends of connections through a socket. At the other end of each, the grader has written
one line of JSON: which room, and what to check in it.
"""

import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from minimegatron.exercises.grading.cell import Limits, Order, run_cell
from minimegatron.exercises.runner import PRELOADED, hide_memory


def serve(file: int) -> None:
    """Forks until the socket's other end is closed."""
    for name in PRELOADED:
        importlib.import_module(name)
    engine = importlib.import_module("minimegatron.exercises.engine")
    # A cell's process is forked for one check, has no threads, and cannot reach a server outside.
    engine.StudentRanks.start_method = "fork"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=file)
    control.sendall(b"r")
    while True:
        word, files, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _serve_cell(engine, socket.socket(fileno=files[0]))
            finally:
                os._exit(1)
        os.close(files[0])


def _serve_cell(engine, connection: socket.socket) -> None:
    with connection.makefile() as lines:
        asked = json.loads(lines.readline())
    room = asked["room"] | {"limits": Limits(**asked["room"]["limits"])}
    try:
        run_cell(connection, Order(**room), lambda work: _answers(engine, asked, work))
    except Exception as error:
        words = f"no room of kind {room['kind']!r}: {error}"
        connection.sendall(json.dumps({"defect": words}).encode() + b"\n")
        raise


def _answers(engine, asked: dict, work: Path) -> Iterator[str]:
    """A verdict per run, until one is not as it should be."""
    hide_memory()
    exercise = importlib.import_module(asked["exercise"]).EXERCISE
    path = work / f"{exercise.name}.py"
    path.write_text(asked["source"])
    for run in asked["runs"]:
        found = engine.check_file(exercise, path, **run)
        yield found.to_json()
        if not found.has_passed:
            return


if __name__ == "__main__":
    serve(int(sys.argv[1]))
