"""What a GPT layer is made of.

Counterpart: `megatron.core.models.gpt.gpt_layer_specs`. "Local" are Megatron's own layers, as
against those of Transformer Engine.
"""

from minimegatron.core.left_out import accepts_left_out
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from minimegatron.core.transformer.dot_product_attention import DotProductAttention
from minimegatron.core.transformer.enums import AttnMaskType
from minimegatron.core.transformer.mlp import MLP, MLPSubmodules
from minimegatron.core.transformer.spec_utils import ModuleSpec
from minimegatron.core.transformer.torch_norm import WrappedTorchNorm
from minimegatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)


@accepts_left_out
def get_gpt_layer_local_spec(*, qk_layernorm: bool = False) -> ModuleSpec:
    """A pre-norm decoder layer with causal attention. Which norm, and which MLP, the config says."""
    head_norm = WrappedTorchNorm if qk_layernorm else None
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=attention,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=mlp,
        ),
    )


@accepts_left_out
def get_gpt_decoder_layer_specs(config: TransformerConfig) -> list[ModuleSpec]:
    """The layers of the whole model, one spec each; the place where layers could differ."""
    return [get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)] * config.num_layers


@accepts_left_out
def get_gpt_decoder_block_spec(
    config: TransformerConfig, *, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of one chunk, out of those of the whole model.

    `pp_rank` None means this rank's, by `parallel_state`.
    """
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    last = first + get_num_layers_to_build(config, vp_stage, pp_rank)
    layer_specs = get_gpt_decoder_layer_specs(config)[first:last]
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=WrappedTorchNorm)
