"""RMSNorm: a norm without a mean and without a bias.

Megatron has this in `megatron.core.transformer.torch_norm`.
"""

import torch
import torch.nn.functional as F


class RMSNorm(torch.nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

    Input of any float dtype; output in the weight's.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(input.dtype)
        return F.rms_norm(input, self.normalized_shape, weight, self.eps).to(self.weight.dtype)
