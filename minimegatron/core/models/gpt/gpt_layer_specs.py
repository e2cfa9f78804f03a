"""What a GPT layer is made of.

Counterpart: `megatron.core.models.gpt.gpt_layer_specs`. "Local" are Megatron's own layers, as
against those of Transformer Engine.
"""

from minimegatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from minimegatron.core.transformer.dot_product_attention import DotProductAttention
from minimegatron.core.transformer.enums import AttnMaskType
from minimegatron.core.transformer.mlp import MLP, MLPSubmodules
from minimegatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
    get_mtp_num_layers_to_build,
)
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
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    dense = ModuleSpec(module=MLP, submodules=linears)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=attention,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=dense if num_experts is None else get_moe_module_spec(),
        ),
    )


def get_gpt_decoder_layer_specs(config: TransformerConfig) -> list[ModuleSpec]:
    """The layers of the whole model, one spec each; `moe_layer_freq` says which have experts."""
    specs = {
        has_experts: get_gpt_layer_local_spec(
            config.num_moe_experts if has_experts else None, qk_layernorm=config.qk_layernorm
        )
        for has_experts in (False, True)
    }
    return [specs[has_experts] for has_experts in config.moe_layer_pattern]


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


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    use_transformer_engine: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The layers for further tokens of one chunk; None for a chunk that predicts none.

    Args:
        spec: a layer's, or `get_gpt_decoder_block_spec(...)` for the chunk. Each further layer is of
            the kind of its last one; on a chunk without layers, of the model's last one.
        use_transformer_engine: must be False.
        vp_stage, pp_rank: as for `get_gpt_decoder_block_spec`.
    """
    num_layers = get_mtp_num_layers_to_build(config, vp_stage, pp_rank)
    if num_layers == 0:
        return None
    if isinstance(spec, TransformerBlockSubmodules):
        spec = (spec.layer_specs or get_gpt_decoder_layer_specs(config))[-1]
    layer_spec = get_mtp_layer_spec(spec, use_transformer_engine)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer_spec] * num_layers)
