"""One transformer layer: norm, attention, add; norm, MLP, add. T5's decoder attends twice.

Counterpart: `megatron.core.transformer.transformer_layer`; `bias_dropout_add` is there in
`megatron.core.fusions.fused_bias_dropout`.
"""

import torch.nn.functional as F
from torch import Tensor

from minimegatron.core import tracing
from minimegatron.core.process_groups_config import ProcessGroupCollection, stage_of
from minimegatron.core.tensor_parallel.weight_grad_store import DelayedWgrad
from minimegatron.core.tracing import traced
from minimegatron.core.transformer import cross_attention
from minimegatron.core.transformer.layer_parts import (
    TransformerLayerSubmodules,
    build_mlp,
    get_transformer_layer_offset,  # noqa: F401
)
from minimegatron.core.transformer.layer_placement import num_layers_before_chunk
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.spec_utils import build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig


def bias_dropout_add(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float, training: bool
) -> Tensor:
    """residual + dropout(x + bias), in the residual's dtype; always a new tensor."""
    x, bias = x_with_bias
    if bias is not None:
        x = x + bias
    if dropout > 0.0 and training:
        x = F.dropout(x, p=dropout, training=True)
    return residual + x.to(residual.dtype)


class TransformerLayer(DelayedWgrad, MegatronModule):
    """A pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)).

    With cross attention: between the two, x + attention(norm(x), context).

    Args:
        layer_number: from 1, within this chunk. The attribute of that name counts from 1 within the
            whole model.
        hidden_dropout: None for the config's.
        pg_collection: tp and pp, and those of experts; None for `parallel_state`'s.
        vp_stage: the chunk, with virtual stages.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ):
        super().__init__(config)
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        before = num_layers_before_chunk(config, vp_stage, stage_of(pg_collection.pp))
        self.layer_number = before + layer_number
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        eps = config.layernorm_epsilon
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": eps}
        place = {"layer_number": self.layer_number, "pg_collection": pg_collection}
        self.input_layernorm = build_module(submodules.input_layernorm, **norm)
        self.self_attention = build_module(submodules.self_attention, config=config, **place)
        self.pre_cross_attn_layernorm = build_module(submodules.pre_cross_attn_layernorm, **norm)
        self.cross_attention = build_module(submodules.cross_attention, config=config, **place)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm)
        self.mlp = build_mlp(submodules.mlp, config, **place)

    @traced("layer-forward", tracing.of_layer_forward)
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor | None = None,
        checkpoint_core_attention: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(hidden states, context) -> both, the second as it came.

        Hidden states are [s, b, h]; [s/t, b, h] with sequence parallelism. Under
        `config.fp32_residual_connection` they are float32, whatever the weights' dtype. The context,
        [s', b, h], is another stack's output; a layer without cross attention does not read it.
        """
        hidden_states = self._forward_attention(
            hidden_states, attention_mask, rotary_pos_emb, checkpoint_core_attention
        )
        if self.cross_attention is not None:
            given = (hidden_states, context, context_mask, checkpoint_core_attention)
            hidden_states = cross_attention.attend_to_context(self, bias_dropout_add, *given)
        return self._forward_mlp(hidden_states), context

    def _forward_attention(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None,
        checkpoint_core_attention: bool,
    ) -> Tensor:
        attended = self.self_attention(
            self.input_layernorm(hidden_states),
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            checkpoint_core_attention=checkpoint_core_attention,
        )
        return bias_dropout_add(attended, hidden_states, self.hidden_dropout, self.training)

    def _forward_mlp(self, hidden_states: Tensor) -> Tensor:
        output = self.mlp(self.pre_mlp_layernorm(hidden_states))
        return bias_dropout_add(output, hidden_states, self.hidden_dropout, self.training)
