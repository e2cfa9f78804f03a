"""What each kind of layer of a hybrid model is made of.

Counterpart: `megatron.core.models.mamba.mamba_layer_specs`, whose layers are Transformer Engine's.
"""

from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from minimegatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from minimegatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from minimegatron.core.ssm.mlp_layer import AttentionLayer, MLPLayer
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.transformer.spec_utils import ModuleSpec
from minimegatron.core.transformer.torch_norm import WrappedTorchNorm
from minimegatron.core.transformer.transformer_layer import TransformerLayerSubmodules


def get_mamba_stack_spec(*, qk_layernorm: bool = False) -> ModuleSpec:
    """A `MambaStack` of Mamba layers, and of the two halves of a GPT layer."""
    gpt_layer = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm).submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=gpt_layer.input_layernorm, self_attention=gpt_layer.self_attention
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=gpt_layer.pre_mlp_layernorm, mlp=gpt_layer.mlp
    )
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm, mixer=ModuleSpec(module=MambaMixer, submodules=mixer)
    )
    return ModuleSpec(
        module=MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=AttentionLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


mamba_stack_spec = get_mamba_stack_spec()
