"""Which chunk builds which layers. Arithmetic only, torch-free.

Megatron computes the two numbers separately, in `transformer_block.get_num_layers_to_build` and
`transformer_layer.get_transformer_layer_offset`, which ask this module here.

A model is cut into p x v virtual stages, in model order; the schedule's placement says which of them
is chunk `vp_stage` of pipeline rank `pp_rank`. A chunk's offset is by definition the number of layers
that all earlier virtual stages build, so every layer is built once, whatever the rule for the numbers.
"""

from typing import Any

from minimegatron.core.orders.orders import placement_of
from minimegatron.core.transformer.enums import LayerType
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from minimegatron.core.transformer.stages_as_told import (
    decoder_layers_of_layout,
    layers_of_layout,
    uneven_layers_of_ranks,
)
from minimegatron.exports import lazily

# Under the names that they had here, and that Megatron has in these two files.
__getattr__, __dir__ = lazily(
    __name__,
    {
        "get_num_layers_to_build": (
            "minimegatron.core.transformer.transformer_block:get_num_layers_to_build"
        ),
        "get_transformer_layer_offset": (
            "minimegatron.core.transformer.transformer_layer:get_transformer_layer_offset"
        ),
    },
)


def _layout_of(config: Any) -> PipelineParallelLayerLayout | None:
    layout = config.pipeline_model_parallel_layout
    if isinstance(layout, str | list):
        return PipelineParallelLayerLayout(layout, config.pipeline_model_parallel_size)
    return layout


def _layers_of_ranks(config: Any) -> list[int]:
    """Layers of each pipeline rank, all chunks together; embedding and loss counted if asked to.

    Ranks come in the order of their first stages.
    """
    p = config.pipeline_model_parallel_size
    first = config.num_layers_in_first_pipeline_stage
    last = config.num_layers_in_last_pipeline_stage
    extra = (
        config.account_for_embedding_in_pipeline_split + config.account_for_loss_in_pipeline_split
    )
    if first is None and last is None:
        total = config.num_layers + extra
        if total % p:
            counted = f" (+ {extra} for embedding and loss)" if extra else ""
            raise ValueError(
                f"num_layers {config.num_layers}{counted} is not divisible by "
                f"pipeline_model_parallel_size {p}; use {total // p * p - extra} or "
                f"{-(-total // p) * p - extra} layers, or set num_layers_in_first_pipeline_stage "
                "or num_layers_in_last_pipeline_stage"
            )
        return [total // p] * p
    return uneven_layers_of_ranks(config)


def layers_of_virtual_stages(config: Any) -> list[int]:
    """Layers of each virtual stage, in model order.

    Raises:
        ValueError: the layers cannot be divided so, with the numbers and the remedy.
    """
    v = config.virtual_pipeline_model_parallel_size or 1
    layout = _layout_of(config)
    if layout is not None:
        return decoder_layers_of_layout(layout, config)
    ranks = _layers_of_ranks(config)
    for rank, number in enumerate(ranks):
        if number % v:
            raise ValueError(
                f"pipeline stage {rank} has {number} layers, not divisible by "
                f"virtual_pipeline_model_parallel_size {v}; change num_layers "
                f"{config.num_layers} or the number of chunks"
            )
    stages = [number // v for number in ranks] * v
    stages[0] -= config.account_for_embedding_in_pipeline_split
    stages[-1] -= config.account_for_loss_in_pipeline_split
    if min(stages) < 0:
        raise ValueError(
            f"num_layers {config.num_layers} leaves fewer layers than stages once embedding and "
            "loss are counted; use more layers or fewer stages"
        )
    return stages


def _virtual_stage(config: Any, vp_stage: int | None, pp_rank: int) -> int:
    p = config.pipeline_model_parallel_size
    v = config.virtual_pipeline_model_parallel_size
    if not 0 <= pp_rank < p:
        raise ValueError(
            f"pipeline rank {pp_rank} is not one of the {p} that pipeline_model_parallel_size says; "
            "make the configuration's size that of the process groups"
        )
    if vp_stage is None and v is not None and v > 1:
        raise ValueError(f"vp_stage is None but each stage has {v} chunks; pass the chunk's number")
    return placement_of(config).stage_of(pp_rank, vp_stage or 0)


def num_layers_of_chunk(config: Any, vp_stage: int | None, pp_rank: int) -> int:
    """Layers that chunk `vp_stage` of pipeline rank `pp_rank` builds; may be 0."""
    return layers_of_virtual_stages(config)[_virtual_stage(config, vp_stage, pp_rank)]


def num_layers_before_chunk(config: Any, vp_stage: int | None, pp_rank: int) -> int:
    """Layers that come before that chunk's first, in the whole model."""
    return sum(layers_of_virtual_stages(config)[: _virtual_stage(config, vp_stage, pp_rank)])


# -- Layers that predict further tokens --


def mtp_layers_of_virtual_stages(config: Any) -> list[int]:
    """Layers that predict further tokens, of each virtual stage: all in one, by default the last."""
    layout = _layout_of(config)
    if layout is not None:
        return layers_of_layout(layout, LayerType.mtp)
    num_stages = placement_of(config).num_stages
    return [0] * (num_stages - 1) + [config.mtp_num_layers or 0]


def num_mtp_layers_of_chunk(config: Any, vp_stage: int | None, pp_rank: int) -> int:
    """How many of them chunk `vp_stage` of pipeline rank `pp_rank` builds: none, or all."""
    return mtp_layers_of_virtual_stages(config)[_virtual_stage(config, vp_stage, pp_rank)]


def num_mtp_layers_before_chunk(config: Any, vp_stage: int | None, pp_rank: int) -> int:
    """How many of them chunks before that one build."""
    return sum(mtp_layers_of_virtual_stages(config)[: _virtual_stage(config, vp_stage, pp_rank)])


def get_mtp_ranks(pp_ranks: list[int], config: Any) -> list[int]:
    """Of one pipeline's global ranks, the one that predicts further tokens; none without such layers.

    Source: `megatron.core.transformer.multi_token_prediction.get_mtp_ranks`.
    """
    place_of = placement_of(config).place_of
    numbers = mtp_layers_of_virtual_stages(config)
    return [pp_ranks[place_of(stage).rank] for stage, number in enumerate(numbers) if number]


def ranks_with_word_embedding(config: Any, is_tied: bool, pp_ranks: list[int]) -> list[int]:
    """Of one pipeline's global ranks, those that hold the word embedding or, if tied, a copy of it.

    The first stage's; that of further tokens, which embeds them too; the loss stage's, if tied. Bound
    to its first two arguments it is what `initialize_model_parallel` takes as `get_embedding_ranks`.
    Source: `get_embedding_ranks` of Megatron-LM's `pretrain_gpt.py`.
    """
    placement = placement_of(config)
    ends = [placement.first_rank, placement.last_rank] if is_tied else [placement.first_rank]
    return sorted({pp_ranks[rank] for rank in ends} | set(get_mtp_ranks(pp_ranks, config)))
