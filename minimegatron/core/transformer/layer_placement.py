"""Which chunk builds which layers. Arithmetic only, torch-free.

Megatron computes the two numbers separately, in `transformer_block.get_num_layers_to_build` and
`transformer_layer.get_transformer_layer_offset`, which ask this module here.

A model is cut into p x v virtual stages, in model order; the schedule's placement says which of them
is chunk `vp_stage` of pipeline rank `pp_rank`. A chunk's offset is by definition the number of layers
that all earlier virtual stages build, so every layer is built once, whatever the rule for the numbers.
"""

from typing import Any

from minimegatron.core.transformer import stages_as_told as told
from minimegatron.core.transformer.layer_checks import check_chunk, layers_on_each
from minimegatron.core.transformer.stages_as_told import are_told, layers_as_told, placement_of
from minimegatron.exports import all_of

# Under the names that they had here, and that Megatron has in other files.
__getattr__, __dir__ = all_of(__name__, "minimegatron.core.transformer.layer_parts")


def layers_of_virtual_stages(config: Any) -> list[int]:
    """Layers of each virtual stage, in model order: all the same, unless the configuration tells.

    Raises:
        ValueError: the layers cannot be divided so, with the numbers and the remedy.
    """
    p, v = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    return layers_as_told(config) if are_told(config) else [layers_on_each(config)] * (p * v)


def virtual_stage_of(config: Any, vp_stage: int | None, pp_rank: int) -> int:
    """Which virtual stage chunk `vp_stage` of pipeline rank `pp_rank` is; None is the only chunk."""
    check_chunk(config, vp_stage, pp_rank)
    return placement_of(config).stage_of(pp_rank, vp_stage or 0)


def num_layers_of_chunk(config: Any, vp_stage: int | None, pp_rank: int) -> int:
    """Layers that chunk `vp_stage` of pipeline rank `pp_rank` builds; may be 0."""
    return layers_of_virtual_stages(config)[virtual_stage_of(config, vp_stage, pp_rank)]


def num_layers_before_chunk(config: Any, vp_stage: int | None, pp_rank: int) -> int:
    """Layers that come before that chunk's first, in the whole model."""
    return sum(layers_of_virtual_stages(config)[: virtual_stage_of(config, vp_stage, pp_rank)])


def ranks_with_word_embedding(config: Any, is_tied: bool, pp_ranks: list[int]) -> list[int]:
    """Of one pipeline's global ranks, those that hold the word embedding or, if tied, a copy of it.

    The first stage's; that of further tokens, which embeds them too; the loss stage's, if tied. Bound
    to its first two arguments it is what `initialize_model_parallel` takes as `get_embedding_ranks`.
    Source: `get_embedding_ranks` of Megatron-LM's `pretrain_gpt.py`.
    """
    placement = placement_of(config)
    ends = [placement.first_rank, placement.last_rank] if is_tied else [placement.first_rank]
    return sorted({pp_ranks[rank] for rank in ends} | set(told.get_mtp_ranks(pp_ranks, config)))
