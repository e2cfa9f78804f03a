"""Judges results while they are computed: a NaN, an Inf or a sudden jump is seen where it arises.

Counterpart: `megatron.core.rerun_state_machine`; this is its judging part only. There, a rejected
result can also be computed again, to tell a fault of the hardware from one of the run. A subclass that
`set_rerun_state_machine` puts in place may do so: `train_step` asks it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.core.left_out import accepts_left_out


@dataclass
class _Sample:
    largest: float = float("-inf")
    count: int = 0


@accepts_left_out
class RerunStateMachine:
    """Keeps what `is_unexpectedly_large` has learned; one per process."""

    def __init__(self) -> None:
        self._samples: dict[str, _Sample] = {}
        self._num_runs = 0

    def begin_step(self) -> None:
        """Called before the forward and backward of each training step, after a failed one too."""
        self._num_runs = 0

    def should_run_forward_backward(self, data_iterator: Any) -> bool:
        """Whether to run (again) all forwards and backwards of this training step: True once.

        `train_step` asks before each run, with the iterators of the chunks. A subclass that says True
        more often must bring them back to the step's first microbatch. The gradients of the last run
        count.
        """
        self._num_runs += 1
        return self._num_runs == 1

    @accepts_left_out
    def validate_result(
        self,
        result: torch.Tensor,
        rejection_func: Callable[[torch.Tensor], bool | torch.Tensor],
        message: str | Callable[[], str],
        *,
        fatal: bool = True,
    ) -> str | None:
        """None if `rejection_func(result)` is false.

        Else raises RuntimeError(message), or returns the message if that is not `fatal`. A message
        that takes time to write may come as a function.
        """
        if not bool(rejection_func(result)):
            return None
        text = message if isinstance(message, str) else message()
        if fatal:
            raise RuntimeError(text)
        return text

    def is_unexpectedly_large(
        self,
        result: torch.Tensor,
        threshold: float,
        context: str,
        num_samples: int = 100,
        resample: bool = False,
    ) -> bool:
        """True if `result` is at least `threshold` times the largest of the first `num_samples`.

        While those are being seen, and for a result that is NaN, it is False. `context` names what
        is compared with what; `resample` begins anew.
        """
        if resample or context not in self._samples:
            self._samples[context] = _Sample()
        sample, value = self._samples[context], float(result)
        if sample.count < num_samples:
            sample.count += 1
            sample.largest = max(sample.largest, value)
            return False
        return value >= threshold * sample.largest

    def largest(self, context: str) -> float:
        """The largest of the samples seen under this name."""
        return self._samples[context].largest


_machine = RerunStateMachine()


def get_rerun_state_machine() -> RerunStateMachine:
    """This process's."""
    return _machine


def set_rerun_state_machine(machine: RerunStateMachine) -> None:
    """Puts `machine` in this process's place, until `destroy_rerun_state_machine`."""
    global _machine
    _machine = machine


def destroy_rerun_state_machine() -> None:
    """Forgets what was learned, so that another run may begin in this process."""
    global _machine
    _machine = RerunStateMachine()
