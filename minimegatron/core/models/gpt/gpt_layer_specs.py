"""What a GPT layer is made of.

Counterpart: `megatron.core.models.gpt.gpt_layer_specs`. "Local" are Megatron's own layers, as
against those of Transformer Engine.
"""

from minimegatron.core.models.gpt import moe_module_specs
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.transformer import layer_parts
from minimegatron.core.transformer.attention import SelfAttention
from minimegatron.core.transformer.dot_product_attention import DotProductAttention
from minimegatron.core.transformer.enums import AttnMaskType
from minimegatron.core.transformer.mlp import MLP
from minimegatron.core.transformer.spec_utils import ModuleSpec
from minimegatron.core.transformer.torch_norm import WrappedTorchNorm
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.transformer.transformer_layer import TransformerLayer
from minimegatron.exports import all_of

# Megatron has it here.
__getattr__, __dir__ = all_of(__name__, "minimegatron.core.models.gpt.gpt_second_subjects")


def get_gpt_layer_local_spec(
    num_experts: int | None = None, *, qk_layernorm: bool = False
) -> ModuleSpec:
    """A pre-norm decoder layer with causal attention. Which norm, and which MLP, the config says.

    With `num_experts` it has experts in place of one MLP; their number is the config's.
    """
    head_norm = WrappedTorchNorm if qk_layernorm else None
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=layer_parts.SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    linears = layer_parts.MLPSubmodules(
        linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
    )
    dense = ModuleSpec(module=MLP, submodules=linears)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=layer_parts.TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=attention,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=dense if num_experts is None else moe_module_specs.get_moe_module_spec(),
        ),
    )


def get_gpt_decoder_layer_specs(config: TransformerConfig) -> list[ModuleSpec]:
    """The layers of the whole model, one spec each; `moe_layer_freq` says which have experts."""
    dense = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    experts = get_gpt_layer_local_spec(config.num_moe_experts, qk_layernorm=config.qk_layernorm)
    return [experts if has_experts else dense for has_experts in config.moe_layer_pattern]


def get_gpt_decoder_block_spec(
    config: TransformerConfig, *, vp_stage: int | None = None, pp_rank: int | None = None
) -> layer_parts.TransformerBlockSubmodules:
    """The layers of one chunk, out of those of the whole model.

    `pp_rank` None means this rank's, by `parallel_state`.
    """
    first = layer_parts.get_transformer_layer_offset(config, vp_stage, pp_rank)
    last = first + layer_parts.get_num_layers_to_build(config, vp_stage, pp_rank)
    layer_specs = get_gpt_decoder_layer_specs(config)[first:last]
    return layer_parts.TransformerBlockSubmodules(
        layer_specs=layer_specs, layer_norm=WrappedTorchNorm
    )
