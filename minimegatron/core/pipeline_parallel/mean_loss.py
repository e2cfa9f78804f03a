"""What is said of a loss function that returns a mean where sums are waited for.

Megatron has no counterpart: it has the same arithmetic, and says nothing.
"""

import warnings

import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig

REMEDY = "return (summed loss, number of tokens, report), or turn calculate_per_token_loss off"


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
