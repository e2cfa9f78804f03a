"""Where a training step waits for its GPU: wherever the program reads a number out of a tensor.

Read by: `one_gpu`, and tests/gpu/test_parts.py. Each of these places stops the program until the GPU
has done all that is queued, and then leaves the GPU without work until the next kernel is queued.

On a GPU, torch itself says where it waits. The stand-in takes the ways that are taken on a GPU, on the
meta device, and counts the operations whose result the program reads; whatever else would copy numbers
from a GPU is an error there. Several ranks exchange tensors, which meta has not: they use the CPU's.
"""

import contextlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import minimegatron
from minimegatron.core.utils import get_device
from minimegatron.training import training
from tests.training import short_runs
from tests.ways_of_a_gpu import device_is, ways_of_a_gpu

PACKAGE = os.path.dirname(minimegatron.__file__) + os.sep
READING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")
"""Operations of torch whose result, or its size, the program must know before it goes on."""

NUM_MICROBATCHES = 4
"""Of the step that is counted: see `short_runs.MODEL`."""

ALLOWED = {
    "validate_result": NUM_MICROBATCHES,  # is the loss a number: before a bad step goes further
    "_unscale_main_grads_and_check_for_nan": 1,  # with a loss scale: skip the step or not
    "_reduce_over": 1,  # the gradient norm, and then at once:
    "check_noted_grads": 1,  # are all gradients numbers, for each chunk
}
"""By function of the package: how often one step of one process may. None of these waits twice for the
same work: a microbatch's loss, then all of backward."""

SHARED = ALLOWED | {
    "logical_and_across_model_parallel_group": 1,  # was the step made on all ranks
    "reduce_max_stat_across_model_parallel_group": 1,  # the norm that is shown
}
"""The same where several ranks share a model."""

ON_THE_CPU = {"meet"}
"""Numbers in the memory of the CPU: what ranks on gloo say to each other before a step."""


class WaitCounter(TorchDispatchMode):
    """Counts such operations by the innermost function of the package around them.

    Tensors on meta have no numbers: each that is read is 0, or False. To copy one to the CPU fails.
    """

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in READING and args[0].device == get_device():
            self.counts[_innermost(sys._getframe(1))] += 1
            if name == "_local_scalar_dense" and args[0].is_meta:
                return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def _innermost(frame: Any) -> str:
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame.f_code.co_name if frame else "outside of the package"


@contextlib.contextmanager
def waits_counted() -> Iterator[Counter[str]]:
    """Within it, waits are counted: those that torch tells on a GPU, or what stands for them."""
    if get_device().type != "cuda":
        with WaitCounter() as counter:
            yield counter.counts
        return
    counts: Counter[str] = Counter()

    def count(message: Any, *about: Any) -> None:
        if "synchroniz" in str(message):
            counts[_innermost(sys._getframe(1))] += 1

    with warnings.catch_warnings(), mock.patch.object(warnings, "showwarning", count):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode("default")


class _CountedRun:
    """Takes the places of `setup_model_and_optimizer` and `train_step` in a short run.

    With `on_meta`, these two, and nothing around them, happen on meta.
    """

    def __init__(self, on_meta: bool):
        self._on_meta = on_meta
        self._set_up, self._train_step = training.setup_model_and_optimizer, training.train_step
        self.counts: list[Counter[str]] = []

    def _place(self) -> Any:
        return device_is("meta") if self._on_meta else contextlib.nullcontext()

    def set_up(self, *args: Any) -> Any:
        with self._place():
            model, optimizer, scheduler = self._set_up(*args)
        if self._on_meta:
            # Torch's fused kernel of Adam has no such form. Runs on the CPU's tensors include it.
            optimizer.optimizer.step = lambda: None
        return model, optimizer, scheduler

    def train_step(self, *args: Any) -> Any:
        with self._place(), waits_counted() as counts:
            losses, *others = self._train_step(*args)
        self.counts.append(counts)
        # Who reads a loss for the log waits for it, but not in each step.
        return {key: torch.zeros(()) for key in losses}, *others


def count_waits(flags: str = "", on_meta: bool = False) -> dict[str, int]:
    """In a rank: trains two steps; where the second one waits, by function of the package."""
    run = _CountedRun(on_meta)
    with (
        ways_of_a_gpu(),
        mock.patch.object(training, "setup_model_and_optimizer", run.set_up),
        mock.patch.object(training, "train_step", run.train_step),
    ):
        short_runs.run(flags, steps=2)
    assert len(run.counts) == 2
    return dict(run.counts[-1])


def beyond_what_is_allowed(counts: dict[str, int], allowed: dict[str, int] = ALLOWED) -> list[str]:
    """
    >>> beyond_what_is_allowed({"_reduce_over": 1, "forward": 2})
    ['forward waits 2 times a step, not 0']
    """
    return [
        f"{place} waits {count} times a step, not {allowed.get(place, 0)}"
        for place, count in counts.items()
        if place not in ON_THE_CPU and count > allowed.get(place, 0)
    ]
