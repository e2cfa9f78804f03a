"""What layers are built of: dataclasses with a spec for each part; and how many layers a rank builds.

Counterpart: `megatron.core.transformer.transformer_layer`, `...attention`, `...mlp` and so on; there
each is beside its module, from where ours can be imported too.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.core.process_groups_config import ProcessGroupCollection, stage_of
from minimegatron.core.transformer.layer_placement import (
    num_layers_before_chunk,
    num_layers_of_chunk,
)
from minimegatron.core.transformer.spec_utils import ModuleSpec, build_module
from minimegatron.core.transformer.torch_norm import WrappedTorchNorm
from minimegatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "TransformerBlockSubmodules",
    "get_block_submodules",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
]


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


def takes(spec_or_module: Any, argument: str) -> bool:
    """Whether the class that is described has a parameter of this name."""
    module = getattr(spec_or_module, "module", spec_or_module)
    return module is not None and argument in inspect.signature(module).parameters


def build_mlp(
    spec: Any, config: Any, layer_number: int, pg_collection: ProcessGroupCollection
) -> torch.nn.Module | None:
    """The MLP of a layer, or its experts; None for None.

    An MLP needs one group. What routes tokens to experts needs more of them, and the layer's number.
    """
    needs_all = takes(spec, "pg_collection")
    groups = {"pg_collection": pg_collection} if needs_all else {"tp_group": pg_collection.tp}
    mlp = build_module(spec, config=config, **groups)
    if hasattr(mlp, "set_layer_number"):
        mlp.set_layer_number(layer_number)
    return mlp


def pipeline_rank(config: TransformerConfig, pp_rank: int | None) -> int:
    """`pp_rank`; for None what `parallel_state` says, or 0 if there is one stage."""
    if pp_rank is not None or config.pipeline_model_parallel_size == 1:
        return pp_rank or 0
    return stage_of()


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Layers that come before the first of chunk `vp_stage` of pipeline rank `pp_rank`.

    `pp_rank` None means this rank's, by `parallel_state`; with one stage it needs no process groups.
    Raises ValueError for layers that cannot be divided over the chunks.
    Source: `megatron.core.transformer.transformer_layer.get_transformer_layer_offset`.
    """
    return num_layers_before_chunk(config, vp_stage, pipeline_rank(config, pp_rank))


def get_num_layers_to_build(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Layers that chunk `vp_stage` of pipeline rank `pp_rank` builds; may be 0.

    `pp_rank` None means this rank's, by `parallel_state`; with one stage it needs no process groups.
    Raises ValueError for layers that cannot be divided so.
    Source: `megatron.core.transformer.transformer_block.get_num_layers_to_build`.
    """
    return num_layers_of_chunk(config, vp_stage, pipeline_rank(config, pp_rank))


def get_block_submodules(
    config: TransformerConfig, spec: Any, vp_stage: int | None, pp_rank: int | None
) -> TransformerBlockSubmodules:
    """What `spec` means for one chunk: the layers themselves, or one layer's spec for all."""
    if isinstance(spec, TransformerBlockSubmodules):
        return spec
    number = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=[spec] * number)
