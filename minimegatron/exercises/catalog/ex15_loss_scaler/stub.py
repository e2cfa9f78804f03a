"""The loss scale: undo it, agree on overflow, move it.

Started by: you, and `minimegatron exercises check`. With fp16 the loss is multiplied by a large scale
before backward, so that small gradients do not become 0. Write what happens afterwards: two methods
of the real optimizer and the real scaler. The check puts yours in place of ours and runs real
training steps on 4 ranks. In some of them one rank's gradient overflows.

Useful in the optimizer:

    self.get_parameters()                   this rank's main parameters; each has a .grad, or None
    self.grad_scaler.inv_scale.item()       1 / loss scale
    self.grad_stats_parallel_groups         the groups that together reach every rank that holds
                                            another part of the gradient: one group, or two in turn
    all_reduce(tensor, group, ReduceOp.MAX)         in place, on every rank of the group

In the scaler, `self._scale`, `self.min_scale` and the two factors are Python floats, not tensors;
`self.growth_interval`, `self.hysteresis` and the two trackers are ints.
"""

import torch

from minimegatron.core.collectives import ReduceOp, all_reduce  # noqa: F401
from minimegatron.core.optimizer.grad_scaler import DynamicGradScaler
from minimegatron.core.optimizer.optimizer import MegatronOptimizer


@torch.no_grad()
def _unscale_main_grads_and_check_for_nan(self: MegatronOptimizer) -> bool:
    """Divides every gradient of this rank by the loss scale, in place, whatever it finds in them.

    Returns True on all ranks if any rank has a gradient that is Inf, -Inf or NaN, else False on all.
    Asks the ranks of `self.grad_stats_parallel_groups`, and no others.
    """
    raise NotImplementedError(
        "Write _unscale_main_grads_and_check_for_nan: multiply each .grad by inv_scale, look for "
        "Inf and NaN, and find out whether another rank saw one"
    )


def update(self: DynamicGradScaler, found_inf: bool) -> None:
    """Moves `self._scale` after an attempted step.

    Overflow: `self._growth_tracker` starts again at 0, and one of `self._hysteresis_tracker` is used
    up. Once that is at 0 or below, each overflow multiplies the scale by `self.backoff_factor`, down
    to `self.min_scale` at the least.

    No overflow: `self._growth_tracker` counts it. At `self.growth_interval` in a row the scale is
    multiplied by `self.growth_factor`, the count starts again at 0, and `self._hysteresis_tracker`
    goes back to `self.hysteresis`. Nothing else restores it.
    """
    raise NotImplementedError("Write update: count, and move self._scale where the counts say so")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
