"""Judges results while they are computed: a NaN, an Inf or a sudden jump is seen where it arises.

Counterpart: `megatron.core.rerun_state_machine`; this is its judging part only. There, a rejected
result can also be computed again, to tell a fault of the hardware from one of the run. A subclass that
`set_rerun_state_machine` puts in place may do so: `train_step` asks it.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.left_out import accepts_left_out

logger = logging.getLogger(__name__)


@dataclass
class _Sample:
    largest: float = 0.0
    count: int = 0


@accepts_left_out
class RerunStateMachine:
    """Keeps what `is_unexpectedly_large` has learned; one per process."""

    def __init__(self) -> None:
        self._samples: dict[str, _Sample] = {}
        self._num_runs = 0
        self.current_iteration: int | None = None

    def begin_step(self, iteration: int | None = None) -> None:
        """Called before the forward and backward of each training step, after a failed one too.

        `iteration` is its number, from 1 on, for messages.
        """
        self._num_runs = 0
        self.current_iteration = iteration

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
    ) -> None:
        """If `rejection_func(result)` is true, raises RuntimeError(message).

        If that is not `fatal`, logs a warning: rank, iteration, result and message. A message that
        takes time to write may come as a function.
        """
        if not bool(rejection_func(result)):
            return
        text = message if isinstance(message, str) else message()
        if fatal:
            raise RuntimeError(text)
        rank = dist.get_rank() if dist.is_initialized() else 0
        value = result.tolist() if isinstance(result, torch.Tensor) else result
        where = f"rank {rank}, iteration {self.current_iteration}"
        logger.warning("%s: unexpected result %s: %s", where, value, text)

    def is_unexpectedly_large(
        self,
        result: torch.Tensor,
        threshold: float,
        context: str,
        num_samples: int = 100,
        resample: bool = False,
    ) -> bool:
        """True if `result` is at least `threshold` times the largest of the first `num_samples`.

        All are compared without their sign. While those are being seen it is False, and for a result
        that is NaN or Inf, which is none of them. `context` names what is compared with what;
        `resample` begins anew.
        """
        value = abs(float(result))
        if not math.isfinite(value):
            return False
        if resample or context not in self._samples:
            self._samples[context] = _Sample()
        sample = self._samples[context]
        if sample.count < num_samples:
            sample.count += 1
            sample.largest = max(sample.largest, value)
            return False
        return value >= threshold * sample.largest

    def largest(self, context: str) -> float:
        """The largest of the samples seen under this name, without its sign."""
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
