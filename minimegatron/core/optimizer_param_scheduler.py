"""Learning rate and weight decay as functions of the step count.

It writes `lr` and `weight_decay` into the optimizer's parameter groups. Counterpart:
`megatron.core.optimizer_param_scheduler.OptimizerParamScheduler`, under the same names.

"Steps" are whatever the caller counts: Megatron counts samples, so that a growing batch size moves
along the same curve at the same place in the data.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from minimegatron.core.scheduler_state import SchedulerState


class HasParamGroups(Protocol):
    """All that the scheduler needs of an optimizer."""

    param_groups: list[dict[str, Any]]


def get_canonical_lr_for_logging(param_groups: Iterable[dict[str, Any]]) -> float | None:
    """The learning rate that a log line shows: `lr` of the first group with `default_config`.

    In such a group nothing overrides the learning rate. `get_megatron_optimizer` makes all groups so,
    also one that has no parameters on this rank. Returns None without such a group, or if the group
    has no `lr`.
    """
    shown = (group.get("lr") for group in param_groups if group.get("default_config"))
    return next(shown, None)


class OptimizerParamScheduler(SchedulerState):
    """Warm-up, then decay, of the learning rate; growth of the weight decay.

    Args:
        optimizer: anything with `param_groups`. A group's own `max_lr`, `min_lr`, `start_wd` and
            `end_wd` override those given here; its `wd_mult` (0 for biases and norms) multiplies the
            weight decay.
        init_lr, max_lr, min_lr: at step 0, at the end of warm-up, at the end of decay.
        lr_warmup_steps, lr_decay_steps: both counted from step 0.
        lr_decay_style: one of `LR_DECAY_STYLES`.
        start_wd, end_wd, wd_incr_steps, wd_incr_style: the same for weight decay.
        use_checkpoint_opt_param_scheduler: on load, take a checkpoint's values over these.
        override_opt_param_scheduler: on load, keep these over a checkpoint's.
        wsd_decay_steps, lr_wsd_decay_style: length and shape of the last phase of "WSD".

    Raises ValueError, with the numbers, for a schedule that cannot be.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ):
        self.optimizer = optimizer
        self.init_lr, self.max_lr, self.min_lr = init_lr, max_lr, min_lr
        self.lr_warmup_steps, self.lr_decay_steps = lr_warmup_steps, lr_decay_steps
        self.lr_decay_style = lr_decay_style
        self.wsd_decay_steps = wsd_decay_steps
        self.lr_wsd_decay_style = lr_wsd_decay_style or "exponential"
        self.start_wd, self.end_wd = start_wd, end_wd
        self.wd_incr_steps, self.wd_incr_style = wd_incr_steps, wd_incr_style
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.num_steps = 0
        self.check()
        # Step 0's values must be in the groups before the first optimizer step reads them.
        self.step(increment=0)

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """Weight decay of `param_group` at the current step, before the group's `wd_mult`."""
        group = param_group or {}
        start_wd, end_wd = group.get("start_wd", self.start_wd), group.get("end_wd", self.end_wd)
        if self.wd_incr_style == "constant" or self.num_steps >= self.wd_incr_steps:
            return end_wd
        return start_wd + self.get_wd_coefficient() * (end_wd - start_wd)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Learning rate of `param_group` at the current step n.

        With warm-up w, end of decay d and ratio r = (n - w) / (d - w):
        linear `min + (max - min)(1 - r)`; cosine `min + (max - min)(1 + cos(pi r))/2`;
        inverse-square-root `max(min, max sqrt(w / n))`; WSD: max until n = d - wsd_decay_steps,
        then down to min. All but "constant" stay at min beyond d.
        """
        max_lr = param_group.get("max_lr", self.max_lr)
        min_lr = param_group.get("min_lr", self.min_lr)
        n, warmup, end = self.num_steps, self.lr_warmup_steps, self.lr_decay_steps
        if warmup > 0 and n <= warmup:
            return self.init_lr + (max_lr - self.init_lr) * n / warmup
        if self.lr_decay_style != "linear":
            return self.get_lr_of_curve(min_lr, max_lr)
        coefficient = max(1.0 - (n - warmup) / (end - warmup), 0.0)
        return min_lr + coefficient * (max_lr - min_lr)

    def step(self, increment: int) -> None:
        """Moves on by `increment` and writes lr and weight decay into every group."""
        self.num_steps += increment
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = self.get_lr(param_group) * param_group.get("lr_mult", 1.0)
            wd_mult = param_group.get("wd_mult", 1.0)
            param_group["weight_decay"] = self.get_wd(param_group) * wd_mult
