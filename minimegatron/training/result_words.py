"""What a loss that `result_checks` refuses is said to be, and of which samples.

Megatron has this in `loss_func` of its `pretrain_gpt.py`.
"""

import torch

from minimegatron.core.rerun_state_machine import get_rerun_state_machine
from minimegatron.core.utils import unwrap_model
from minimegatron.training import failures
from minimegatron.training.global_vars import get_args, get_train_state


def not_finite(loss: torch.Tensor, model: torch.nn.Module | None) -> str:
    """Of a NaN or Inf: what it is, where, and what to do."""
    what = "NaN" if loss.isnan() else "Inf"
    return (
        f"the loss is {what} in {_where(model)}; look at its samples, lower --lr or --clip-grad, "
        "lengthen --lr-warmup-iters, or compute in another precision; "
        "--no-check-for-nan-in-loss-and-grad goes on"
    )


def spiky(model: torch.nn.Module | None) -> str:
    """Of a loss that is far above the first hundred: on which rank, where, and what to do."""
    usual = get_rerun_state_machine().largest("loss")
    return (
        f"spiky loss on {failures.identify()} in {_where(model)}, where the first hundred were at "
        f"most {usual:.4g}; look at its samples, or lower --lr"
    )


def _where(model: torch.nn.Module | None) -> str:
    """Microbatch, iteration and samples, in the words of a sentence."""
    args, state = get_args(), get_train_state()
    if model is None:
        return f"a microbatch of iteration {state.iteration + 1}"
    microbatch = unwrap_model(model).current_microbatch
    if not model.training:
        return f"microbatch {microbatch} of the evaluation after iteration {state.iteration}"
    # Each step of the samplers deals one microbatch to every copy of the model in turn.
    first = state.consumed_train_samples + args.micro_batch_size * (
        microbatch * args.data_parallel_size + failures.identify().dp
    )
    last = first + args.micro_batch_size - 1
    samples = f"sample {first}" if first == last else f"samples {first} to {last}"
    return f"microbatch {microbatch} of iteration {state.iteration + 1} (training {samples})"
