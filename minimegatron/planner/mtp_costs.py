"""What predicting further tokens costs: time, parameters, copies of the vocabulary, longer messages.

Megatron has no counterpart for these counts; `megatron.training.theoretical_memory_usage` has the
parameters of its layers.

K depths are K more layers, in one stage. A depth has a projection [2h -> h] before its layer, and the
loss stage computes the vocabulary's logits 1 + K times. Where another stage than the last has the K
layers, what goes on from it is [(1 + K) s, b, h], all depths one after the other.

>>> layer_times((6, 12), loss=(1, 2), num_depths=1)["mtp"], layer_times((6, 12), (1, 2), 1)["loss"]
((7, 14), (2, 4))
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from minimegatron.core.transformer.enums import LayerType
from minimegatron.planner.actions import Time
from minimegatron.planner.simulator import divided

PROJECTION = Fraction(1, 6)
"""Multiplications of the projection, 2h² for each token, over those of GPT-2's layer, 12h²; attention
scores, which depend on the length, are left out."""

Times = tuple[Time, Time]
"""Forward and backward."""


def layer_times(
    decoder: Times,
    loss: Times = (0, 0),
    num_depths: int = 0,
    embedding: Times = (0, 0),
    projection: Time = PROJECTION,
) -> dict[str, Times]:
    """Times of the layers of a layout, for `Costs.from_layout`.

    Args:
        decoder: of one transformer layer.
        loss: of output layer and loss for one prediction of each token.
        num_depths: K.
        projection: its time over that of a layer.
    """
    factor = 1 + projection
    return {
        "embedding": embedding,
        "decoder": decoder,
        "mtp": (_times(decoder[0], factor), _times(decoder[1], factor)),
        "loss": (loss[0] * (1 + num_depths), loss[1] * (1 + num_depths)),
    }


def _times(time: Time, factor: Time) -> Time:
    return divided(time * factor, 1)


# -- What a stage holds --


def num_mtp_parameters(
    num_depths: int, layer_parameters: int, hidden_size: int, norm_has_bias: bool = True
) -> int:
    """Parameters of K depths: of each its layer, the projection 2h² without biases, and three norms.

    Before tensor parallelism divides them. The embedding and the output layer are the model's own; on a
    stage without them the embedding is a copy (`vocabulary_matrices`).

    >>> num_mtp_parameters(1, layer_parameters=1000, hidden_size=10)
    1260
    """
    norms = 3 * hidden_size * (1 + norm_has_bias)
    return num_depths * (layer_parameters + 2 * hidden_size**2 + norms)


def vocabulary_matrices(stages: Sequence[Sequence[Any]], is_tied: bool = True) -> list[int]:
    """How many [vocabulary, h] matrices each virtual stage holds: embeddings, output layers, copies.

    Tied, a stage that has an embedding uses it for its output layer too. All but the first are copies
    then; untied, the output layer's is a matrix of its own.

    Args:
        stages: the layers of each virtual stage, in model order: `LayerType`s, or their names.

    >>> stages = [["embedding", "decoder"], ["decoder", "mtp"], ["loss"]]
    >>> vocabulary_matrices(stages), vocabulary_matrices([*stages[:1], ["decoder", "mtp", "loss"]])
    ([1, 1, 1], [1, 1])
    """
    found = []
    for names in (_names(stage) for stage in stages):
        embeds = "embedding" in names or "mtp" in names
        found.append(embeds + ("loss" in names and not (is_tied and embeds)))
    return found


def parameters_of_stages(
    stages: Sequence[Sequence[Any]],
    layer_parameters: int,
    hidden_size: int,
    vocab_size: int,
    is_tied: bool = True,
    num_positions: int = 0,
    norm_has_bias: bool = True,
) -> list[int]:
    """Parameters of each virtual stage, before tensor parallelism divides them.

    The last norm is on the loss stage; with further tokens it is after the last decoder layer, which
    they start from. Learned positions, if any, are the first stage's.

    >>> parameters_of_stages([["embedding", "decoder"], ["decoder", "loss"]], 1000, 10, 50)
    [1500, 1520]
    """
    norm = hidden_size * (1 + norm_has_bias)
    all_names = [_names(stage) for stage in stages]
    matrices = vocabulary_matrices(stages, is_tied)
    with_norm = _stage_with_last_norm(all_names)
    return [
        names.count("decoder") * layer_parameters
        + num_mtp_parameters(names.count("mtp"), layer_parameters, hidden_size, norm_has_bias)
        + matrices[stage] * vocab_size * hidden_size
        + ("embedding" in names) * num_positions * hidden_size
        + (stage == with_norm) * norm
        for stage, names in enumerate(all_names)
    ]


def _stage_with_last_norm(all_names: list[list[str]]) -> int:
    has_mtp = any("mtp" in names for names in all_names)
    ends = [stage for stage, names in enumerate(all_names) if "decoder" in names]
    return ends[-1] if has_mtp and ends else len(all_names) - 1


def _names(stage: Sequence[LayerType | str]) -> list[str]:
    return [layer if isinstance(layer, str) else layer.name for layer in stage]


# -- What goes from stage to stage --


def lengths_behind(stages: Sequence[Sequence[Any]]) -> list[int]:
    """What each virtual stage sends on, in lengths s of the model's own message: 1, or 1 + K.

    >>> lengths_behind([["embedding", "decoder"], ["mtp", "mtp"], [], ["loss"]])
    [1, 3, 3, 3]
    """
    lengths, length = [], 1
    for names in map(_names, stages):
        length += names.count("mtp")
        lengths.append(length)
    return lengths


def message_factors(stages: Sequence[Sequence[Any]]) -> tuple[int, ...] | None:
    """The same for a plan; None where all messages are as long as the model's own.

    >>> message_factors([["embedding", "decoder"], ["mtp", "loss"]])
    >>> message_factors([["embedding", "decoder"], ["mtp"], ["loss"]])
    (1, 2, 2)
    """
    lengths = lengths_behind(stages)
    return tuple(lengths) if max(lengths[:-1], default=1) > 1 else None


def stages_of_layout(layout: Any) -> list[list[LayerType]]:
    """The layers of each virtual stage of a `PipelineParallelLayerLayout`, in model order."""
    places = map(layout.placement.place_of, range(layout.placement.num_stages))
    return [layout.layout[rank][chunk] for rank, chunk in places]
