"""Where a training step waits for its GPU: wherever the program reads a number out of a tensor.

Read by: `one_gpu`, and tests/gpu/test_parts.py. Each of these places stops the program until the GPU has
done all that is queued, and then leaves the GPU without work until the next kernel is queued.
"""

import sys
from collections import Counter
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from minimegatron.training import training
from tests.training import short_runs

READING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")
"""Operations of torch whose result, or its size, the program must know before it goes on."""

NUM_MICROBATCHES = 4
"""Of the step that is counted: see `short_runs.MODEL`."""

ALLOWED = {
    "validate_result": NUM_MICROBATCHES,  # is the loss a number: before a bad step goes further
    "_check_grads": 1,  # are the gradients: once a bucket
    "_unscale_main_grads_and_check_for_nan": 2,  # with a loss scale: skip the step or not
    "_reduce_over": 1,  # the gradient norm
    "logical_and_across_model_parallel_group": 1,  # was the step made on all ranks
    "reduce_max_stat_across_model_parallel_group": 2,  # the norm that is shown
}
"""By function of the package: how often one step may."""

ON_THE_CPU = {"step_with_ready_grads", "meet"}
"""Numbers in the memory of the CPU: Adam's counters where it is not fused, and what ranks on gloo say
to each other before a step."""


class WaitCounter(TorchDispatchMode):
    """Counts such operations by the innermost function of the package around them."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.partition(".")[0] in READING:
            frame = sys._getframe(1)
            while frame is not None and "/minimegatron/" not in frame.f_code.co_filename:
                frame = frame.f_back
            self.counts[frame.f_code.co_name if frame else "outside of the package"] += 1
        return func(*args, **(kwargs or {}))


def count_waits(flags: str = "") -> dict[str, int]:
    """In a rank: trains two steps; what the second one reads, by function of the package."""
    counter, train_step, calls = WaitCounter(), training.train_step, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        counter.counts.clear()
        with counter:
            return train_step(*args, **kwargs)

    with mock.patch.object(training, "train_step", counted):
        short_runs.run(flags, steps=2)
    assert len(calls) == 2
    return dict(counter.counts)


def beyond_what_is_allowed(counts: dict[str, int]) -> list[str]:
    """
    >>> beyond_what_is_allowed({"_reduce_over": 1, "forward": 2})
    ['forward waits 2 times a step, not 0']
    """
    return [
        f"{place} waits {count} times a step, not {ALLOWED.get(place, 0)}"
        for place, count in counts.items()
        if place not in ON_THE_CPU and count > ALLOWED.get(place, 0)
    ]
