"""The schedule of learning rate and weight decay that the command line asks for.

Part of it runs before any process group exists. Counterpart: `get_optimizer_param_scheduler` of
`megatron.training.training`.
"""

import argparse
from typing import Any

from minimegatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from minimegatron.training.config import Arguments


def schedule_settings(args: Arguments | argparse.Namespace) -> dict[str, Any]:
    """What `OptimizerParamScheduler` is told, in samples (see `samples_in`)."""
    # A run without steps still has an optimizer, whose schedule needs a length.
    decay_iters = max(args.lr_decay_iters, 1)
    decay_steps = samples_in(args, decay_iters)
    if args.lr_warmup_fraction is not None:
        warmup_steps = int(args.lr_warmup_fraction * decay_steps)
    else:
        warmup_steps = samples_in(args, args.lr_warmup_iters)
    wsd_iters = args.lr_wsd_decay_iters
    before_wsd = None if wsd_iters is None else samples_in(args, decay_iters - wsd_iters)
    return {
        "init_lr": args.lr_warmup_init,
        "max_lr": args.lr,
        "min_lr": args.min_lr,
        "lr_warmup_steps": warmup_steps,
        "lr_decay_steps": decay_steps,
        "lr_decay_style": args.lr_decay_style,
        "start_wd": args.start_weight_decay,
        "end_wd": args.end_weight_decay,
        "wd_incr_steps": samples_in(args, max(args.train_iters, 1)),
        "wd_incr_style": args.weight_decay_incr_style,
        "wsd_decay_steps": None if before_wsd is None else decay_steps - before_wsd,
        "lr_wsd_decay_style": args.lr_wsd_decay_style,
        "use_checkpoint_opt_param_scheduler": args.use_checkpoint_opt_param_scheduler,
        "override_opt_param_scheduler": args.override_opt_param_scheduler,
    }


def samples_in(args: Arguments | argparse.Namespace, iterations: int) -> int:
    """Samples in the first `iterations` steps: iterations x global batch; fewer while that ramps up.

    Megatron refuses a ramp-up beside iterations and takes a schedule in samples. Here a schedule of
    iterations ends at its iteration, with a ramp-up too; between two iterations it goes by samples.
    """
    consumed = 0
    if args.rampup_batch_size is not None:
        start, increment, samples = args.rampup_batch_size
        sizes = range(start, args.global_batch_size, increment)
        for number, size in enumerate(sizes, start=1):
            # As RampupBatchsizeNumMicroBatchesCalculator: the next size from so many samples on.
            next_from = -(-number * samples // len(sizes))
            steps = min(iterations, max(0, -(-(next_from - consumed) // size)))
            consumed, iterations = consumed + steps * size, iterations - steps
    return consumed + iterations * args.global_batch_size


class _NoOptimizer:
    """Takes any schedule."""

    param_groups: list[dict[str, Any]] = []


def check_schedule(args: argparse.Namespace, saved: dict[str, Any] | None = None) -> None:
    """Raises ValueError, in flags, for a schedule that cannot be, or not after the `saved` one."""
    try:
        schedule = OptimizerParamScheduler(_NoOptimizer(), **schedule_settings(args))
        if saved is not None:
            schedule.load_state_dict(saved)
    except (KeyError, TypeError) as error:
        raise ValueError(f"its schedule is damaged ({error}); use another checkpoint") from None
    except ValueError as error:
        words = str(error)
        for name, flags in SCHEDULE_FLAGS.items():
            words = words.replace(name, flags)
        raise ValueError(words) from None


SCHEDULE_FLAGS = {
    "init_lr": "--lr-warmup-init",
    "max_lr": "--lr",
    "lr_warmup_steps": "--lr-warmup-iters in samples",
    "wsd_decay_steps": "--lr-wsd-decay-iters in samples",
    "lr_decay_steps": "--lr-decay-iters (or else --train-iters) in samples",
    "start_wd": "--start-weight-decay",
    "end_wd": "--end-weight-decay",
    "wd_incr_steps": "--train-iters in samples",
    "wd_incr_style": "--weight-decay-incr-style",
}
"""What the scheduler calls otherwise than the command line."""
