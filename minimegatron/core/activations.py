"""Activation functions that torch knows under other names.

Counterpart: `megatron.core.activations`.
"""

import torch
import torch.nn.functional as F


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by the tanh approximation (Hendrycks and Gimpel 2016, section 2), as GPT-2 computes it."""
    return F.gelu(x, approximate="tanh")
