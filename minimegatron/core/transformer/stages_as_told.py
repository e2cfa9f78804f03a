"""Layers of each stage where the configuration tells them: by a layout, or for first and last stage.

Arithmetic only, torch-free. `layer_placement` asks here; also which stage predicts further tokens.
Megatron has this in `transformer_block.get_num_layers_to_build` and in `multi_token_prediction`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from minimegatron.core import knobs
from minimegatron.core.orders import orders
from minimegatron.core.orders.placement import Placement, usual_placement
from minimegatron.core.transformer import pipeline_parallel_layer_layout as written
from minimegatron.core.transformer.enums import LayerType
from minimegatron.core.transformer.layer_checks import (
    check_division_over_chunks,
    layers_on_each,
)

knob = partial(knobs.knob, section="parallel")


@dataclass
class StagesConfig:
    """Which stage has which layers, where it is not the same number for all."""

    num_layers_in_first_pipeline_stage: int | None = knob(
        dest="decoder_first_pipeline_num_layers", minimum=1
    )
    """Layers on the first stage, where it should hold another number than the rest."""
    num_layers_in_last_pipeline_stage: int | None = knob(
        dest="decoder_last_pipeline_num_layers", minimum=1
    )
    """Layers on the last stage, likewise."""
    account_for_embedding_in_pipeline_split: bool = knob(False)
    """Count the embedding as a layer when layers are divided over stages."""
    account_for_loss_in_pipeline_split: bool = knob(False)
    """Count the loss as a layer when layers are divided over stages."""
    pipeline_model_parallel_layout: str | list | None = knob()
    """Which stage holds which layer, such as "Et*3|(tt|)*29,m|L".

    Overrides the even division."""


def placement_of(config: Any, pp_size: int | None = None) -> Placement:
    """Where a model's stages are: as its `pipeline_schedule` says, else as Megatron has them.

    The size of a group, `pp_size`, counts where it is given: a chunk may be used by itself.
    """
    p, v = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    p, name = pp_size or p, config.pipeline_schedule
    return usual_placement(p, v) if name is None else orders.get_schedule(name).placed(p, v)


def has_first_stage(pp_group: Any, config: Any) -> bool:
    """Whether the model begins on this rank of a pipeline group."""
    return placement_of(config, pp_group.size()).is_first_rank(pp_group.rank())


def layout_of(config: Any) -> "written.PipelineParallelLayerLayout | None":
    """The layout that the configuration tells, read if it is a text; None for none."""
    layout = config.pipeline_model_parallel_layout
    if isinstance(layout, str | list):
        return written.PipelineParallelLayerLayout(layout, config.pipeline_model_parallel_size)
    return layout


def are_told(config: Any) -> bool:
    """Whether not all stages have the same number of layers, or might not."""
    return (
        config.pipeline_model_parallel_layout is not None
        or config.num_layers_in_first_pipeline_stage is not None
        or config.num_layers_in_last_pipeline_stage is not None
        or config.account_for_embedding_in_pipeline_split
        or config.account_for_loss_in_pipeline_split
    )


def layers_as_told(config: Any) -> list[int]:
    """Layers of each virtual stage, in model order. Raises ValueError where they do not fit."""
    layout = layout_of(config)
    if layout is not None:
        return decoder_layers_of_layout(layout, config)
    first = config.num_layers_in_first_pipeline_stage
    last = config.num_layers_in_last_pipeline_stage
    v = config.virtual_pipeline_model_parallel_size or 1
    if first is None and last is None:
        return _with_ends_counted(config, config.pipeline_model_parallel_size * v)
    ranks = uneven_layers_of_ranks(config)
    check_division_over_chunks(config, ranks)
    return [number // v for number in ranks] * v


def _with_ends_counted(config: Any, num_stages: int) -> list[int]:
    embedding = config.account_for_embedding_in_pipeline_split
    loss = config.account_for_loss_in_pipeline_split
    stages = [layers_on_each(config, embedding + loss)] * num_stages
    stages[0] -= embedding
    stages[-1] -= loss
    if min(stages) < 0:
        raise ValueError(
            f"num_layers {config.num_layers} leaves fewer layers than stages once embedding and "
            "loss are counted; use more layers or fewer stages"
        )
    return stages


def decoder_layers_of_layout(
    layout: "written.PipelineParallelLayerLayout", config: Any
) -> list[int]:
    """Decoder layers of each virtual stage, in model order.

    Raises ValueError where the layout is none of a model of `config`'s sizes.
    """
    v = config.virtual_pipeline_model_parallel_size or 1
    if layout.virtual_pipeline_model_parallel_size != v:
        raise ValueError(
            f"the pipeline layout has {layout.virtual_pipeline_model_parallel_size} chunks "
            f"per rank but virtual_pipeline_model_parallel_size is {v}; make them equal"
        )
    text, p = layout.input_data, config.pipeline_model_parallel_size
    layout = written.PipelineParallelLayerLayout(text, p, placement_of(config))
    layout.validate_layer_layout(config.num_layers, config.mtp_num_layers)
    return layers_of_layout(layout, LayerType.decoder)


def layers_of_layout(
    layout: "written.PipelineParallelLayerLayout", layer_type: LayerType
) -> list[int]:
    """Layers of that type of each virtual stage, in model order."""
    places = map(layout.placement.place_of, range(layout.placement.num_stages))
    return [
        layout.get_num_layers_to_build(layer_type, vp_stage=chunk, pp_rank=rank)
        for rank, chunk in places
    ]


def uneven_layers_of_ranks(config: Any) -> list[int]:
    """Layers of each pipeline rank, all chunks together, where first or last rank has its own number.

    Ranks come in the order of their first stages. Raises ValueError where the numbers do not fit.
    """
    _check_ranks_take_turns(placement_of(config))
    if config.account_for_embedding_in_pipeline_split or config.account_for_loss_in_pipeline_split:
        raise ValueError(
            "account_for_embedding/loss_in_pipeline_split and num_layers_in_first/last_"
            "pipeline_stage both set the uneven stages; use one of the two"
        )
    num_layers, p = config.num_layers, config.pipeline_model_parallel_size
    first = config.num_layers_in_first_pipeline_stage
    last = config.num_layers_in_last_pipeline_stage
    given = [number for number in (first, last) if number is not None]
    middle = num_layers - sum(given)
    num_middle = p - len(given)
    if min(given) < 0 or middle < 0 or num_middle < 0:
        raise ValueError(
            f"num_layers_in_first/last_pipeline_stage {given} do not fit num_layers {num_layers} "
            f"over {p} stages; their sum must be at most {num_layers}, and {len(given)} or more "
            "stages are needed"
        )
    if middle % num_middle if num_middle else middle:
        raise ValueError(
            f"{middle} layers remain after num_layers_in_first/last_pipeline_stage {given}, not "
            f"divisible over the {num_middle} other stages; change num_layers {num_layers} or "
            "the first and last stages"
        )
    stages = [middle // num_middle] * num_middle if num_middle else []
    if first is not None:
        stages.insert(0, first)
    if last is not None:
        stages.append(last)
    return stages


def _check_ranks_take_turns(placement: Placement) -> None:
    """Uneven numbers are those of whole ranks: the one that each turn begins with, or ends with."""
    ranks = [placement.place_of(stage).rank for stage in range(placement.num_stages)]
    if ranks != ranks[: placement.pp_size] * placement.num_model_chunks:
        raise ValueError(
            "num_layers_in_first/last_pipeline_stage is a number for all chunks of a rank, but with "
            f"placement {placement.name} the rank of the first stage has the stages "
            f"{sorted(placement.stages[placement.first_rank])}; use pipeline_model_parallel_layout, "
            "which says it for each stage"
        )


def mtp_layers_of_virtual_stages(config: Any) -> list[int]:
    """Layers that predict further tokens, of each virtual stage: all in one, by default the last."""
    layout = layout_of(config)
    if layout is not None:
        return layers_of_layout(layout, LayerType.mtp)
    num_stages = placement_of(config).num_stages
    return [0] * (num_stages - 1) + [config.mtp_num_layers or 0]


def get_mtp_ranks(pp_ranks: list[int], config: Any) -> list[int]:
    """Of one pipeline's global ranks, the one that predicts further tokens; none without such layers.

    Source: `megatron.core.transformer.multi_token_prediction.get_mtp_ranks`.
    """
    place_of = placement_of(config).place_of
    numbers = mtp_layers_of_virtual_stages(config)
    return [pp_ranks[place_of(stage).rank] for stage, number in enumerate(numbers) if number]
