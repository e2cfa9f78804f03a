"""Cross attention: queries of one stack, keys and values of another stack's output.

Counterpart: `CrossAttention` of `megatron.core.transformer.attention`, which finds these names too.

Of a heads, each tensor-parallel rank has a/t, as in self-attention. The key and value projection is one
weight, with rows [k v] per head, so that cutting the rows evenly gives each rank whole heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.recompute import checkpoint
from minimegatron.core.transformer.context_parallel_groups import options_of_core
from minimegatron.core.transformer.enums import AttnMaskType
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.spec_utils import ModuleSpec, build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["CrossAttention", "CrossAttentionSubmodules"]


@dataclass
class CrossAttentionSubmodules:
    """The specs of cross attention's parts."""

    linear_q: ModuleSpec | type | None = None
    linear_kv: ModuleSpec | type | None = None
    core_attention: ModuleSpec | type | None = None
    linear_proj: ModuleSpec | type | None = None


class CrossAttention(MegatronModule):
    """Multi-head attention of [s, b, h] over a context [s', b, h].

    Args:
        layer_number: from 1, in the whole stack.
        attn_mask_type: see `AttnMaskType`.
        pg_collection: tp and cp are used; None for `parallel_state`'s.

    Raises:
        ValueError: the config groups query heads; as in Megatron, each head needs its own keys. Or
            ranks share a sequence.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: CrossAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        *,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        self.layer_number = layer_number
        if config.num_query_groups != config.num_attention_heads:
            raise ValueError(
                f"cross attention has keys for each of the {config.num_attention_heads} heads, but "
                f"num_query_groups is {config.num_query_groups}; leave num_query_groups out"
            )
        if config.context_parallel_size > 1:
            raise ValueError(
                f"context_parallel_size is {config.context_parallel_size}, but cross attention needs "
                "the whole context on each rank; use 1"
            )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        tp_group = pg_collection.tp
        self.heads = config.num_attention_heads // tp_group.size()
        width = config.num_attention_heads * config.kv_channels
        into_heads = {
            "config": config,
            "init_method": config.init_method,
            "bias": config.add_bias_linear,
            "gather_output": False,
            "tp_group": tp_group,
        }
        self.linear_q = build_module(submodules.linear_q, config.hidden_size, width, **into_heads)
        self.linear_kv = build_module(
            submodules.linear_kv, config.hidden_size, 2 * width, **into_heads
        )
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            **options_of_core(config, submodules.core_attention, cp_comm_type, pg_collection),
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=tp_group,
        )

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[s, b, h] and [s', b, h] -> q [s, b, a/t, d], k and v [s', b, a/t, d]."""
        query, _ = self.linear_q(hidden_states)
        mixed, _ = self.linear_kv(key_value_states)
        width = self.config.kv_channels
        query = query.view(*query.shape[:2], self.heads, width)
        key, value = mixed.view(*mixed.shape[:2], self.heads, 2 * width).split(width, dim=3)
        return query, key, value

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        key_value_states: torch.Tensor,
        *,
        checkpoint_core_attention: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends over the whole context. No positions are turned: they are those of two sequences.

        Args:
            hidden_states: [s, b, h]; [s/t, b, h] with sequence parallelism.
            attention_mask: bool, [b or 1, a/t or 1, s or 1, s'], True where attention must not look.
            key_value_states: the context, [s', b, h]; [s'/t, b, h] with sequence parallelism.
            checkpoint_core_attention: recompute the core in backward (selective recompute).

        Returns:
            (as `hidden_states`, bias to add).

        Raises:
            ValueError: the context is of another number of sequences.
        """
        if key_value_states.size(1) != hidden_states.size(1):
            raise ValueError(
                f"cross attention of {hidden_states.size(1)} sequences got a context "
                f"{list(key_value_states.shape)}; give [s', {hidden_states.size(1)}, h]"
            )
        query, key, value = self.get_query_key_value_tensors(hidden_states, key_value_states)
        if checkpoint_core_attention and self.training:
            attended = checkpoint(self.core_attention, False, query, key, value, attention_mask)
        else:
            attended = self.core_attention(query, key, value, attention_mask)
        return self.linear_proj(attended)

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: weight gradients of the oldest microbatch that is owed."""
        self.linear_proj.backward_dw()
        self.linear_kv.backward_dw()
        self.linear_q.backward_dw()


def attend_to_context(
    layer: Any,
    bias_dropout_add: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    context: torch.Tensor | None,
    context_mask: torch.Tensor | None,
    checkpoint_core_attention: bool,
) -> torch.Tensor:
    """The sublayer of a `TransformerLayer` with cross attention: x + attention(norm(x), context).

    `bias_dropout_add` adds, as in the other sublayers.
    """
    attended = layer.cross_attention(
        layer.pre_cross_attn_layernorm(hidden_states),
        context_mask,
        context,
        checkpoint_core_attention=checkpoint_core_attention,
    )
    return bias_dropout_add(attended, hidden_states, layer.hidden_dropout, layer.training)
