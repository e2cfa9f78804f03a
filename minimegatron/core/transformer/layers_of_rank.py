"""How many layers a chunk has, and how many come before it, under Megatron's names.

Counterpart: `megatron.core.transformer.transformer_layer`.
"""

from typing import Any

from minimegatron.core.process_groups_config import stage_of
from minimegatron.core.transformer.layer_placement import (
    num_layers_before_chunk,
    num_layers_of_chunk,
)
from minimegatron.core.transformer.submodules import TransformerBlockSubmodules
from minimegatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "TransformerBlockSubmodules",
    "get_block_submodules",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
]


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
