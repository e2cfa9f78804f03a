"""softmax(Q K^T / sqrt(d)) V, for the heads of this rank.

Counterpart: `megatron.core.transformer.dot_product_attention`, which multiplies matrices itself and
leaves fused kernels to Transformer Engine.
"""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core.left_out import accepts_left_out
from minimegatron.core.tensor_parallel.random import get_cuda_rng_tracker
from minimegatron.core.transformer.enums import AttnMaskType
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.transformer_config import TransformerConfig

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


@accepts_left_out
class DotProductAttention(MegatronModule):
    """Attention proper, without projections; it has no parameters.

    Args:
        layer_number: from 1, in the whole model.
        attn_mask_type: what is masked beside, or without, `attention_mask`.
        attention_dropout: None for the config's.
        softmax_scale: None for 1 / sqrt(head width).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
    ):
        super().__init__(config)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.attention_dropout = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )

    def _mask(
        self, attention_mask: torch.Tensor | None, s_q: int, s_k: int, device: torch.device
    ) -> tuple[torch.Tensor | None, bool]:
        """(True where attention may look, or None for no mask, is it plain causal instead)."""
        causal = self.attn_mask_type in _CAUSAL
        if self.attn_mask_type == AttnMaskType.no_mask or attention_mask is None:
            return None, causal
        visible = attention_mask.logical_not()
        if causal:
            visible = visible & torch.ones(s_q, s_k, dtype=torch.bool, device=device).tril()
        return visible, False

    def _dropout_rng(self, dropout: float) -> Any:
        """Each rank drops other heads' probabilities, so it draws from its own stream.

        Under sequence parallelism the block has forked to that stream already, for all its layers.
        """
        if dropout == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return get_cuda_rng_tracker().fork()

    @accepts_left_out
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention over the whole sequence, for this rank's heads.

        Args:
            query: [s, b, a/t, d].
            key, value: [s, b, g/t, d]; each of the g groups serves a/g query heads.
            attention_mask: bool, broadcastable to [b, a/t, s, s], True where attention must not
                look; None for none beside `attn_mask_type`.

        Returns:
            [s, b, (a/t) d].
        """
        s, b = query.shape[:2]
        dropout = self.attention_dropout if self.training else 0.0
        visible, is_causal = self._mask(attention_mask, s, key.size(0), query.device)
        # [s, b, heads, d] -> [b, heads, s, d], as views.
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        with self._dropout_rng(dropout):
            context = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=visible,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.softmax_scale,
                enable_gqa=query.size(1) != key.size(1),
            )
        return context.permute(2, 0, 1, 3).reshape(s, b, -1)
