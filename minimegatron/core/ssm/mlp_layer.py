"""A layer of a hybrid model that is one half of a transformer layer: MLP only, or attention only.

Counterpart: `megatron.core.ssm.mlp_layer`; there attention only is a `TransformerLayer` whose other
parts do nothing.
"""

import torch

from minimegatron.core import tracing
from minimegatron.core.tracing import traced
from minimegatron.core.transformer.transformer_layer import TransformerLayer


class MLPLayer(TransformerLayer):
    """x + mlp(norm(x)), with the submodules `pre_mlp_layernorm` and `mlp` alone."""

    @traced("layer-forward", tracing.of_layer_forward)
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        *,
        rotary_pos_emb: torch.Tensor | None = None,
        checkpoint_core_attention: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As a whole layer's."""
        return self._forward_mlp(hidden_states), context


class AttentionLayer(TransformerLayer):
    """x + attention(norm(x)), with the submodules `input_layernorm` and `self_attention` alone."""

    @traced("layer-forward", tracing.of_layer_forward)
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        *,
        rotary_pos_emb: torch.Tensor | None = None,
        checkpoint_core_attention: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As a whole layer's."""
        hidden_states = self._forward_attention(
            hidden_states, attention_mask, rotary_pos_emb, checkpoint_core_attention
        )
        return hidden_states, context
