"""The scale waits for one good step more than the window says.

Expected: It should grow now: 2 steps without an overflow came in a row
"""

import torch

from minimegatron.core.collectives import ReduceOp, all_reduce
from minimegatron.core.optimizer.grad_scaler import DynamicGradScaler
from minimegatron.core.optimizer.optimizer import MegatronOptimizer


@torch.no_grad()
def _unscale_main_grads_and_check_for_nan(self: MegatronOptimizer) -> bool:
    """Divides by the loss scale; True, on all ranks, if a gradient of any is Inf or NaN."""
    inv_scale = self.grad_scaler.inv_scale.item()
    found_inf = torch.zeros(())
    for param in self.get_parameters():
        if param.grad is not None:
            param.grad.mul_(inv_scale)
            if not param.grad.isfinite().all():
                found_inf.fill_(1.0)
    # A rank that found nothing takes part too: it must learn of the others.
    for group in self.grad_stats_parallel_groups:
        all_reduce(found_inf, group, ReduceOp.MAX)
    return bool(found_inf.item())


def update(self: DynamicGradScaler, found_inf: bool) -> None:
    """Moves `self._scale` after an attempted step."""
    if found_inf:
        self._growth_tracker = 0
        self._hysteresis_tracker -= 1
        if self._hysteresis_tracker <= 0:
            self._scale = max(self._scale * self.backoff_factor, self.min_scale)
        return
    self._growth_tracker += 1
    if self._growth_tracker > self.growth_interval:
        self._growth_tracker = 0
        self._hysteresis_tracker = self.hysteresis
        self._scale *= self.growth_factor
