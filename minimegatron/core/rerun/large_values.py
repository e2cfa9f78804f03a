"""Whether a number is much larger than those seen before it.

Counterpart: `RerunStateMachine.is_unexpectedly_large` of `megatron.core.rerun_state_machine`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class _Sample:
    largest: float = 0.0
    count: int = 0


class LargeValues:
    """What was learned of each kind of number."""

    def __init__(self) -> None:
        self._samples: dict[str, _Sample] = {}

    def is_unexpectedly_large(
        self,
        result: Any,
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
        value = abs(float(result.detach() if isinstance(result, torch.Tensor) else result))
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

    def samples(self) -> dict[str, list[float]]:
        """Name -> [largest, how many were seen], for a checkpoint."""
        return {name: [sample.largest, sample.count] for name, sample in self._samples.items()}

    def take_samples(self, samples: dict[str, list[float]]) -> None:
        """Goes on from what `samples` returned."""
        self._samples = {name: _Sample(*pair) for name, pair in samples.items()}
