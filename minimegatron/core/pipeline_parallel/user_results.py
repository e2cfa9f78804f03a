"""What a user's two functions returned, the forward step and the loss function: read, or refused.

Called by: `steps`. Megatron has no counterpart: it has the same arithmetic, and says nothing, or fails
with Python's own words.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig

FORMS = "return (loss, report) or (summed loss, number of tokens, report)"
REMEDY = "return (summed loss, number of tokens, report), or turn calculate_per_token_loss off"


def output_and_function(returned: Any) -> tuple[Any, Callable | None]:
    """The two values of a forward step. Raises ValueError for anything else."""
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
        raise ValueError(
            f"the forward step returned {_in_words(returned)}; return two values, the model's output "
            "and the loss function, for example partial(loss_func, loss_mask)"
        )
    if not (returned[1] is None or callable(returned[1])):
        raise ValueError(
            f"the forward step's second value is {_in_words(returned[1])}, which cannot be called; "
            "return the model's output first, the loss function second"
        )
    return returned[0], returned[1]


def values_of(returned: Any) -> tuple | list:
    """The two or three values of a loss function. Raises ValueError for anything else."""
    if not isinstance(returned, (tuple, list)):
        raise ValueError(f"the loss function returned {_in_words(returned)}; {FORMS}")
    if len(returned) not in (2, 3):
        raise ValueError(f"the loss function returned {len(returned)} values; {FORMS}")
    return returned


def _in_words(value: Any) -> str:
    if value is None:
        return "None"
    size = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"a {type(value).__name__}{size}"


def count_of_tokens(num_tokens: Any, config: ModelParallelConfig) -> torch.Tensor:
    """A loss function's number of tokens, a number or a tensor of one, as a tensor []."""
    if isinstance(num_tokens, Mapping):
        raise ValueError(
            "the loss function returned a dictionary as number of tokens; return (summed loss, number "
            "of tokens, report), in this order"
        )
    num_tokens = torch.as_tensor(num_tokens)
    if num_tokens.numel() != 1:
        raise ValueError(
            f"the loss function returned a number of tokens of shape {tuple(num_tokens.shape)}; return "
            "one number, for example loss_mask.sum()"
        )
    if num_tokens.requires_grad and config.calculate_per_token_loss:
        raise ValueError(
            "the loss function returned a number of tokens that requires a gradient, but with "
            "calculate_per_token_loss all gradients are divided by all tokens after backward, and this "
            "one would be lost; return num_tokens.detach(), or turn calculate_per_token_loss off"
        )
    return num_tokens.reshape(())


def check_loss_tensor(output: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Called before each backward; `grad` is None where `output` is the loss.

    Raises ValueError for a loss of several numbers. Warns of one that no weight has a part in: the
    step has no gradients then, and goes on, as in Megatron.
    """
    if grad is not None:
        return
    if output.requires_grad and output.numel() != 1:
        raise ValueError(
            f"backward begins at the loss, which has shape {tuple(output.shape)}; return one number "
            "from the loss function, a sum or a mean"
        )
    if not output.requires_grad:
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
