"""The chain from `pretrain` to one step, top to bottom in the order it runs.

`pretrain` calls, in this order, `initialize_megatron`, `setup_model_and_optimizer`,
`build_train_valid_test_data_iterators` for each chunk, `train` (which chooses the schedule and calls
`train_step`, which runs it) and `evaluate_after_training`. Counterpart: `megatron.training.training`;
what stands there in one file is here in several, and its names can be imported from this one:

* `model_setup`: the model's chunks, the optimizer, its scheduler.
* `data_iterators`: from datasets to microbatches.
* `evaluation`: the loss on other data.
* `progress`: bar and log lines.
* `exit_conditions`: checkpoints, and whether the run goes on.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from minimegatron.core import parallel_state
from minimegatron.core.distributed.finalize_model_grads import finalize_model_grads
from minimegatron.core.enums import ModelType
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from minimegatron.core.optimizer import MegatronOptimizer
from minimegatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.rerun_state_machine import get_rerun_state_machine
from minimegatron.core.tracing import observed_by, traced
from minimegatron.core.utils import get_model_config, or_one
from minimegatron.exports import lazily
from minimegatron.training import failures
from minimegatron.training.data_iterators import build_train_valid_test_data_iterators
from minimegatron.training.dist_signal_handler import signals_remembered
from minimegatron.training.evaluation import evaluate_after_training, evaluate_if_due
from minimegatron.training.exit_conditions import (
    checkpoint_after_training,
    checkpoint_and_decide_exit,
    end_after_rejected_result,
    exit_if_rejected,
)
from minimegatron.training.function_checks import check_functions, takes
from minimegatron.training.global_vars import get_args, get_timers, get_train_state
from minimegatron.training.initialize import initialize_megatron
from minimegatron.training.model_setup import setup_model_and_optimizer
from minimegatron.training.pipeline_schedule import in_wrappers
from minimegatron.training.progress import Progress, describe_model, training_log
from minimegatron.training.reruns import keep_state_for_reruns, skip_iteration
from minimegatron.training.utils import (
    logical_and_across_model_parallel_group,
    print_rank_0,
    reduce_max_stat_across_model_parallel_group,
    sum_over_microbatches,
)
from minimegatron.training.watching import watched

# What Megatron has under this module's name, and no step calls, is looked up where it lives: here, and
# in other files with a `__getattr__` after their imports.
_SETUP = "minimegatron.training.model_setup"
__getattr__, __dir__ = lazily(
    __name__,
    {
        "dummy_train_step": "minimegatron.training.reruns:dummy_train_step",
        "evaluate": "minimegatron.training.evaluation:evaluate",
        "evaluate_and_print_results": "minimegatron.training.evaluation:evaluate_and_print_results",
        "get_megatron_optimizer_config": f"{_SETUP}:get_megatron_optimizer_config",
        "get_model": f"{_SETUP}:get_model",
        "get_optimizer_param_scheduler": f"{_SETUP}:get_optimizer_param_scheduler",
    },
)

NOTHING_TO_DO = "nothing is trained: no iterations are left, or the provider gave no training data"


def pretrain(
    train_valid_test_dataset_provider: Callable[..., tuple],
    model_provider: Callable[..., torch.nn.Module],
    model_type: ModelType,
    forward_step_func: Callable[..., tuple],
    process_non_loss_data_func: Callable | None = None,
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    non_loss_data_func: Callable[[list[torch.nn.Module]], Any] | None = None,
    *,
    wrap_forward_backward_func: Callable[[Callable], Callable] | None = None,
    data_iterator_func: Callable[..., Any] | None = None,
) -> None:
    """A whole training run: initialise, build model and data, train, evaluate, save.

    Args:
        train_valid_test_dataset_provider: `(numbers of samples) -> (train, valid, test)`, each a
            dataset or None; called on the first rank of each tensor-parallel group. With several chunks
            on a rank it is called for each.
        model_provider: `(pre_process, post_process) -> model chunk`, without wrappers; with several
            chunks on a rank it is also given `vp_stage=`, the number of the chunk. Either provider may
            take an argument `vp_stage`: it is None where a rank has one chunk.
        model_type: noted in each chunk, for programs that read it there; nothing here does.
        forward_step_func: `(data_iterator, model) -> (output, loss_func)`; see `forward_step` in
            `core.pipeline_parallel.steps` for what `loss_func(output)` may return.
        process_non_loss_data_func: `(data, iteration, writer)`, called after each evaluation with
            what `non_loss_data_func` returned or, without one, what
            `loss_func(output, non_loss_data=True)` did.
        extra_args_provider: `(parser)` adds the user's own flags; `get_args` then has them.
        args_defaults: defaults that replace the built-in ones.
        get_embedding_ranks, get_position_embedding_ranks: see `initialize_model_parallel`.
        non_loss_data_func: `(model)`, called on every rank during each evaluation.
        wrap_forward_backward_func, data_iterator_func: see `train`.

    `--trace`, `--pace-forward-ms` and `--log-straggler` watch what comes after the set-up (see
    `watching`).
    SIGTERM and SIGUSR1 end it after the step under way, with a checkpoint and exit code 0. Ends the
    process if a rank fails (see `failures`), if the arguments cannot work (exit code 2), or if a result
    was rejected and examined (16 or 17; see `core.rerun.states`).
    """
    needed = (model_provider, train_valid_test_dataset_provider, forward_step_func)
    others = (process_non_loss_data_func, non_loss_data_func)
    ranks = (get_embedding_ranks, get_position_embedding_ranks)
    with failures.reported():
        initialize_megatron(
            extra_args_provider,
            args_defaults,
            check_args=partial(check_functions, needed, (*others, *ranks)),
            get_embedding_ranks=get_embedding_ranks,
            get_position_embedding_ranks=get_position_embedding_ranks,
        )
        state = get_train_state()
        model, optimizer, opt_param_scheduler = setup_model_and_optimizer(
            model_provider, model_type
        )
        config = get_model_config(model[0])
        train_iterator, valid_iterator, test_iterator = _iterators_of_all_chunks(
            train_valid_test_dataset_provider, len(model)
        )

        state.do_train |= data_iterator_func is not None
        with signals_remembered(), watched():
            print_rank_0("training ..." if state.do_train else NOTHING_TO_DO)
            if state.do_train:
                train(
                    forward_step_func,
                    model,
                    optimizer,
                    opt_param_scheduler,
                    train_iterator,
                    valid_iterator,
                    process_non_loss_data_func,
                    config,
                    non_loss_data_func=non_loss_data_func,
                    wrap_forward_backward_func=wrap_forward_backward_func,
                    data_iterator_func=data_iterator_func,
                )
                checkpoint_after_training(model, optimizer, opt_param_scheduler)
            iterators, funcs = (valid_iterator, test_iterator), others
            evaluate_after_training(forward_step_func, iterators, model, config, *funcs)
        failures.leave_together()
    exit_if_rejected(state.exit_code)


def _iterators_of_all_chunks(provider: Callable[..., tuple], num_chunks: int) -> tuple:
    """Train, valid and test iterators; lists of them, one per chunk, with interleaving.

    Every chunk has its own: each must see every microbatch, and the chunks take turns.
    """
    is_told = takes(provider, "vp_stage")
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is None:
        alone = partial(provider, vp_stage=None) if is_told else provider
        return build_train_valid_test_data_iterators(alone)
    per_chunk = [
        build_train_valid_test_data_iterators(
            partial(provider, vp_stage=vp_stage) if is_told else provider
        )
        for vp_stage in range(num_chunks)
    ]
    return tuple(list(of_split) for of_split in zip(*per_chunk, strict=True))


def train(
    forward_step_func: Callable[..., tuple],
    model: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    train_data_iterator: Iterator | list[Iterator] | None,
    valid_data_iterator: Iterator | list[Iterator] | None,
    process_non_loss_data_func: Callable | None,
    config: ModelParallelConfig,
    *,
    non_loss_data_func: Callable | None = None,
    wrap_forward_backward_func: Callable[[Callable], Callable] | None = None,
    data_iterator_func: Callable[..., Any] | None = None,
) -> int:
    """Steps until `--train-iters`, with evaluation, log lines and checkpoints between them.

    Ends earlier where `checkpoint_and_decide_exit` says so. Returns the number of the last iteration.

    Args:
        wrap_forward_backward_func: `(schedule function) -> function`, called once; what it returns
            runs the training steps, with the same arguments. Evaluation runs the schedule itself.
        data_iterator_func: `(model, optimizer, iteration) -> iterator`, or a list of them, one per
            chunk; called on every rank before each step, in place of `train_data_iterator`. It may run
            forward passes of its own.
    """
    args, state, total_loss_dict = get_args(), get_train_state(), {}
    for chunk in model:
        chunk.train()
    _connect_schedule(config, model, optimizer)
    # The schedule for the sizes of the run, or the one that was named; in the caller's wrapper, if any.
    schedule = get_forward_backward_func(pipeline_schedule=args.pipeline_schedule)
    forward_backward_func = in_wrappers(schedule, wrap_forward_backward_func)

    describe_more = partial(describe_model, config, model)
    with Progress(args.train_iters, state.iteration, describe_more) as progress:
        while state.iteration < args.train_iters:
            update_num_microbatches(state.consumed_train_samples, consistency_check=True)
            if skip_iteration(None if data_iterator_func else train_data_iterator):
                continue
            config.timers = get_timers() if args.timing_log_level > 0 else None
            if data_iterator_func is not None:
                train_data_iterator = data_iterator_func(model, optimizer, state.iteration)
            learning_rate = get_canonical_lr_for_logging(optimizer.param_groups)
            with observed_by(config.timers):
                # The exits are should_checkpoint, should_exit and exit_code.
                loss_dict, skipped_iter, *exits, grad_norm, num_zeros_in_grad = train_step(
                    forward_step_func,
                    train_data_iterator,
                    model,
                    optimizer,
                    opt_param_scheduler,
                    config,
                    forward_backward_func,
                )
            if end_after_rejected_result(*exits, model, optimizer, opt_param_scheduler):
                break
            state.iteration += 1
            state.consumed_train_samples += get_current_global_batch_size()
            state.skipped_train_samples += skipped_iter * get_current_global_batch_size()
            training_log(
                loss_dict,
                total_loss_dict,
                learning_rate,
                state.iteration,
                float(optimizer.get_loss_scale()),
                skipped_iter,
                grad_norm,
                num_zeros_in_grad,
                progress,
            )
            evaluate_if_due(
                forward_step_func,
                valid_data_iterator,
                model,
                config,
                process_non_loss_data_func,
                non_loss_data_func,
                progress,
            )
            if checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, state.iteration):
                break
            if state.saved_iteration == state.iteration:
                progress.restart()
    return state.iteration


def _connect_schedule(
    config: ModelParallelConfig, model: list[torch.nn.Module], optimizer: MegatronOptimizer
) -> None:
    """Fills in the hooks through which the schedule reaches optimizer and gradient buffers.

    `config` is that of the first chunk here: a schedule reads it for all of them (`config_of_run`).
    """
    args = get_args()
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    keep_state_for_reruns(config, model)
    if args.overlap_grad_reduce or args.DDP_impl == "torch":
        # Without these, every microbatch would send its gradients.
        hooks = [chunk.no_sync for chunk in model]
        config.no_sync_func = hooks if len(hooks) > 1 else hooks[0]


@traced("train-step")
def train_step(
    forward_step_func: Callable[..., tuple],
    data_iterator: Iterator | list[Iterator] | None,
    model: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    config: ModelParallelConfig,
    forward_backward_func: Callable,
) -> tuple[dict[str, torch.Tensor], int, bool, bool, int, float | None, float | None]:
    """One global batch: all microbatches forward and backward, then one update.

    Returns seven values, as the sources' do:

        loss_reduced        mean losses, scalar tensors; empty but on the last stage
        skipped_iter        1 if the update was skipped, else 0
        should_checkpoint   save a checkpoint of the step before, because of a rejected result
        should_exit         end the run: nothing was updated
        exit_code           with which; 0 to go on
        grad_norm           before clipping
        num_zeros_in_grad   None without `--log-num-zeros-in-grad`
    """
    args, machine = get_args(), get_rerun_state_machine()

    machine.begin_step(get_train_state().iteration + 1)
    while machine.should_run_forward_backward(data_iterator):  # once, unless a result was rejected
        # -- 1. Gradients back to zero: in the buffers, and where autograd may have left some --
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()

        # -- 2. The schedule runs every microbatch and, at its end, `finalize_model_grads` --
        losses_reduced = forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=get_num_microbatches(),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.decoder_seq_length,
            forward_only=False,
        )
    should_checkpoint, should_exit, exit_code = machine.should_checkpoint_and_exit()
    if should_exit:
        return {}, 1, should_checkpoint, should_exit, exit_code, None, None

    # -- 3. The update; then the ranks of a model agree on what they report --
    update_successful, grad_norm, num_zeros_in_grad = optimizer.step()
    # All ranks of a model answer alike already; in Megatron one whose parameters are frozen may not.
    update_successful = logical_and_across_model_parallel_group(update_successful)
    grad_norm = reduce_max_stat_across_model_parallel_group(grad_norm)
    if args.log_num_zeros_in_grad:
        num_zeros_in_grad = reduce_max_stat_across_model_parallel_group(num_zeros_in_grad)

    # -- 4. Learning rate of the next step, counted in samples --
    if update_successful:
        opt_param_scheduler.step(increment=get_current_global_batch_size())

    # -- 5. What the loss function reported, over all microbatches and copies of the model --
    summed = sum_over_microbatches(losses_reduced)
    loss_reduced = {key: total / or_one(count) for key, (total, count) in summed.items()}
    skipped_iter = int(not update_successful)
    exits = should_checkpoint, should_exit, exit_code
    return loss_reduced, skipped_iter, *exits, grad_norm, num_zeros_in_grad
