"""Records which lines one training step runs. Another observer, beside the `Recorder`.

Megatron has no counterpart.

`sys.settrace` reports each line of the thread that runs the step. It is on during that one step; before
and after it, nothing is in the way of the program. The step itself takes up to three times as long.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from minimegatron.core import tracing
from minimegatron.core.tracing import Call
from minimegatron.tracing.recorded_source import SourceTexts, is_ours, module_name
from minimegatron.tracing.step_lines import NONE, FunctionLines, LinesCall, StepLines

STEPS = ("train-step", "forward-backward")
"""What is counted as a step: calls of `train_step`; in a program with its own loop, of a schedule."""
MAX_CALLS = 200_000
"""Calls kept of a step; about 100 MB."""
SEAM = tracing.traced.__code__.co_filename
LINK = tracing.traced("", None)(lambda: None).__code__
"""What a traced function is called through: while somebody watches it calls `describe` alone."""
WATCHERS = str(Path(__file__).parent)
GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

FUNCTION, PART, WATCHER, OTHER = range(4)
"""A function of the program; a lambda or comprehension; one that watches the program; all the rest."""


@dataclass(slots=True, eq=False)
class _Call:
    code: CodeType
    parent: int
    line: int
    """Where its parent stood."""
    event: int
    lines: set[int] = field(default_factory=set)
    at: int = 0
    """Where it stands, while it runs."""
    number: int = 0


class LineRecorder:
    """Keeps the lines and calls of one step while it is an observer.

    Args:
        step: which one, counted from 0 over the calls of `train_step`. Where a program calls a schedule
            by itself, over those.
        event_of_call: says, when a traced call begins, its index in the recording; None for a call
            that is not recorded.
    """

    def __init__(self, step: int, event_of_call: Callable[[], int | None]):
        self.is_cut = False
        self._step, self._event_of_call = step, event_of_call
        self._counted: str | None = None
        self._num_steps, self._num_open = 0, 0
        self._root: Call | None = None
        self._calls: list[_Call] = []
        self._stack: list[_Call] = []
        # By identity: to hash a code object is slow. All three keep it alive.
        self._kinds: dict[int, tuple[int, CodeType]] = {}
        self._owners: dict[int, CodeType] = {}
        self._generators: dict[int, _Call] = {}
        self._awaited: tuple[str, int, int] | None = None
        self._num_muted = 0
        self._until_end = contextlib.ExitStack()

    # -- As an observer --

    def start(self, call: Call) -> None:
        """A traced call begins; with the step that is wanted, so does the recording."""
        if self._begins_step(call):
            self._begin(call)
        event = self._event_of_call() if self._root is not None else None
        if event is not None:
            self._awaited = (call.file, call.line, event)

    def stop(self, call: Call) -> None:
        """A traced call ends."""
        if call.name == self._counted:
            self._num_open -= 1
        if call is self._root:
            self._root = None
            self._until_end.close()

    def _begins_step(self, call: Call) -> bool:
        if call.name not in STEPS:
            return False
        self._counted = self._counted or call.name
        if call.name != self._counted:
            return False
        self._num_open += 1
        self._num_steps += self._num_open == 1
        return self._num_open == 1 and self._num_steps - 1 == self._step

    def _begin(self, call: Call) -> None:
        self._root = call
        self._until_end.callback(sys.settrace, sys.gettrace())
        # A GPU's backward would run in a thread of its own, which nobody traces.
        self._until_end.enter_context(torch.autograd.set_multithreading_enabled(False))
        sys.settrace(self._enter_frame)

    # -- What the interpreter reports --

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Callable | None:
        """A frame is entered; returns what is told of its lines, None for nothing."""
        code = frame.f_code
        known = self._kinds.get(id(code))
        kind = self._learn(code) if known is None else known[0]
        if kind == OTHER:
            return None
        if kind == WATCHER:
            return self._mute(frame)
        if self._num_muted:
            return None
        if frame.f_back is not None and frame.f_back.f_code is LINK:
            return self._mute(frame)  # it describes a call to those who watch
        if kind == PART and (around := self._around(code)) is not None:
            return _tracer(around, [])
        call = self._call_of(frame)
        if call is None:
            return None
        self._stack.append(call)
        return _tracer(call, self._stack)

    def _mute(self, frame: FrameType) -> Callable:
        """Nothing that this frame calls is the program's."""
        self._num_muted += 1
        frame.f_trace_lines = False
        return self._leave_watcher

    def _leave_watcher(self, frame: FrameType, event: str, argument: Any) -> Callable:
        if event == "return":
            self._num_muted -= 1
        return self._leave_watcher

    def _learn(self, code: CodeType) -> int:
        kind = _kind_of(code)
        self._kinds[id(code)] = (kind, code)
        if kind == FUNCTION:
            self._owners.update({id(part): code for part in _parts_of(code)})
        return kind

    def _around(self, code: CodeType) -> _Call | None:
        """The innermost call of the function that this lambda or comprehension is a part of."""
        owner = self._owners.get(id(code))
        return next((call for call in reversed(self._stack) if call.code is owner), None)

    def _call_of(self, frame: FrameType) -> _Call | None:
        code = frame.f_code
        is_generator = bool(code.co_flags & GENERATORS)
        # A generator that goes on stands at a later line than its first.
        if is_generator and frame.f_lineno != code.co_firstlineno and id(code) in self._generators:
            return self._generators[id(code)]
        if len(self._calls) >= MAX_CALLS:
            self.is_cut = True
            return None
        parent, line = (self._stack[-1].number, self._stack[-1].at) if self._stack else (NONE, 0)
        call = _Call(code, parent, line, NONE, number=len(self._calls))
        if self._awaited is not None and self._awaited[:2] == (
            code.co_filename,
            code.co_firstlineno,
        ):
            call.event, self._awaited = self._awaited[2], None
        self._calls.append(call)
        if is_generator:
            self._generators[id(code)] = call
        return call

    # -- Afterwards --

    def step_lines(self, texts: SourceTexts) -> StepLines | None:
        """What was recorded, its functions' texts added to `texts`; None if the step never came."""
        if not self._calls:
            return None
        numbers: dict[str, int] = {}
        paths: list[dict[tuple[int, ...], int]] = []
        found = StepLines()
        for call in self._calls:
            before = call.code.co_firstlineno - 1
            key = _key_of(call.code, texts)
            if key not in numbers:
                numbers[key] = len(numbers)
                paths.append({})
                found.functions.append(FunctionLines(key))
            number = numbers[key]
            path = tuple(sorted(line - before for line in call.lines))
            path_number = paths[number].setdefault(path, len(paths[number]))
            line = 0
            if call.parent != NONE:
                line = call.line - self._calls[call.parent].code.co_firstlineno + 1
            found.calls.append(LinesCall(number, call.parent, line, call.event, path_number))
        for function, own in zip(found.functions, paths, strict=True):
            function.paths.extend(own)
        return found


def _tracer(call: _Call, stack: list[_Call]) -> Callable:
    """What the interpreter tells of a frame's lines and of its end. A part's frame is on no stack."""
    lines = call.lines

    def trace(frame: FrameType, event: str, argument: Any) -> Callable:
        if event == "line":
            call.at = number = frame.f_lineno
            lines.add(number)
        elif event == "return" and stack:  # so ends an exception too, and a generator's turn
            stack.pop()
        return trace

    return trace


def _kind_of(code: CodeType) -> int:
    file = code.co_filename
    if not is_ours(file) or file == SEAM:
        return OTHER
    if file.startswith(WATCHERS) or not code.co_flags & inspect.CO_OPTIMIZED:
        return WATCHER  # a module that is imported meanwhile, or a class's body, is no call either
    return PART if code.co_name.startswith("<") else FUNCTION


def _parts_of(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_name.startswith("<"):
            yield constant
            yield from _parts_of(constant)


def _key_of(code: CodeType, texts: SourceTexts) -> str:
    name = f"{module_name(code.co_filename)}.{code.co_qualname}"
    return texts.add_function(code.co_filename, code.co_firstlineno, name)
