"""The loss scale: keeps small fp16 gradients from vanishing, and finds out how large it may be.

Counterpart: `megatron.core.optimizer.grad_scaler`, under the same names.

fp16 holds nothing below 6e-8. Backward is linear in the loss, so a loss times 2^k gives gradients
times 2^k; they are divided again in fp32. Too large a scale overflows to Inf: that step is skipped
(Micikevicius et al. 2018).
"""

import torch

from minimegatron.core.optimizer import optimizer_state as state
from minimegatron.core.optimizer.optimizer_checks import check_initial_scale, check_scale_moves


class MegatronGradScaler(state.GradScalerState):
    """A scale, its inverse, and how it reacts to overflow.

    The scale is kept as a Python float and handed out as a CPU scalar tensor, which mixes with
    tensors of any device and, having no dimensions, does not change the loss's dtype.
    """

    def __init__(self, initial_scale: float):
        check_initial_scale(initial_scale)
        self._scale = float(initial_scale)
        self.was_read = False
        """Whether `scale` was asked for since the model's `zero_grad_buffer`."""

    @property
    def scale(self) -> torch.Tensor:
        """What the loss is multiplied by; a float32 scalar."""
        self.was_read = True
        return torch.tensor(self._scale)

    @property
    def inv_scale(self) -> torch.Tensor:
        """What gradients are multiplied by; a float32 scalar."""
        return torch.tensor(1.0 / self._scale)


class ConstantGradScaler(state.UnchangedScale, MegatronGradScaler):
    """Always the same scale. Steps that overflow are still skipped."""


class DynamicGradScaler(state.CountedScale, MegatronGradScaler):
    """Lowers the scale on overflow, raises it after a long run without.

    Args:
        initial_scale, min_scale: where it begins, and never below.
        growth_factor, backoff_factor: above 1, and between 0 and 1.
        growth_interval: steps without overflow before it grows.
        hysteresis: the overflow at which it shrinks, counted since the last growth; also at each after.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
    ):
        super().__init__(initial_scale)
        self.min_scale = min_scale
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self._growth_tracker = 0
        self._hysteresis_tracker = hysteresis
        check_scale_moves(self, initial_scale)

    def update(self, found_inf: bool) -> None:
        """Counts, and moves the scale where the counts say so.

        The hysteresis count is only restored by a growth: once it is used up, every further
        overflow lowers the scale at once, so that it falls fast from a far too large beginning.
        """
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self._scale = max(self._scale * self.backoff_factor, self.min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker, self._hysteresis_tracker = 0, self.hysteresis
            self._scale *= self.growth_factor
