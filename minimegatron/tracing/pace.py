"""Paced runs: every forward and backward padded to a fixed length, so that a laptop draws textbooks.

Megatron has no counterpart.

Everything else is real: processes, tensors, messages, losses, gradients. A stage that sleeps leaves
the processor to the others, as a stage on a device of its own would. Recordings of paced runs, and
all that is drawn from them, say that they were paced.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from minimegatron.core import tracing
from minimegatron.core.tracing import Call
from minimegatron.core.utils import get_device
from minimegatron.planner.links import KIND_OF_LINK
from minimegatron.tracing.rank_trace import paced_ms

SPIN_SECONDS = 0.0005
"""The end of each pause is waited for awake: sleeping overshoots by a few tenths of a millisecond."""


@dataclass(frozen=True)
class Pace:
    """Milliseconds that one forward and one backward of one chunk take, at least.

    Where a schedule splits its backwards, either part takes half of `backward_ms`, or its own length.
    """

    forward_ms: float
    backward_ms: float
    backward_input_ms: float | None = None
    backward_weight_ms: float | None = None

    def __post_init__(self) -> None:
        for name, length in self.lengths().items():
            if not 0 <= length < float("inf"):
                raise ValueError(f"{name} is {length}; give 0 or more milliseconds")

    def lengths(self) -> dict[str, float]:
        """Those that were given, by name."""
        return {name: length for name, length in asdict(self).items() if length is not None}

    def __str__(self) -> str:
        return "/".join(f"{length:g}" for length in self.lengths().values()) + " ms"


class Pacer:
    """An observer that holds each piece of work back until its time is over.

    `num_late` counts those that took longer than the pace by themselves: with any, the pace is too
    fast for this machine.
    """

    def __init__(self, pace: Pace):
        self.pace = pace
        self.num_late = 0
        lengths = pace.lengths()
        self._seconds = {link: paced_ms(lengths, kind) / 1e3 for link, kind in KIND_OF_LINK.items()}
        self._began = 0.0

    def start(self, call: Call) -> None:
        """A traced call begins."""
        if call.name in self._seconds:
            self._began = time.perf_counter()

    def stop(self, call: Call) -> None:
        """A traced call ends; this returns when its time is over."""
        if call.name not in self._seconds:
            return
        if get_device().type == "cuda":
            torch.cuda.synchronize()  # what was queued counts too
        end = self._began + self._seconds[call.name]
        if time.perf_counter() > end:
            self.num_late += 1
        while (left := end - time.perf_counter()) > 0:
            if left > SPIN_SECONDS:
                time.sleep(left - SPIN_SECONDS)


_current: list[Pacer] = []


@contextmanager
def pace(
    forward_ms: float,
    backward_ms: float,
    backward_input_ms: float | None = None,
    backward_weight_ms: float | None = None,
) -> Iterator[Pacer]:
    """Pads every forward and backward that runs inside the `with` block.

    Lengths are those of one microbatch in one chunk; the last two are those of a split backward's
    parts, half of `backward_ms` each unless given. Raises ValueError for negative ones, and
    inside another `pace`.
    """
    if _current:
        raise ValueError(f"this is paced already, to {_current[0].pace}; end that first")
    pacer = Pacer(Pace(forward_ms, backward_ms, backward_input_ms, backward_weight_ms))
    _current.append(pacer)
    tracing.add_observer(pacer, innermost=True)
    try:
        yield pacer
    finally:
        tracing.remove_observer(pacer)
        _current.clear()


def current_pace() -> Pace | None:
    """The pace that runs now, if one does."""
    return _current[0].pace if _current else None
