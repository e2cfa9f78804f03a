"""What an MLP may do beside: gate its activation, and weigh each token by its expert's probability.

Megatron has this in `megatron.core.transformer.mlp.MLP.forward`.
"""

from collections.abc import Callable

import torch


def gated(activate: Callable[[torch.Tensor], torch.Tensor], wide: torch.Tensor) -> torch.Tensor:
    """Gate and what it gates, side by side, [..., 2f/t] -> act(gate) * up, [..., f/t]."""
    gate, up = wide.chunk(2, dim=-1)
    return activate(gate) * up


def scaled_output(
    linear_fc2: torch.nn.Module, wide: torch.Tensor, per_token_scale: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Activations [n, f/t] and a number for each token, [n] -> (output [n, h], no bias to add).

    The activation is multiplied, and the bias too, which is added here.
    """
    scale = per_token_scale.unsqueeze(-1)
    output, bias = linear_fc2((wide * scale).to(wide.dtype))
    if bias is not None:
        output = (output + bias * scale).to(output.dtype)
    return output, None
