"""A convolution of each channel with its own few weights, over this token and those before it.

Megatron has no counterpart; it calls a kernel for the GPU, that of the package causal_conv1d.
"""

import torch
import torch.nn.functional as F


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """y_t = bias + sum over k of weight_k x_{t - width + 1 + k}; before the first token is zero.

    Args:
        x: [s, b, channels].
        weight: [channels, 1, width], as `torch.nn.Conv1d` has it. The last one is the token's own.
        bias: [channels].

    >>> x = torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    >>> causal_conv1d(x, torch.tensor([[[2.0, 1.0]]]), torch.zeros(1)).flatten().tolist()
    [1.0, 12.0, 120.0]
    """
    length, width = x.size(0), weight.size(-1)
    padded = F.pad(x, (0, 0, 0, 0, width - 1, 0))
    terms = (padded[k : k + length] * weight[:, 0, k] for k in range(width))
    return sum(terms, bias)
