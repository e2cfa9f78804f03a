"""Which stage predicts further tokens. Arithmetic only, torch-free.

Megatron has this in `megatron.core.transformer.multi_token_prediction`.
"""

from typing import Any

from minimegatron.core.transformer.enums import LayerType
from minimegatron.core.transformer.stages_as_told import layers_of_layout, layout_of, placement_of


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
