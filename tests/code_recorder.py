"""What one thread runs of one package: its functions, its lines, and in order its calls.

    with Recorder(folder) as recorder: ...      # then recorder.record
    with wire_noted(recorder): ...              # its calls of a socket too

`code_shares` holds a record against the source, `plain_walks` follows its calls. `sys.settrace` works
on every Python that the package runs on; `sys.monitoring` exists from 3.12 on alone.
"""

import contextlib
import inspect
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

WIRE = "the wire"
"""The file of a `Call` of a socket."""
GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
SENDING, RECEIVING = ("send", "sendall", "sendmsg"), ("recv", "recv_into", "recvmsg")


class Call(NamedTuple):
    """One call of a function of the package; or one of a socket's, by a function of the package."""

    file: str
    """Below the package's folder; or `WIRE`."""
    name: str
    """Qualified, such as `ModelChunk.forward_step`; of a socket "send" or "recv"."""
    depth: int
    """How many frames of the package there are, with this one."""


@dataclass
class Record:
    """By file below the package's folder: numbers of lines; and all calls in order."""

    lines: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Lines of code that began to run. Of a statement on several lines, some of them."""
    entered: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Functions that were called: the first line of each, its first decorator's if it has any."""
    calls: list[Call] = field(default_factory=list)
    """Of functions alone: a lambda or a comprehension is a part of the function around it. A generator
    is called once, when its first value is asked for."""

    def add(self, other: "Record") -> None:
        """Takes the lines and functions of another record too; the calls stay."""
        for mine, others in ((self.lines, other.lines), (self.entered, other.entered)):
            for file, numbers in others.items():
                mine[file] |= numbers


class Recorder:
    """Records this thread in a `with` block, from the first call on; blocks may be entered in turn.

    A call of a function before the block is none of the block's, but the lines that it runs are those
    of the recorder in whose block it was called.
    """

    def __init__(self, package: Path):
        self._package, self.record = f"{package}/", Record()
        self._depth = 0
        self._tracers: dict[CodeType, Callable | None] = {}
        self._outer: Callable | None = None

    def __enter__(self) -> "Recorder":
        self._outer = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *unused: Any) -> None:
        sys.settrace(self._outer)

    def note_wire(self, name: str) -> None:
        """A function of the package calls a socket."""
        self.record.calls.append(Call(WIRE, name, self._depth + 1))

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Callable | None:
        code = frame.f_code
        if code not in self._tracers:
            is_ours = code.co_filename.startswith(self._package)
            self._tracers[code] = self._tracer_of(code) if is_ours else None
        tracer = self._tracers[code]
        if tracer is not None:
            self._depth += 1
            # A generator that goes on stands at a later line.
            is_new = not code.co_flags & GENERATORS or frame.f_lineno == code.co_firstlineno
            if is_new and _is_function(code):
                file = code.co_filename.removeprefix(self._package)
                self.record.entered[file].add(code.co_firstlineno)
                self.record.calls.append(Call(file, code.co_qualname, self._depth))
        return tracer

    def _tracer_of(self, code: CodeType) -> Callable:
        lines = self.record.lines[code.co_filename.removeprefix(self._package)]

        def trace(frame: FrameType, event: str, argument: Any) -> Callable:
            if event == "line":
                lines.add(frame.f_lineno)
            elif event == "return":  # also of a generator that will go on, and of an exception
                self._depth -= 1
            return trace

        return trace


def _is_function(code: CodeType) -> bool:
    """Not the body of a class or of a module, no lambda and no comprehension."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name[0] != "<"


@contextlib.contextmanager
def wire_noted(recorder: Recorder) -> Iterator[None]:
    """In a `with` block: the recorder's calls have those that send to or receive from a socket."""

    def noted(method: Callable, name: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder.note_wire(name)
            return method(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for names in (SENDING, RECEIVING):
            for name in names:
                method = noted(getattr(socket.socket, name), names[0])
                stack.enter_context(mock.patch.object(socket.socket, name, method))
        yield
