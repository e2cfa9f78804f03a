"""Casts of a linear layer within `torch.autocast`, which does not reach into a function of our own.

Megatron has them in `megatron.core.tensor_parallel.layers`, as `custom_fwd`.
"""

import torch


def cast_for_autocast(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The three in autocast's dtype. Autograd casts their gradients back.

    Within the function, forward alone would be cast: its backward runs outside of autocast.
    """
    dtype = torch.get_autocast_dtype(input.device.type)
    return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
