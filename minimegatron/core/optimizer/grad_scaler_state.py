"""What a loss scale keeps from step to step, in memory and in a checkpoint.

Megatron has this in the classes of `megatron.core.optimizer.grad_scaler`.
"""

from abc import ABC, abstractmethod
from typing import Any


class GradScalerState(ABC):
    """What `MegatronGradScaler` leaves to each kind of scale."""

    @abstractmethod
    def update(self, found_inf: bool) -> None:
        """Called after every attempted step, on all ranks alike: whether a gradient overflowed."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same scales."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""


class UnchangedScale(GradScalerState):
    """Keeps nothing: the scale is always that of the configuration."""

    def update(self, found_inf: bool) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember: the scale comes from the configuration."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take over."""


class CountedScale(GradScalerState):
    """Keeps the scale and both counts of `DynamicGradScaler`."""

    _scale: float
    _growth_tracker: int
    _hysteresis_tracker: int

    def state_dict(self) -> dict[str, Any]:
        """The scale and both counts."""
        return {
            "scale": self._scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the scale and both counts."""
        self._scale = float(state_dict["scale"])
        self._growth_tracker = int(state_dict["growth_tracker"])
        self._hysteresis_tracker = int(state_dict["hysteresis_tracker"])
