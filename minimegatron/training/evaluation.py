"""The loss on data that was not trained on.

Counterpart: the functions of the same names in `megatron.training.training`.

A forward pass over a pipeline needs all of its ranks: every rank enters every call here, also a rank
that does not use the result.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.tracing import traced
from minimegatron.training.curves import get_tensorboard_writer, write_curves
from minimegatron.training.global_vars import get_args, get_train_state
from minimegatron.training.pipeline_schedule import schedule_of_run
from minimegatron.training.progress import Progress, broadcast_from_last_stage
from minimegatron.training.reruns import not_rerun
from minimegatron.training.utils import (
    print_rank_0,
    sum_over_microbatches,
)


@traced("evaluate")
def evaluate(
    forward_step_func: Callable,
    data_iterator: Iterator | list[Iterator] | None,
    model: list[torch.nn.Module],
    process_non_loss_data_func: Callable | None,
    config: ModelParallelConfig,
    *,
    non_loss_data_func: Callable | None = None,
) -> tuple[dict[str, float], Any]:
    """Mean losses over `--eval-iters` global batches, the same on every rank, and non-loss data.

    Each token weighs the same, wherever it was computed, or each microbatch, where the loss function
    reports means, as BERT's does. Non-loss data is what `non_loss_data_func(model)` returned on this
    rank or, if only `process_non_loss_data_func` is given, what the loss function collected of one
    batch with `collect_non_loss_data`.
    """
    if not (process_non_loss_data_func is None or callable(process_non_loss_data_func)):
        raise ValueError(
            f"process_non_loss_data_func is {process_non_loss_data_func!r:.60}, which cannot be "
            "called; give a function or None (older programs had verbose in its place)"
        )
    args = get_args()
    num_microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    forward_backward_func = schedule_of_run()
    sizes = {
        "num_microbatches": num_microbatches,
        "seq_length": args.seq_length,
        "micro_batch_size": args.micro_batch_size,
        "decoder_seq_length": args.decoder_seq_length,
    }
    for chunk in model:
        chunk.eval()
    totals: dict[str, torch.Tensor] = {}
    # On a terminal only: a file has the result, a line later.
    hide = None if dist.get_rank() == 0 else True
    batches = tqdm(range(args.eval_iters), "evaluating", unit="batch", leave=False, disable=hide)
    with torch.no_grad(), _untimed(config), not_rerun():
        for iteration in batches:
            reports = forward_backward_func(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                forward_only=True,
                first_val_step=iteration == 0,
                **sizes,
            )
            for key, pair in sum_over_microbatches(reports).items():
                totals[key] = totals[key] + pair if key in totals else pair
            get_train_state().consumed_valid_samples += args.global_batch_size
        collected = None
        if non_loss_data_func is not None:
            # It may read any weight; a forward has waited for those that it needs itself.
            for chunk in model:
                chunk.start_param_sync(force_sync=True)
            collected = non_loss_data_func(model)
        elif process_non_loss_data_func is not None:
            collected = forward_backward_func(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                forward_only=True,
                collect_non_loss_data=True,
                **sizes,
            )
            get_train_state().consumed_valid_samples += args.global_batch_size
    for chunk in model:
        chunk.train()
    means = {key: float(pair[0]) / (float(pair[1]) or 1.0) for key, pair in totals.items()}
    return broadcast_from_last_stage(means), collected


@contextmanager
def _untimed(config: ModelParallelConfig) -> Iterator[None]:
    """Timers are of training: none watches the schedule, and what the program itself times is not
    in the next line of the log."""
    timers, config.timers = vars(config).get("timers"), None
    try:
        with timers.set_aside() if timers is not None else nullcontext():
            yield
    finally:
        config.timers = timers


def evaluate_and_print_results(
    prefix: str,
    forward_step_func: Callable,
    data_iterator: Iterator | list[Iterator] | None,
    model: list[torch.nn.Module],
    iteration: int,
    process_non_loss_data_func: Callable | None,
    config: ModelParallelConfig,
    *,
    write_to_tensorboard: bool = True,
    non_loss_data_func: Callable | None = None,
) -> dict[str, float]:
    """`evaluate`, then its losses and perplexities on rank 0. Returns the losses, on every rank.

    Then `process_non_loss_data_func(collected, iteration, writer)` is called on every rank; what
    the loss function collected is on the last stage, an empty list elsewhere; `writer` is that of
    TensorBoard or None.
    """
    losses, collected = evaluate(
        forward_step_func,
        data_iterator,
        model,
        process_non_loss_data_func,
        config,
        non_loss_data_func=non_loss_data_func,
    )
    text = f" validation loss at {prefix}"
    for key, loss in losses.items():
        text += f" | {key} {loss:.4f} | {key} PPL {math.exp(min(20.0, loss)):.3f}"
    if write_to_tensorboard:
        write_curves({f"{key} validation": loss for key, loss in losses.items()}, iteration)
    print_rank_0("-" * len(text))
    print_rank_0(text)
    print_rank_0("-" * len(text))
    if process_non_loss_data_func is not None:
        process_non_loss_data_func(collected, iteration, get_tensorboard_writer())
    return losses


def evaluate_if_due(
    forward_step_func: Callable,
    valid_data_iterator: Iterator | list[Iterator] | None,
    model: list[torch.nn.Module],
    config: ModelParallelConfig,
    process_non_loss_data_func: Callable | None,
    non_loss_data_func: Callable | None,
    progress: Progress,
) -> None:
    """Every `--eval-interval` steps, but not after the last: `evaluate_after_training` comes then."""
    args, state = get_args(), get_train_state()
    interval, iteration = args.eval_interval, state.iteration
    is_due = interval is not None and iteration % interval == 0 and iteration < args.train_iters
    if is_due and state.do_valid:
        evaluate_and_print_results(
            f"iteration {iteration}",
            forward_step_func,
            valid_data_iterator,
            model,
            iteration,
            process_non_loss_data_func,
            config,
            non_loss_data_func=non_loss_data_func,
        )
        progress.restart()


def evaluate_after_training(
    forward_step_func: Callable,
    iterators: tuple[Any, Any],
    model: list[torch.nn.Module],
    config: ModelParallelConfig,
    process_non_loss_data_func: Callable | None,
    non_loss_data_func: Callable | None,
) -> None:
    """On the validation and the test data, unless the run ends early."""
    state, funcs = get_train_state(), (process_non_loss_data_func, non_loss_data_func)
    for name, iterator, wanted, (process_func, non_loss_func) in (
        ("validation", iterators[0], state.do_valid, funcs),
        ("test", iterators[1], state.do_test, (None, None)),
    ):
        if wanted and state.exit_reason is None:
            evaluate_and_print_results(
                f"iteration {state.iteration} on {name} set",
                forward_step_func,
                iterator,
                model,
                state.iteration,
                process_func,
                config,
                non_loss_data_func=non_loss_func,
                write_to_tensorboard=name == "validation",
            )
