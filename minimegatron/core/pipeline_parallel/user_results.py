"""What a user's two functions returned, the forward step and the loss function: looked at, or refused.

Megatron has no counterpart: it has the same arithmetic, and says nothing, or fails with Python's own
words.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig

FORMS = "return (loss, report) or (summed loss, number of tokens, report)"
REMEDY = "return (summed loss, number of tokens, report), or turn calculate_per_token_loss off"


def refuse_other_outputs(outputs: list[torch.Tensor], shapes: Any, received: torch.dtype) -> None:
    """Raises ValueError for outputs that the next stage would read in another shape or dtype.

    `shapes` is one, or a list of some; one that is empty is sent ahead of its message.
    """
    is_one = all(isinstance(size, int) for size in shapes)
    announced = [tuple(shape) for shape in ([shapes] if is_one else shapes)]
    made = [tuple(output.shape) for output in outputs]
    if () not in announced and made != announced:
        raise ValueError(
            f"this stage's output has shape {', '.join(map(str, made))}, but the next stage receives "
            f"{', '.join(map(str, announced))}, [sequence, batch, hidden]; give the schedule the "
            "data's seq_length and micro_batch_size, or make the output so; where it is to be another, "
            "adjust_tensor_shapes_fn announces it, or set variable_seq_lengths"
        )
    others = [output.dtype for output in outputs if output.dtype != received]
    if others:
        raise ValueError(
            f"this stage's output is of {others[0]}, but the next stage receives {received}; set "
            "pipeline_dtype to the dtype of what the stages send"
        )


def refuse_step_results(returned: Any) -> None:
    """Raises ValueError: a forward step returned this, and not its two values."""
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
        raise ValueError(
            f"the forward step returned {_in_words(returned)}; return two values, the model's output "
            "and the loss function, for example partial(loss_func, loss_mask)"
        )
    raise ValueError(
        f"the forward step's second value is {_in_words(returned[1])}, which cannot be called; "
        "return the model's output first, the loss function second"
    )


def value_to_store(loss_func: Callable | None, output_tensor: torch.Tensor) -> Any:
    """Where there is no loss, the last stage stores the output, or what `loss_func` makes of it."""
    return output_tensor if loss_func is None else loss_func(output_tensor, non_loss_data=True)


def scaled_mean(
    returned: Any,
    config: ModelParallelConfig,
    model: torch.nn.Module | None,
    cp_group_size: int,
    num_microbatches: int,
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Of a loss function's two values: (the mean, scaled for backward; no tokens; the report).

    Raises ValueError if it returned something else, and not three values.
    """
    is_row = isinstance(returned, (tuple, list))
    if not (is_row and len(returned) == 2):
        what = f"{len(returned)} values" if is_row else _in_words(returned)
        raise ValueError(f"the loss function returned {what}; {FORMS}")
    output_tensor, report = returned
    warn_of_mean(config, model)
    no_tokens = torch.tensor(0, dtype=torch.int)
    return output_tensor * cp_group_size / num_microbatches, no_tokens, report


def _in_words(value: Any) -> str:
    if value is None:
        return "None"
    size = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"a {type(value).__name__}{size}"


def look_at_loss(loss: torch.Tensor) -> None:
    """Called before the backward of a loss that is not one number with a gradient.

    Raises ValueError for several numbers. Warns of a loss that no weight has a part in: the step has no
    gradients then, and goes on, as in Megatron.
    """
    if loss.requires_grad:
        raise ValueError(
            f"backward begins at the loss, which has shape {tuple(loss.shape)}; return one number "
            "from the loss function, a sum or a mean"
        )
    warnings.warn(
        "the loss has no gradient: all weights are frozen, or the loss function detached it, or "
        "took another tensor for the model's output; this step gives no gradients",
        stacklevel=1,
    )


def warn_of_mean(config: ModelParallelConfig, model: torch.nn.Module | None) -> None:
    """Called where a loss function has returned two values; warns if gradients come out too large.

    With `calculate_per_token_loss` the gradients of the d * c ranks that have a loss are summed, not
    averaged, as in Megatron: d * c times those of the mean. A wrapper for data parallelism knows these
    ranks; without one nothing is said of them, nor if `config.mean_loss_has_factor`. Auxiliary losses
    are sums then, to be divided by tokens that nobody has counted.

    It is for training alone. Python shows the same warning once in a process; here the first copy of
    the model warns, on its first tensor rank.
    """
    if not (config.calculate_per_token_loss and torch.is_grad_enabled()):
        return
    group = getattr(model, "dp_cp_group", None)
    num_ranks = 1 if group is None else group.size()
    is_first = group is None or (group.rank() == 0 and model.pg_collection.tp.rank() == 0)
    if num_ranks > 1 and is_first and not config.mean_loss_has_factor:
        warnings.warn(
            "the loss function returned 2 values, a mean, and with calculate_per_token_loss gradients "
            f"are summed over the d * c = {num_ranks} ranks that have a loss: they are {num_ranks} "
            f"times too large; {REMEDY}; or, if the loss has a factor of 1/{num_ranks} already, set "
            "mean_loss_has_factor=True in the configuration",
            stacklevel=1,
        )
    if config.aux_loss_scale_funcs and is_first:
        warnings.warn(
            "the loss function returned 2 values, a mean, but with calculate_per_token_loss auxiliary "
            "losses (of experts, of further tokens) wait to be divided by the number of tokens; "
            f"{REMEDY}",
            stacklevel=1,
        )


def count_of(num_tokens: Any, calculate_per_token_loss: bool) -> torch.Tensor:
    """Makes a tensor [] of a loss function's number of tokens, where it is not one already.

    Raises ValueError for a dictionary, for several numbers, and for a gradient that would be lost.
    """
    if isinstance(num_tokens, Mapping):
        raise ValueError(
            "the loss function returned a dictionary as number of tokens; return (summed loss, number "
            "of tokens, report), in this order"
        )
    count = torch.as_tensor(num_tokens)
    if count.numel() != 1:
        raise ValueError(
            f"the loss function returned a number of tokens of shape {tuple(count.shape)}; return "
            "one number, for example loss_mask.sum()"
        )
    if count.requires_grad and calculate_per_token_loss:
        raise ValueError(
            "the loss function returned a number of tokens that requires a gradient, but with "
            "calculate_per_token_loss all gradients are divided by all tokens after backward, and this "
            "one would be lost; return num_tokens.detach(), or turn calculate_per_token_loss off"
        )
    return count


def scale_auxiliary_losses(
    config: ModelParallelConfig,
    output_tensor: torch.Tensor,
    num_microbatches: int,
    cp_group_size: int,
) -> None:
    """After a forward: sets the scale of experts' balance losses and of further tokens' losses.

    They are not in the loss that was just scaled. Which divisors each needs, its function knows: every
    stage calls it, before backward.
    """
    scale = torch.ones(1, device=output_tensor.device)
    if config.grad_scale_func is not None:
        scale = config.grad_scale_func(scale)
    for set_loss_scale in config.aux_loss_scale_funcs:
        set_loss_scale(scale, num_microbatches, cp_group_size)


# -- Tensors that stages exchange --


def refuse_view(out: torch.Tensor) -> None:
    """Raises ValueError: freeing this output would free nothing."""
    raise ValueError(
        f"the stage's output of shape {tuple(out.shape)} is a view, so freeing it would free "
        "nothing; return a tensor of its own (for example `.clone()`), or turn "
        "deallocate_pipeline_outputs off"
    )


def refuse_gradient(grad: torch.Tensor | None, output: torch.Tensor) -> None:
    """Raises ValueError without a gradient, for several numbers; RuntimeError for another shape."""
    if grad is None:
        raise ValueError(
            f"backward without a gradient needs a scalar, not shape {tuple(output.shape)}"
        )
    raise RuntimeError(f"a gradient of {tuple(grad.shape)} for {tuple(output.shape)}")


def add_gradient(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Adds to `tensor.grad`, as autograd would for one more user of the tensor that was handed on."""
    if grad is not None:
        tensor.grad = grad if tensor.grad is None else tensor.grad + grad
