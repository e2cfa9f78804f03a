"""Paced runs: every forward and backward padded to a fixed length, so that a laptop draws textbooks.

Megatron has no counterpart.

All-to-alls of experts may have a length too: none is over before that time, one after the other, as on
a slow network. One that is started early is under way while the program computes, so that hiding it is
real in time. Its length comes on top of a forward's or backward's own, which is that of computation. So
does what is waited for hops of attention's ring. The blocks that hide these hops have a length too.

Everything else is real: processes, tensors, messages, losses, gradients. A stage that sleeps leaves
the processor to the others, as a stage on a device of its own would. Recordings of paced runs, and
all that is drawn from them, say that they were paced.
"""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from minimegatron.core import tracing
from minimegatron.core.collectives import Pending
from minimegatron.core.orders.work import ALL_TO_ALL, BACKWARD, COMPUTE, RING_HOP
from minimegatron.core.tracing import Call
from minimegatron.core.utils import get_device
from minimegatron.planner.links import ATTENTION_BLOCK, KIND_OF_LINK, LAYER_NODE
from minimegatron.tracing.rank_trace import paced_ms

SPIN_SECONDS = 0.0005
"""The end of each pause is waited for awake: sleeping overshoots by a few tenths of a millisecond."""


@dataclass(frozen=True)
class Pace:
    """Milliseconds that one forward and one backward of one chunk take, at least.

    Where a schedule splits its backwards, either part takes half of `backward_ms`, or its own length.
    Combined 1F1B computes in nodes of layers instead: `attention_ms` and `mlp_ms` are those of a
    forward; a backward's take twice as long, or its input's and its weights' gradients as long each.
    """

    forward_ms: float
    backward_ms: float
    backward_input_ms: float | None = None
    backward_weight_ms: float | None = None
    attention_ms: float | None = None
    mlp_ms: float | None = None
    all_to_all_ms: float | None = None
    """Of an all-to-all of tokens; that of their probabilities goes with it, and takes no time more."""
    ring_block_ms: float | None = None
    """Of a block of attention over ranks that share a sequence, in a forward; twice in a backward."""
    ring_hop_ms: float | None = None

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
        wires = {ALL_TO_ALL: pace.all_to_all_ms, RING_HOP: pace.ring_hop_ms}
        self._wires = {name: length / 1e3 for name, length in wires.items() if length is not None}
        self._began = self._exchange_began = self._block_began = 0.0
        self._exchanged = 0.0
        """Of the work that runs, what went into all-to-alls."""
        self._wire_is_free = 0.0
        self._arrives: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        """By the handle of an all-to-all under way, when it is over."""

    def start(self, call: Call) -> None:
        """A traced call begins."""
        if self._length_of(call) is not None:
            self._began, self._exchanged = time.perf_counter(), 0.0
        elif call.name in (ALL_TO_ALL, RING_HOP, "collective-wait"):
            self._exchange_began = time.perf_counter()
        elif call.name == ATTENTION_BLOCK:
            self._block_began = time.perf_counter()

    def stop(self, call: Call) -> None:
        """A traced call ends; this returns when its time is over."""
        length = self._length_of(call)
        if length is not None:
            if get_device().type == "cuda":
                torch.cuda.synchronize()  # what was queued counts too
            end = self._began + length + self._exchanged
            self.num_late += time.perf_counter() > end
            _wait_until(end)
        elif call.name in self._wires:
            self._stop_exchange(call)
        elif call.name == "collective-wait":
            handle = call.arguments["handle"]
            _wait_until(self._arrives.pop(handle, 0.0))
            if handle.name == RING_HOP and RING_HOP in self._wires:
                self._exchanged += time.perf_counter() - self._exchange_began
        elif call.name == ATTENTION_BLOCK and self.pace.ring_block_ms is not None:
            factor = 2 if "grad_output" in call.arguments else 1
            _wait_until(self._block_began + factor * self.pace.ring_block_ms / 1e3)

    def _length_of(self, call: Call) -> float | None:
        """How many seconds of computation a call is; None for what is not padded."""
        if call.name != LAYER_NODE:
            return self._seconds.get(call.name)
        own = {"attention": self.pace.attention_ms, "mlp": self.pace.mlp_ms}
        length = own.get(call.attributes["node"])
        if length is None or call.attributes["lane"] != COMPUTE:
            return None
        is_backward = call.attributes["direction"] == BACKWARD
        is_whole = is_backward and not call.arguments["self"].layer.config.delay_wgrad_compute
        return length / 1e3 * (2 if is_whole else 1)

    def _stop_exchange(self, call: Call) -> None:
        # One after the other. What has one dimension goes with the tokens that came before it.
        end = max(self._wire_is_free, self._exchange_began)
        if call.arguments["input"].dim() > 1:
            end += self._wires[call.name]
        self._wire_is_free = end
        if isinstance(call.result, Pending):
            self._arrives[call.result] = end
            return
        _wait_until(end)
        self._exchanged += time.perf_counter() - self._exchange_began


def _wait_until(end: float) -> None:
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
    attention_ms: float | None = None,
    mlp_ms: float | None = None,
    all_to_all_ms: float | None = None,
    ring_block_ms: float | None = None,
    ring_hop_ms: float | None = None,
) -> Iterator[Pacer]:
    """Pads every forward and backward that runs inside the `with` block, and its all-to-alls.

    Lengths are those of one microbatch in one chunk; the next two are those of a split backward's
    parts, half of `backward_ms` each unless given. The last five are of layers; see `Pace`. Raises
    ValueError for negative ones, and inside another `pace`.
    """
    if _current:
        raise ValueError(f"this is paced already, to {_current[0].pace}; end that first")
    split = (backward_input_ms, backward_weight_ms)
    layers = (attention_ms, mlp_ms, all_to_all_ms, ring_block_ms, ring_hop_ms)
    pacer = Pacer(Pace(forward_ms, backward_ms, *split, *layers))
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
