"""An overflow does not start the count of good steps again.

Expected: It grew too early: growth needs
"""

import torch

from minimegatron.core.collectives import ReduceOp, all_reduce


@torch.no_grad()
def _unscale_main_grads_and_check_for_nan(self):
    found_inf = torch.zeros(())
    for param in self.get_parameters():
        if param.grad is not None:
            param.grad.mul_(self.grad_scaler.inv_scale.item())
            if not param.grad.isfinite().all():
                found_inf.fill_(1.0)
    for group in self.grad_stats_parallel_groups:
        all_reduce(found_inf, group, ReduceOp.MAX)
    return bool(found_inf.item())


def update(self, found_inf):
    if found_inf:
        self._hysteresis_tracker -= 1
        if self._hysteresis_tracker <= 0:
            self._scale = max(self._scale * self.backoff_factor, self.min_scale)
        return
    self._growth_tracker += 1
    if self._growth_tracker == self.growth_interval:
        self._growth_tracker = 0
        self._hysteresis_tracker = self.hysteresis
        self._scale *= self.growth_factor
