"""A schedule of learning rate and weight decay: what it refuses, its curves, its state in a checkpoint.

Torch-free. Megatron has this in `OptimizerParamScheduler` itself.
"""

import math
from typing import Any

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
LR_WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WD_INCR_STYLES = ("constant", "linear", "cosine")


class SchedulerState:
    """The part of `OptimizerParamScheduler` that a step with linear decay does not enter."""

    def check(self) -> None:
        """Raises ValueError, with the numbers, for a schedule that cannot be."""
        self._check_lr()
        self._check_wd()
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ValueError(
                "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both on; keep "
                "one: a checkpoint's schedule is either overridden or used"
            )

    def _check_lr(self) -> None:
        if not 0.0 <= self.min_lr <= self.max_lr:
            raise ValueError(
                f"need 0 <= min_lr <= max_lr, but they are min_lr {self.min_lr} and max_lr "
                f"{self.max_lr}; change one"
            )
        if not 0.0 <= self.init_lr <= self.max_lr:
            raise ValueError(
                f"need 0 <= init_lr <= max_lr, but they are init_lr {self.init_lr} and max_lr "
                f"{self.max_lr}; change one"
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
                f"need 0 <= start_wd <= end_wd, but they are start_wd {self.start_wd} and end_wd "
                f"{self.end_wd}; it can only grow"
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

    def get_wd_coefficient(self) -> float:
        """How far the weight decay is above `start_wd`, as a share of its growth, before its end."""
        ratio = self.num_steps / self.wd_incr_steps
        return ratio if self.wd_incr_style == "linear" else 1.0 - cosine(ratio)

    def get_lr_of_curve(self, min_lr: float, max_lr: float) -> float:
        """The learning rate after warm-up, of every style but the linear one."""
        n = self.num_steps
        if self.lr_decay_style == "constant":
            return max_lr
        if n > self.lr_decay_steps:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(self.lr_warmup_steps, 1) / max(n, 1)))
        return min_lr + self.get_lr_coefficient(n) * (max_lr - min_lr)

    def get_lr_coefficient(self, n: int) -> float:
        """How far the learning rate is above `min_lr` at step n, as a share of `max_lr - min_lr`.

        Of cosine and WSD decay, between the end of warm-up and the end of decay.
        """
        if self.lr_decay_style == "cosine":
            warmup = self.lr_warmup_steps
            return cosine((n - warmup) / (self.lr_decay_steps - warmup))
        num_wsd_steps = n - (self.lr_decay_steps - self.wsd_decay_steps)
        if num_wsd_steps <= 0:
            return 1.0
        return _wsd_coefficient(self.lr_wsd_decay_style, num_wsd_steps / self.wsd_decay_steps)

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


def cosine(ratio: float) -> float:
    """1 at ratio 0, falling to 0 at ratio 1."""
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)


def _wsd_coefficient(style: str, ratio: float) -> float:
    """The last phase of warmup-stable-decay (Hu et al. 2024): 1 at ratio 0, 0 at ratio 1."""
    match style:
        case "linear":
            return 1.0 - ratio
        case "cosine":
            return cosine(ratio)
        case "exponential":
            return 2.0 * 0.5**ratio - 1.0
        case _:
            return 1.0 - math.sqrt(ratio)
