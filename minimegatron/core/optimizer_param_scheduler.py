"""Learning rate and weight decay as functions of the step count.

It writes `lr` and `weight_decay` into the optimizer's parameter groups. Counterpart:
`megatron.core.optimizer_param_scheduler.OptimizerParamScheduler`, under the same names.

"Steps" are whatever the caller counts: Megatron counts samples, so that a growing batch size moves
along the same curve at the same place in the data.
"""

import math
from collections.abc import Iterable
from typing import Any, Protocol

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
LR_WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WD_INCR_STYLES = ("constant", "linear", "cosine")


class HasParamGroups(Protocol):
    """All that the scheduler needs of an optimizer."""

    param_groups: list[dict[str, Any]]


def get_canonical_lr_for_logging(param_groups: Iterable[dict[str, Any]]) -> float | None:
    """The learning rate that a log line shows: `lr` of the first group with `default_config`.

    In such a group nothing overrides the learning rate. `get_megatron_optimizer` makes all groups so,
    also one that has no parameters on this rank. Returns None without such a group, or if the group
    has no `lr`.
    """
    for param_group in param_groups:
        if param_group.get("default_config"):
            return param_group.get("lr")
    return None


def _cosine(ratio: float) -> float:
    """1 at ratio 0, falling to 0 at ratio 1."""
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)


def _wsd_coefficient(style: str, ratio: float) -> float:
    """The last phase of warmup-stable-decay (Hu et al. 2024): 1 at ratio 0, 0 at ratio 1."""
    match style:
        case "linear":
            return 1.0 - ratio
        case "cosine":
            return _cosine(ratio)
        case "exponential":
            return 2.0 * 0.5**ratio - 1.0
        case _:
            return 1.0 - math.sqrt(ratio)


class OptimizerParamScheduler:
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
        self._check_lr()
        self._check_wd()
        if override_opt_param_scheduler and use_checkpoint_opt_param_scheduler:
            raise ValueError(
                "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both on; "
                "a checkpoint's schedule is either kept or overridden"
            )
        # Step 0's values must be in the groups before the first optimizer step reads them.
        self.step(increment=0)

    def _check_lr(self) -> None:
        if not 0.0 <= self.min_lr <= self.max_lr:
            raise ValueError(
                f"need 0 <= min_lr <= max_lr, but they are {self.min_lr}, {self.max_lr}"
            )
        if not 0.0 <= self.init_lr <= self.max_lr:
            raise ValueError(
                f"need 0 <= init_lr <= max_lr, but they are {self.init_lr}, {self.max_lr}"
            )
        if not 0 <= self.lr_warmup_steps < self.lr_decay_steps:
            raise ValueError(
                f"lr_warmup_steps {self.lr_warmup_steps} must be less than lr_decay_steps "
                f"{self.lr_decay_steps} and not negative; shorten the warm-up or train longer"
            )
        if self.lr_decay_style not in LR_DECAY_STYLES:
            raise ValueError(
                f"lr_decay_style {self.lr_decay_style!r} is unknown; use one of {LR_DECAY_STYLES}"
            )
        if self.lr_decay_style != "WSD":
            return
        if self.lr_wsd_decay_style not in LR_WSD_DECAY_STYLES:
            raise ValueError(
                f"lr_wsd_decay_style {self.lr_wsd_decay_style!r} is unknown; "
                f"use one of {LR_WSD_DECAY_STYLES}"
            )
        longest = self.lr_decay_steps - self.lr_warmup_steps
        if self.wsd_decay_steps is None or not 0 < self.wsd_decay_steps <= longest:
            raise ValueError(
                f"lr_decay_style 'WSD' needs wsd_decay_steps in 1..{longest} (lr_decay_steps - "
                f"lr_warmup_steps), not {self.wsd_decay_steps}"
            )

    def _check_wd(self) -> None:
        if not 0.0 <= self.start_wd <= self.end_wd:
            raise ValueError(
                f"need 0 <= start_wd <= end_wd, but they are {self.start_wd}, {self.end_wd}"
            )
        if self.wd_incr_style not in WD_INCR_STYLES:
            raise ValueError(
                f"wd_incr_style {self.wd_incr_style!r} is unknown; use one of {WD_INCR_STYLES}"
            )
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            raise ValueError(
                f"wd_incr_style 'constant' with start_wd {self.start_wd} and end_wd {self.end_wd}; "
                "make them equal or choose 'linear' or 'cosine'"
            )
        if self.wd_incr_style != "constant" and self.wd_incr_steps < 1:
            raise ValueError(f"wd_incr_steps is {self.wd_incr_steps}; give 1 or more")

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """Weight decay of `param_group` at the current step, before the group's `wd_mult`."""
        group = param_group or {}
        start_wd, end_wd = group.get("start_wd", self.start_wd), group.get("end_wd", self.end_wd)
        if self.wd_incr_style == "constant" or self.num_steps >= self.wd_incr_steps:
            return end_wd
        ratio = self.num_steps / self.wd_incr_steps
        coefficient = ratio if self.wd_incr_style == "linear" else 1.0 - _cosine(ratio)
        return start_wd + coefficient * (end_wd - start_wd)

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
        if self.lr_decay_style == "constant":
            return max_lr
        if n > end:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(warmup, 1) / max(n, 1)))
        ratio = (n - warmup) / (end - warmup)
        if self.lr_decay_style == "linear":
            coefficient = 1.0 - ratio
        elif self.lr_decay_style == "cosine":
            coefficient = _cosine(ratio)
        else:
            num_wsd_steps = n - (end - self.wsd_decay_steps)
            coefficient = 1.0
            if num_wsd_steps > 0:
                wsd_ratio = num_wsd_steps / self.wsd_decay_steps
                coefficient = _wsd_coefficient(self.lr_wsd_decay_style, wsd_ratio)
        return min_lr + coefficient * (max_lr - min_lr)

    def step(self, increment: int) -> None:
        """Moves on by `increment` and writes lr and weight decay into every group."""
        self.num_steps += increment
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = self.get_lr(param_group) * param_group.get("lr_mult", 1.0)
            wd_mult = param_group.get("wd_mult", 1.0)
            param_group["weight_decay"] = self.get_wd(param_group) * wd_mult

    _SAVED = (
        "max_lr",
        "min_lr",
        "lr_warmup_steps",
        "lr_decay_steps",
        "lr_decay_style",
        "wsd_decay_steps",
        "lr_wsd_decay_style",
        "start_wd",
        "end_wd",
        "wd_incr_steps",
        "wd_incr_style",
    )

    _MAY_BE_MISSING = ("wsd_decay_steps", "lr_wsd_decay_style")
    """Megatron does not save these two. Where a state lacks them, this object's stay."""

    def state_dict(self) -> dict[str, Any]:
        """The schedule and the place in it."""
        return {"num_steps": self.num_steps, **{name: getattr(self, name) for name in self._SAVED}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the position; two flags decide whose schedule wins.

        `override_…` keeps this object's schedule, `use_checkpoint_…` takes the checkpoint's; with
        neither they must agree, else ValueError names the value that differs.
        """
        for name in self._SAVED:
            if name in self._MAY_BE_MISSING and name not in state_dict:
                continue
            ours, theirs = getattr(self, name), state_dict[name]
            if self.override_opt_param_scheduler or ours == theirs:
                continue
            # A length does not matter where nothing changes along it.
            style = {"wd_incr_steps": "wd_incr_style", "lr_decay_steps": "lr_decay_style"}.get(name)
            if style and getattr(self, style) == state_dict[style] == "constant":
                continue
            if not self.use_checkpoint_opt_param_scheduler:
                raise ValueError(
                    f"{name} is {ours} here but {theirs} in the checkpoint; set "
                    "override_opt_param_scheduler to keep ours, or "
                    "use_checkpoint_opt_param_scheduler to take the checkpoint's"
                )
            setattr(self, name, theirs)
        self._check_lr()
        self._check_wd()
        self.num_steps = state_dict["num_steps"]
        self.step(increment=0)
