"""softmax(Q K^T / sqrt(d)) V, for the heads of this rank.

Counterpart: `megatron.core.transformer.dot_product_attention`, which multiplies matrices itself and
leaves fused kernels, and context parallelism, to Transformer Engine.
"""

import contextlib

import torch.nn.functional as F
from torch import Tensor

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.random import get_cuda_rng_tracker
from minimegatron.core.transformer import attention_masks as masks
from minimegatron.core.transformer.context_parallel_groups import way_to_attend
from minimegatron.core.transformer.enums import CAUSAL, AttnMaskType
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.transformer_config import TransformerConfig


class DotProductAttention(MegatronModule):
    """Attention proper, without projections; it has no parameters.

    Args:
        layer_number: from 1, in the whole model.
        attn_mask_type: what is masked beside, or without, `attention_mask`.
        attention_dropout: None for the config's.
        softmax_scale: None for 1 / sqrt(head width).
        cp_comm_type: how ranks that share a sequence attend; None for the config's, for this layer.
        pg_collection: cp is used; None, or one without cp, for `parallel_state`'s, if the config has
            context parallelism at all.

    Raises:
        ValueError: the cp group has not `config.context_parallel_size` ranks; `cp_comm_type` is
            unknown, or does not fit the heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        self.layer_number, self.attn_mask_type = layer_number, attn_mask_type
        self.softmax_scale = softmax_scale
        given = attention_dropout
        self.attention_dropout = config.attention_dropout if given is None else given
        way = way_to_attend(_attend, self, cp_comm_type, pg_collection)
        self.cp_comm_type, self.cp_group, self._attend = way

    def _mask(
        self, attention_mask: Tensor | None, s_q: int, s_k: int
    ) -> tuple[Tensor | None, bool]:
        """(True where attention may look, or None for no mask, is it plain causal instead)."""
        causal = self.attn_mask_type in CAUSAL
        is_plain = self.attn_mask_type == AttnMaskType.no_mask or attention_mask is None
        given = (attention_mask, causal, s_q, s_k)
        return (None, causal) if is_plain else (masks.visible_places(*given), False)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None
    ) -> Tensor:
        """Attention over the whole sequence, for this rank's heads, and tokens with c > 1.

        Args:
            query: [s, b, a/t, d]; [s/c, b, a/t, d] with context parallelism.
            key, value: [s, b, g/t, d], or [s/c, ...]; each of the g groups serves a/g query heads.
            attention_mask: bool, [b or 1, a/t or 1, s or 1, s], or [.., .., s/c or 1, s], True where
                attention must not look; None for none beside `attn_mask_type`.

        Returns:
            [s, b, (a/t) d], or [s/c, ...].

        Raises:
            ValueError: a mask of another shape.
        """
        if attention_mask is not None:
            masks.check_mask_of(self, attention_mask, query, key)
        dropout = self.attention_dropout if self.training else 0.0
        # Each rank drops other heads' probabilities, so it draws from its own stream. Under sequence
        # parallelism the block has forked to that stream already, for all its layers.
        forks = dropout > 0.0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if forks else contextlib.nullcontext():
            return self._attend(self, dropout, query, key, value, attention_mask)


def _attend(
    core: DotProductAttention,
    dropout: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
) -> Tensor:
    """All tokens are on this rank."""
    s, b = query.shape[:2]
    visible, is_causal = core._mask(attention_mask, s, key.size(0))
    # [s, b, heads, d] -> [b, heads, s, d], as views.
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    context = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=core.softmax_scale,
        enable_gqa=query.size(1) != key.size(1),
    )
    return context.permute(2, 0, 1, 3).reshape(s, b, -1)
