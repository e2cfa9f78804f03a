"""Pretends that a result is wrong, and that a repeated one differs or does not.

Torch-free. Counterpart: `RerunErrorInjector` of `megatron.core.rerun_state_machine`.
"""

import logging
import random
from collections.abc import Callable
from typing import Any

from minimegatron.core.rerun import differences
from minimegatron.core.rerun.states import RerunDiagnostic, RerunState

logger = logging.getLogger(__name__)


class RerunErrorInjector:
    """Rejects one of `error_injection_rate` results, at random; none for rate 0.

    `error_injection_type` is the verdict that the runs which follow shall come to. No number is
    changed: only the judgement is.
    """

    def __init__(
        self,
        error_injection_rate: int = 0,
        error_injection_type: RerunDiagnostic = RerunDiagnostic.TRANSIENT_ERROR,
    ):
        self.error_injection_rate = error_injection_rate
        self.error_injection_type = RerunDiagnostic(error_injection_type)
        self.injected_error_type: RerunDiagnostic | None = None
        """What was injected and has no verdict yet."""
        # Its own numbers: those of the run stay as they are without it. Megatron draws from the run's.
        self._random = random.Random(0)

    @property
    def should_inject_errors(self) -> bool:
        """Whether it ever does."""
        return self.error_injection_rate > 0

    def maybe_inject(self, rank: int = 0) -> bool:
        """Whether to reject this result; while one is under examination, False.

        The ranks draw the same numbers and reject at different moments.
        """
        if not self.should_inject_errors or self.injected_error_type is not None:
            return False
        drawn = self._random.randrange(self.error_injection_rate) + rank
        if drawn % self.error_injection_rate:
            return False
        self.injected_error_type = self.error_injection_type
        logger.warning("rank %d: pretending a %s", rank, self.error_injection_type.value)
        return True

    def maybe_miscompare(
        self,
        comparison_func: Callable[[Any, Any], float],
        initial_result: Any,
        result: Any,
        state: RerunState,
    ) -> float:
        """What `comparison_func` says of two results, or what fits the injected error."""
        injected, transient = self.injected_error_type, RerunDiagnostic.TRANSIENT_ERROR
        if injected is None:
            return comparison_func(initial_result, result)
        is_third_run = state is RerunState.RERUNNING_FROM_CHECKPOINT
        shown_here = RerunDiagnostic.PERSISTENT_ERROR if is_third_run else transient
        if is_third_run or injected is transient:
            self.forget()
        return (
            differences.COMPARISON_MISMATCH
            if injected is shown_here
            else differences.COMPARISON_MATCH
        )

    def forget(self) -> None:
        """The injected error is dealt with: another one may come."""
        self.injected_error_type = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know, as plain numbers and text."""
        injected = self.injected_error_type
        return {
            "error_injection_rate": self.error_injection_rate,
            "error_injection_type": self.error_injection_type.value,
            "injected_error_type": None if injected is None else injected.value,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        injected = state_dict["injected_error_type"]
        self.error_injection_rate = state_dict["error_injection_rate"]
        self.error_injection_type = RerunDiagnostic(state_dict["error_injection_type"])
        self.injected_error_type = None if injected is None else RerunDiagnostic(injected)
