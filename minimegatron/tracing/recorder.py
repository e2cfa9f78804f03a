"""`with trace() as t:` records every link of the chain that runs inside.

Megatron has no counterpart; there one profiles with external tools, which know no microbatches.

While calls run, only clock readings and references are kept. Everything else is worked out after
the end: that is what keeps recording cheap.
"""

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from minimegatron.core import tracing
from minimegatron.core.collectives import Pending
from minimegatron.core.tracing import Call
from minimegatron.core.utils import get_device
from minimegatron.tracing.clock import align_clocks
from minimegatron.tracing.communicator_clock import CommunicatorClock
from minimegatron.tracing.device_clock import DeviceClock, close_range, open_range, profiler_enabled
from minimegatron.tracing.identity import Finding, UnitFinder
from minimegatron.tracing.line_recorder import LineRecorder
from minimegatron.tracing.rank_trace import RankTrace, save_rank
from minimegatron.tracing.surroundings import Surroundings
from minimegatron.tracing.to_events import to_rank_trace
from minimegatron.tracing.trace_view import Trace

MAX_CALLS = 200_000
"""Calls kept per rank; about 100 MB."""
SEAM_FILE = tracing.traced.__code__.co_filename
MAX_FRAMES = 8
"""Lines of Python kept between a traced call and the traced call around it."""


@contextmanager
def trace(
    directory: str | os.PathLike | None = None,
    *,
    first_step: int = 0,
    num_steps: int | None = None,
    lines_of_step: int | None = None,
    gather: bool | None = None,
    max_calls: int = MAX_CALLS,
    read_clock: Callable[[], int] = time.perf_counter_ns,
    clock_id: str | None = None,
) -> Iterator[Trace]:
    """Records every traced call of a `with` block. Every rank of the job must enter and leave it.

    What it yields is filled when the block ends: `print(t.report())`,
    `t.plot(path)`, `t.to_html(path)`, `t.step(0)`.

    Args:
        directory: where each rank writes its file; None to write none.
        first_step, num_steps: record only these training steps (`train_step` calls, counted from
            0). None for `num_steps` records everything, also what is no training step.
        lines_of_step: of this training step, counted likewise, record which lines ran too, for
            `t.unrolled()`. The step takes up to three times as long; None costs nothing. In a program
            that calls a schedule by itself, its calls are counted.
        gather: bring all ranks' recordings to every rank, at the end. None does so exactly where
            there is no directory to read them from later.
        max_calls: calls kept per rank; later ones are not recorded, and the recording says so.
        read_clock, clock_id: another clock than the machine's, in nanoseconds, and its name.

    If the block raises, this rank's own recording is still kept, up to the calls that were open.

    Raises ValueError if the step whose lines are wanted is not among the recorded ones.
    """
    if lines_of_step is not None:
        check_lines_step(lines_of_step, first_step, num_steps)
    run = Trace([])
    begin = align_clocks(read_clock, clock_id=clock_id)
    recorder = Recorder(read_clock, first_step, num_steps, max_calls, lines_of_step)
    recorder.open()
    end = None
    try:
        yield run
        # Past this line every rank has come through, and may talk to the others again.
        recorder.detach()
        end = align_clocks(read_clock, clock_id=clock_id)
    finally:
        recorder.close()
        mine = to_rank_trace(recorder, begin, end)
        if directory is not None:
            save_rank(mine, directory)
        wants_all = gather if gather is not None else directory is None
        run.fill(_gather(mine) if wants_all and end is not None else [mine])


def _gather(mine: RankTrace) -> list[RankTrace]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def check_lines_step(step: int, first_step: int, num_steps: int | None) -> None:
    """Raises ValueError if this step is not recorded."""
    last = None if num_steps is None else first_step + num_steps - 1
    if step < (0 if num_steps is None else first_step) or (last is not None and step > last):
        recorded = f"{first_step} to {last}" if last is not None else "0 and all after it"
        raise ValueError(
            f"the lines of step {step} are wanted, and the recorded steps are {recorded}, counted from "
            "0; give one of these"
        )


class Record:
    """One call as it is kept while recording."""

    __slots__ = (
        "attributes",
        "end",
        "file",
        "finding",
        "frames",
        "index",
        "line",
        "marks",
        "name",
        "parent",
        "range",
        "start",
        "symbol",
    )

    def __init__(self, call: Call, parent: "Record | None", index: int):
        self.name, self.symbol, self.file, self.line = call.name, call.symbol, call.file, call.line
        self.attributes, self.parent, self.index = call.attributes, parent, index
        self.start = self.end = self.frames = self.marks = self.range = None
        self.finding: Finding | None = None


class Recorder:
    """Keeps every traced call of this process while it is an observer."""

    def __init__(
        self,
        read_clock: Callable[[], int] = time.perf_counter_ns,
        first_step: int = 0,
        num_steps: int | None = None,
        max_calls: int = MAX_CALLS,
        lines_of_step: int | None = None,
    ):
        self.records: list[Record] = []
        self.codes: dict[int, Any] = {}
        self.surroundings = Surroundings()
        self.is_cut = False
        self.device_clock = DeviceClock(read_clock) if get_device().type == "cuda" else None
        self.communicator_clock = (
            None if self.device_clock is None else CommunicatorClock(self.device_clock, read_clock)
        )
        self._read_clock, self._max_calls = read_clock, max_calls
        self._first_step, self._num_steps = first_step, num_steps
        self._num_train_steps = 0
        self._finder = UnitFinder()
        # By its handle, the record of each collective under way.
        self._begun: weakref.WeakKeyDictionary[Pending, int] = weakref.WeakKeyDictionary()
        # The calls that are open, None for those that are not recorded; and the innermost recorded.
        self._open: list[Record | None] = []
        self._innermost: Record | None = None
        self.ended: int | None = None
        self.lines: LineRecorder | None = None
        if lines_of_step is not None:
            self.lines = LineRecorder(lines_of_step, self.innermost_call)

    # -- As an observer --

    def open(self) -> None:
        """Begins to watch. The lines come second: what is done for this recorder is none of them."""
        tracing.add_observer(self)
        if self.lines is not None:
            tracing.add_observer(self.lines)

    def detach(self) -> None:
        """Watches no more. Raises ValueError if it did not."""
        if self.lines is not None:
            tracing.remove_observer(self.lines)
        tracing.remove_observer(self)

    def innermost_call(self) -> int | None:
        """The index of the traced call that has begun last; None if that one is not recorded."""
        record = self._open[-1] if self._open else None
        return None if record is None else record.index

    def start(self, call: Call) -> None:
        """A traced call begins."""
        if not self._wants(call):
            self._open.append(None)
            return
        record = Record(call, self._innermost, len(self.records))
        self.records.append(record)
        self._open.append(record)
        self._innermost = record
        record.frames = self._frames(sys._getframe(3), record.parent)
        if call.name == "forward-backward":
            self._begin_step(call)
        if call.name == "collective-wait" and call.arguments["handle"] in self._begun:
            call.attributes["begun"] = self._begun[call.arguments["handle"]]
        record.finding = self._finder.begin(call)
        if self.device_clock is not None or profiler_enabled():
            record.range = open_range(call.name, self.device_clock is not None)
        if self.device_clock is not None:
            record.marks = [self.device_clock.mark()]
        record.start = self._read_clock()

    def stop(self, call: Call) -> None:
        """A traced call ends."""
        now = self._read_clock()
        record = self._open.pop() if self._open else None
        if record is None:
            return
        self._innermost = record.parent
        record.end = now
        if isinstance(call.result, Pending):
            self._begun[call.result] = record.index
        if self.device_clock is not None:
            record.marks.append(self.device_clock.mark())
            self.communicator_clock.look(call, record)
        if self.device_clock is not None or record.range is not None:
            close_range(record.range, self.device_clock is not None)
            record.range = None
        if record.finding is not None:
            self._finder.end(call, record.finding)

    def close(self) -> None:
        """Ends the recording; calls that are still open are marked so later."""
        self.ended = self._read_clock()
        if self in tracing._observers:
            self.detach()

    # -- What is kept --

    def _wants(self, call: Call) -> bool:
        if call.attributes.get("group_size") == 1:
            return False  # a collective of one rank: nothing moves
        if len(self.records) >= self._max_calls:
            self.is_cut = True
            return False
        if self._num_steps is None:
            return True
        if call.name != "train-step":
            return self._innermost is not None
        number = self._num_train_steps
        self._num_train_steps += 1
        return self._first_step <= number < self._first_step + self._num_steps

    def _begin_step(self, call: Call) -> None:
        self._finder.begin_step()
        call.attributes["config"] = self.surroundings.learn(call)
        if self.device_clock is not None:
            self.device_clock.set_anchor()
            self.communicator_clock.begin_step()

    def _frames(self, frame: Any, parent: Record | None) -> tuple:
        """(code id, instruction, code id, instruction, ...) from the caller up to the parent.

        Instructions are turned into lines later: asking a frame for its line is slow.
        """
        line, file = (parent.line, parent.file) if parent is not None else (0, "")
        frames, codes = [], self.codes
        while frame is not None and len(frames) < 2 * MAX_FRAMES:
            code = frame.f_code
            if code.co_filename != SEAM_FILE:
                key = id(code)
                codes[key] = code
                frames.append(key)
                frames.append(frame.f_lasti)
                if code.co_firstlineno == line and code.co_filename == file:
                    break
            frame = frame.f_back
        return tuple(frames)
