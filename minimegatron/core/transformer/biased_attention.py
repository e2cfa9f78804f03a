"""Core attention that adds a bias to its scores: for positions that are distances.

Megatron has no counterpart: its local attention refuses a bias, and Transformer Engine's takes one as
an argument of its own, through every layer. Here bias and mask are one tensor, which goes where masks
go.
"""

import torch

from minimegatron.core.transformer.dot_product_attention import DotProductAttention
from minimegatron.core.transformer.enums import AttnMaskType


def bias_with_mask(bias: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """A bias [1, a/t, s, s'] as the mask of `BiasedDotProductAttention`, [b, a/t, s, s'].

    `attention_mask` is bool, True where attention must not look: there the bias is the least number of
    its dtype. A row without anything to look at then gets a mean of all values, not NaN.
    """
    if attention_mask is None:
        return bias
    return bias.masked_fill(attention_mask, torch.finfo(bias.dtype).min)


class BiasedDotProductAttention(DotProductAttention):
    """`DotProductAttention` whose mask is a bias: numbers to add to the scores."""

    def _mask(
        self, attention_mask: torch.Tensor, s_q: int, s_k: int, device: torch.device
    ) -> tuple[torch.Tensor, bool]:
        if self.attn_mask_type == AttnMaskType.causal:
            later = torch.ones(s_q, s_k, dtype=torch.bool, device=device).triu(1)
            attention_mask = bias_with_mask(attention_mask, later)
        return attention_mask, False
