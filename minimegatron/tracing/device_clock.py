"""What the GPU was doing when: CUDA events around each traced call, and ranges for other profilers.

Without CUDA, and with no profiler running, nothing here does anything. Megatron records CUDA events
in its timers only.

A GPU runs behind the program: a call returns when its work is queued. Events queued with the work
tell when it ran. Their times are turned into the program's clock, so that all ranks still share one.

The events are on the compute stream. NCCL moves messages on streams of its own, so on a GPU the `start`
and `end` of a collective or a message say when the compute stream passed its call, or waited for it.
When NCCL did the work stands beside them, and comes from another clock: `communicator_clock`.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

profiler_enabled = torch.autograd._profiler_enabled
"""Whether `torch.profiler` is running."""


class DeviceClock:
    """Marks moments on the current CUDA stream; tells their times once the recording is over."""

    def __init__(self, read_clock: Callable[[], int] = time.perf_counter_ns):
        self._read_clock = read_clock
        torch.cuda.synchronize()
        before = read_clock()
        first = _event()
        first.synchronize()
        after = read_clock()
        self._began = (before + after) // 2
        self.residual = (after - before + 1) // 2
        """The anchor event ran within so many nanoseconds of the time that is taken for it."""
        self._anchors = [first]

    def set_anchor(self) -> None:
        """Begins a new stretch. `elapsed_time` is a float of milliseconds: precise over seconds,
        not over hours, so times are measured from the latest anchor."""
        self._anchors.append(_event())

    def mark(self) -> tuple[int, torch.cuda.Event]:
        """This moment on the stream; does not wait for it."""
        return len(self._anchors) - 1, _event()

    def times(self, wait: bool = True) -> Callable[[tuple[int, torch.cuda.Event]], int | None]:
        """The returned function gives a mark's time in nanoseconds; None if the GPU is not there yet.

        `wait=False` does not wait for the GPU first. After an error it may be waiting for a message
        that nobody sends any more, and whoever waits for it would be silent until NCCL's time-out.
        """
        if wait:
            torch.cuda.synchronize()
        # Events of one stream end in order: what stands behind one that has not ended has not either.
        anchors = list(itertools.takewhile(torch.cuda.Event.query, self._anchors))
        at = [self._began]
        for earlier, later in itertools.pairwise(anchors):
            at.append(at[-1] + round(earlier.elapsed_time(later) * 1e6))

        def time_of(mark: tuple[int, torch.cuda.Event]) -> int | None:
            anchor, event = mark
            if anchor >= len(anchors) or not event.query():
                return None
            return at[anchor] + round(anchors[anchor].elapsed_time(event) * 1e6)

        return time_of


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def open_range(name: str, on_cuda: bool) -> Any:
    """Begins a range of this name where a profiler looks: NVTX on a GPU, and `torch.profiler`."""
    if on_cuda:
        torch.cuda.nvtx.range_push(name)
    if not profiler_enabled():
        return None
    range_ = torch.profiler.record_function(name)
    range_.__enter__()
    return range_


def close_range(range_: Any, on_cuda: bool) -> None:
    """Ends what `open_range` began."""
    if range_ is not None:
        range_.__exit__(None, None, None)
    if on_cuda:
        torch.cuda.nvtx.range_pop()
