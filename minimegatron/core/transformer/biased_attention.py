"""Core attention that adds a bias to its scores: for positions that are distances.

Megatron has no counterpart: its local attention refuses a bias, and Transformer Engine's takes one as
an argument of its own, through every layer. Here bias and mask are one tensor, which goes where masks
go.
"""

import torch

from minimegatron.core.transformer.attention_masks import check_attention_mask, check_is_bool
from minimegatron.core.transformer.dot_product_attention import DotProductAttention
from minimegatron.core.transformer.enums import AttnMaskType


def bias_with_mask(bias: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """A bias [1, a/t, s, s'] as the mask of `BiasedDotProductAttention`, [b, a/t, s, s'].

    `attention_mask` is bool, [b or 1, a/t or 1, s or 1, s'], True where attention must not look: there
    the bias is the least number of its dtype. A row without anything to look at then gets a mean of all
    values, not NaN. Raises ValueError for a mask of another shape or dtype.
    """
    if attention_mask is None:
        return bias
    check_is_bool(attention_mask)
    check_attention_mask(attention_mask, (None, *bias.shape[1:]))
    return bias.masked_fill(attention_mask, torch.finfo(bias.dtype).min)


class BiasedDotProductAttention(DotProductAttention):
    """`DotProductAttention` whose mask is a bias: numbers to add to the scores."""

    def _mask(self, attention_mask: torch.Tensor, s_q: int, s_k: int) -> tuple[torch.Tensor, bool]:
        if self.attn_mask_type == AttnMaskType.causal:
            later = torch.ones(s_q, s_k, dtype=torch.bool, device=attention_mask.device).triu(1)
            attention_mask = bias_with_mask(attention_mask, later[None, None])
        return attention_mask, False
