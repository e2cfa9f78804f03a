"""What a BERT layer is made of.

Counterpart: `megatron.core.models.bert.bert_layer_specs`.
"""

from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from minimegatron.core.transformer.dot_product_attention import DotProductAttention
from minimegatron.core.transformer.enums import AttnMaskType
from minimegatron.core.transformer.mlp import MLP, MLPSubmodules
from minimegatron.core.transformer.spec_utils import ModuleSpec
from minimegatron.core.transformer.torch_norm import WrappedTorchNorm
from minimegatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

bert_layer_local_spec = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.padding},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=DotProductAttention,
                linear_proj=RowParallelLinear,
            ),
        ),
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=ModuleSpec(
            module=MLP,
            submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        ),
    ),
)
"""A pre-norm layer as GPT's, but attention sees the tokens after a token too, and no padding."""
