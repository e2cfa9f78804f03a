"""Each rank decides by its own gradients.

Expected: Ranks that say True skip the step, the others update
"""

import torch


@torch.no_grad()
def _unscale_main_grads_and_check_for_nan(self):
    found_inf = torch.zeros(())
    for param in self.get_parameters():
        if param.grad is not None:
            param.grad.mul_(self.grad_scaler.inv_scale.item())
            if not param.grad.isfinite().all():
                found_inf.fill_(1.0)
    return bool(found_inf.item())


def update(self, found_inf):
    if found_inf:
        self._growth_tracker = 0
        self._hysteresis_tracker -= 1
        if self._hysteresis_tracker <= 0:
            self._scale = max(self._scale * self.backoff_factor, self.min_scale)
        return
    self._growth_tracker += 1
    if self._growth_tracker == self.growth_interval:
        self._growth_tracker = 0
        self._hysteresis_tracker = self.hysteresis
        self._scale *= self.growth_factor
