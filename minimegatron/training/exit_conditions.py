"""Whether the run goes on after a step, decided by all ranks alike, and the checkpoint if not.

Counterpart: `checkpoint_and_decide_exit` of `megatron.training.training`.

Ranks must leave at the same step: one that left alone would leave the others waiting for it. But a
signal reaches them at different moments, and their clocks differ. So whatever any rank knows is made
known to all, in one message of two numbers.
"""

import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.core.optimizer import MegatronOptimizer
from minimegatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from minimegatron.core.rerun_state_machine import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
)
from minimegatron.core.utils import get_device
from minimegatron.training import checkpoint_folder, checkpointing, rerun_state
from minimegatron.training.dist_signal_handler import signal_received
from minimegatron.training.global_vars import get_args, get_train_state
from minimegatron.training.utils import print_rank_0

_start_time = time.monotonic()
"""Of the process, as nearly as a module knows: what a scheduler's time limit counts from."""


def checkpoint_and_decide_exit(
    model: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    iteration: int,
) -> bool:
    """Saves if that is due, or if the run is to end now; True, on all ranks, if it is."""
    args, state = get_args(), get_train_state()
    state.exit_reason = _reason_to_exit(iteration)
    at_interval = args.save_interval is not None and iteration % args.save_interval == 0
    # The last step's checkpoint is written when training is over.
    due = state.exit_reason is not None or (at_interval and iteration < args.train_iters)
    if due and args.save is not None:
        checkpointing.save_checkpoint(iteration, model, optimizer, opt_param_scheduler)
    if state.exit_reason is not None:
        saved = "" if args.save is not None else "; nothing is saved without --save"
        print_rank_0(f" exiting after iteration {iteration}: {state.exit_reason}{saved}")
    return state.exit_reason is not None


def checkpoint_after_training(
    model: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
) -> None:
    """The last checkpoint, of a run that came to its end."""
    args, state = get_args(), get_train_state()
    if state.exit_reason is None:
        print_rank_0("after training is done")
        if args.save is not None:
            checkpointing.save_checkpoint(state.iteration, model, optimizer, opt_param_scheduler)


def _reason_to_exit(iteration: int) -> str | None:
    args = get_args()
    minutes = (time.monotonic() - _start_time) / 60.0
    is_over = args.exit_duration_in_mins is not None and minutes > args.exit_duration_in_mins
    seen = torch.tensor([signal_received(), is_over], dtype=torch.int32, device=get_device())
    collectives.all_reduce(seen, dist.group.WORLD, op=collectives.ReduceOp.MAX)
    number, is_over = seen.tolist()
    if number:
        return f"received {signal.Signals(number).name}"
    if iteration >= args.train_iters:
        return None
    if args.exit_interval is not None and iteration % args.exit_interval == 0:
        return f"--exit-interval {args.exit_interval}"
    if is_over:
        return f"--exit-duration-in-mins {args.exit_duration_in_mins:g}"
    return None


# -- Where a result was rejected --

REASONS = {
    EXIT_CODE_RESUME_TO_DISAMBIGUATE: "a result was rejected again; resume on another device",
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION: "a result was rejected, and its verdict is above",
}


def exit_if_rejected(exit_code: int) -> None:
    """Ends a process whose run ended because of a rejected result."""
    if exit_code:
        sys.exit(exit_code)


def end_after_rejected_result(
    should_checkpoint: bool,
    should_exit: bool,
    exit_code: int,
    model: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
) -> bool:
    """What `train_step` says of exits: True, on all ranks, if the run ends with the step undone.

    Then it saves a checkpoint of the step before, if that is asked for, and `pretrain` will end the
    process with `exit_code`. Every rank must call it.
    """
    if not should_exit:
        return False
    args, state = get_args(), get_train_state()
    state.exit_reason, state.exit_code = REASONS[exit_code], exit_code
    # Without a checkpoint of now, the state goes to the one that this examination began from.
    folder = None if should_checkpoint else state.rerun_folder
    if should_checkpoint and args.save is not None:
        checkpointing.save_checkpoint(state.iteration, model, optimizer, opt_param_scheduler)
        folder = checkpoint_folder.get_checkpoint_name(args.save, state.iteration)
    if exit_code == EXIT_CODE_RESUME_TO_DISAMBIGUATE and folder is not None:
        rerun_state.save_rerun_state(Path(folder))
    lost = "; without --save nobody can resume it" if should_checkpoint and folder is None else ""
    print_rank_0(
        f" exiting after iteration {state.iteration}, with code {exit_code}: "
        f"{state.exit_reason}{lost}"
    )
    return True
