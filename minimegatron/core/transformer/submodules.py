"""The parts that modules of a layer are built of: dataclasses with a spec for each part.

Counterpart: `megatron.core.transformer.transformer_layer`, `...attention`, `...mlp` and so on; there
each is beside its module, from where ours can be imported too.
"""

from dataclasses import dataclass
from typing import Any

from minimegatron.core.transformer.spec_utils import ModuleSpec
from minimegatron.core.transformer.torch_norm import WrappedTorchNorm


@dataclass
class TransformerBlockSubmodules:
    """The specs of one chunk's layers and of the final norm."""

    layer_specs: list[ModuleSpec]
    """One per layer of the chunk."""
    layer_norm: Any = WrappedTorchNorm
    """The norm after the model's last layer."""


@dataclass
class TransformerLayerSubmodules:
    """The specs of a layer's parts and the norm before each; most layers have no cross attention."""

    input_layernorm: Any = None
    self_attention: ModuleSpec | type | None = None
    pre_cross_attn_layernorm: Any = None
    cross_attention: ModuleSpec | type | None = None
    pre_mlp_layernorm: Any = None
    mlp: ModuleSpec | type | None = None


@dataclass
class SelfAttentionSubmodules:
    """The specs of self-attention's parts; the two norms only with `config.qk_layernorm`."""

    linear_qkv: ModuleSpec | type | None = None
    core_attention: ModuleSpec | type | None = None
    linear_proj: ModuleSpec | type | None = None
    q_layernorm: Any = None
    k_layernorm: Any = None


@dataclass
class MLPSubmodules:
    """The specs of the MLP's two projections."""

    linear_fc1: ModuleSpec | type | None = None
    linear_fc2: ModuleSpec | type | None = None
