"""A process that has imported torch once, and is forked for every cell.

Runs no student's code itself. Megatron has no counterpart.

It takes the ends of connections through a socket. At the other end of each, the grader writes lines of
JSON: first which room, and whose file; then one question after the other. What the file's functions
answered goes back; it is judged there, by a process that runs no student's code (`judge`).
"""

import importlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from minimegatron.exercises.check.runner import PRELOADED, hide_memory
from minimegatron.exercises.exercise import find
from minimegatron.exercises.grading.cell import Limits, Order, run_cell
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.collect import collect
from minimegatron.exercises.room.collected import Collected, Question
from minimegatron.exercises.room.plain_data import NotPlain
from minimegatron.exercises.room.reading import check_source


def serve(file: int) -> None:
    """Forks until the socket's other end is closed."""
    for name in PRELOADED:
        importlib.import_module(name)
    on_ranks = importlib.import_module("minimegatron.exercises.room.on_ranks")
    # A cell's process is forked for one check, has no threads, and cannot reach a server outside.
    on_ranks.StudentRanks.start_method = "fork"
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
                _serve_cell(socket.socket(fileno=files[0]))
            finally:
                os._exit(1)
        os.close(files[0])


def _serve_cell(connection: socket.socket) -> None:
    lines = connection.makefile("rb")
    asked = json.loads(lines.readline())
    room = asked["room"] | {"limits": Limits(**asked["room"]["limits"])}
    try:
        run_cell(connection, Order(**room), lambda work: _answers(lines, asked, work))
    except Exception as error:
        words = f"no room of kind {room['kind']!r}: {error}"
        connection.sendall(json.dumps({"defect": words}).encode() + b"\n")
        raise


def _answers(lines: BinaryIO, asked: dict, work: Path) -> Iterator[str]:
    """What the room says to each question, until no more comes."""
    hide_memory()
    for number, line in enumerate(lines):
        options = json.loads(line)
        # Written anew for each question: a room may have changed what it was given.
        folder = work / f"question-{number}-{secrets.token_hex(4)}"
        folder.mkdir()
        path = folder / asked["file"]
        path.write_text(asked["source"], encoding="utf-8", newline="")
        yield json.dumps({"collected": _answer(path, **options)})


def _answer(path: Path, question: dict, **options: Any) -> str:
    question = Question(**question)
    exercise = find(question.module.split(".")[-2].partition("_")[0])
    if (unfit := check_source(exercise, path)) is not None:
        return Collected([], ending=unfit.kind, text=unfit.text).to_line()
    try:
        return collect(question, path, **options).to_line()
    except NotPlain as error:
        return Collected(
            [], ending=verdict.RAISED, text=f"your code said too much: {error}"
        ).to_line()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
