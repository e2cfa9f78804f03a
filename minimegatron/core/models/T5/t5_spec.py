"""What the layers of T5's two stacks are made of.

Counterpart: `megatron.core.models.T5.t5_spec`. "Local" are Megatron's own layers, as against those of
Transformer Engine.
"""

from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from minimegatron.core.transformer.biased_attention import BiasedDotProductAttention
from minimegatron.core.transformer.cross_attention import CrossAttention, CrossAttentionSubmodules
from minimegatron.core.transformer.dot_product_attention import DotProductAttention
from minimegatron.core.transformer.enums import AttnMaskType
from minimegatron.core.transformer.mlp import MLP, MLPSubmodules
from minimegatron.core.transformer.spec_utils import ModuleSpec
from minimegatron.core.transformer.torch_norm import WrappedTorchNorm
from minimegatron.core.transformer.transformer_block import TransformerBlockSubmodules
from minimegatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)


def _self_attention(attn_mask_type: AttnMaskType, has_bias: bool) -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": attn_mask_type},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=BiasedDotProductAttention if has_bias else DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )


def _layer(
    attn_mask_type: AttnMaskType, cross_attention: ModuleSpec | None, has_bias: bool
) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=_self_attention(attn_mask_type, has_bias),
            pre_cross_attn_layernorm=None if cross_attention is None else WrappedTorchNorm,
            cross_attention=cross_attention,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=ModuleSpec(module=MLP, submodules=linears),
        ),
    )


def encoder_model_with_local_spec(has_bias: bool = False) -> ModuleSpec:
    """An encoder layer: every token sees every token that the given mask leaves.

    `has_bias`: for relative positions, which self-attention adds to its scores.
    """
    return _layer(AttnMaskType.padding, None, has_bias)


def decoder_model_with_local_spec(has_bias: bool = False) -> ModuleSpec:
    """A decoder layer: causal self-attention, then attention to the encoder's output."""
    cross_attention = ModuleSpec(
        module=CrossAttention,
        params={"attn_mask_type": AttnMaskType.padding},
        submodules=CrossAttentionSubmodules(
            linear_q=ColumnParallelLinear,
            linear_kv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    return _layer(AttnMaskType.causal, cross_attention, has_bias)


def get_t5_encoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """The encoder's layers of one stage."""
    return TransformerBlockSubmodules([encoder_model_with_local_spec()] * num_layers)


def get_t5_decoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """The decoder's layers of one stage."""
    return TransformerBlockSubmodules([decoder_model_with_local_spec()] * num_layers)
