"""Nothing that is printed ends a run: closed streams, full disks, letters that do not exist there.

Torch-free. Megatron has no counterpart.

A log is worth less than the run that it tells of. So a program that trains, and each of its ranks,
makes its standard streams safe first:

* one that is closed goes nowhere. Its number is taken, so that no socket gets it, and nothing is
  printed into a connection;
* a letter that the stream's encoding does not have is written as an escape, `\\u2588`;
* if a write fails (a full disk, a reader that has left), one sentence says so on standard error, and
  what comes after goes nowhere.

And `fitted` breaks the lines of a log that are read on a terminal.
"""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

NAMES = ("stdin", "stdout", "stderr")
"""In the order of their file descriptors."""


def keep_printing() -> None:
    """Makes this process's standard streams safe. May be repeated; a notebook's stay as they are."""
    open_streams()
    for name in NAMES[1:]:
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            setattr(sys, name, _Unfailing(stream, name))


def open_streams() -> None:
    """The first two alone, for a program whose output is all that it does."""
    take_numbers()
    for name in NAMES:
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for name in NAMES[1:]:
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.reconfigure(errors="backslashreplace")


def take_numbers() -> None:
    """Opens the null device where descriptor 0, 1 or 2 is free."""
    for number in range(len(NAMES)):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest number that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


class _Unfailing:
    """A stream of text whose writes do not fail."""

    def __init__(self, stream: io.TextIOWrapper, name: str):
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        with self._reported():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._reported():
            self._stream.flush()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What the stream still holds goes nowhere too.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if self._name == "stdout":
                print(
                    f"minimegatron: nothing more can be written to standard output "
                    f"({error.strerror}); the run goes on without it",
                    file=sys.stderr,
                    flush=True,
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# -- Lines that fit the terminal they are read on; a file gets them as they are --


def fitted(message: str) -> str:
    """`message` for standard output: there, if it is a terminal, no line is wider than it."""
    if sys.stdout is None or not sys.stdout.isatty():
        return message
    return fit(message, shutil.get_terminal_size().columns)


def fit(message: str, columns: int) -> str:
    """The message, with lines of more than `columns` characters broken.

    A line of figures is broken between two of them, any other between two words; a rule is cut.
    What follows stands three characters further in than the line itself.

    >>> print(fit(" iteration 10/60 | lm loss 5.2456 | 77 ms/step", 40))
     iteration 10/60 | lm loss 5.2456
        | 77 ms/step
    >>> fit("-" * 50, 40) == "-" * 40
    True
    """
    return "\n".join(_broken(line, columns) for line in message.split("\n"))


def _broken(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    if not line.strip("-"):
        return line[:columns]
    indent = " " * (len(line) - len(line.lstrip()))
    separator = " | " if " | " in line else " "
    first, *others = line.lstrip().split(separator)
    lines = [indent + first]
    for piece in others:
        if len(lines[-1]) + len(separator) + len(piece) <= columns:
            lines[-1] += separator + piece
        else:
            lines.append(f"{indent}   {(separator + piece).lstrip()}")
    return "\n".join(lines)
