"""What a GPT refuses: positions that it does not know, several input tensors, input that does not fit.

Megatron has no counterpart.
"""

from typing import Any

import torch

from minimegatron.core.models.common.embeddings import embedding_checks
from minimegatron.core.transformer import context_parallel_groups, zigzag

POSITION_EMBEDDING_TYPES = ("learned_absolute", "rope", "none")


def check_position_embedding_type(given: str) -> None:
    """Raises ValueError for an unknown one."""
    if given not in POSITION_EMBEDDING_TYPES:
        raise ValueError(
            f"position_embedding_type {given!r} is unknown; "
            f"use one of {', '.join(POSITION_EMBEDDING_TYPES)}"
        )


def refuse_inputs(number: int) -> None:
    """Raises ValueError for a list of no tensor, or of more than one."""
    raise ValueError(f"GPTModel takes 1 input tensor, not {number}")


def positions_of(
    model: Any,
    input_ids: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    decoder_input: torch.Tensor | None,
) -> torch.Tensor | None:
    """The positions of this rank's tokens [b, s/c]: those that are given; if none are, from 0 on.

    Raises ValueError for tokens that are no part of a sequence, where ranks share it, and for a
    `decoder_input` of other tokens.
    """
    if decoder_input is not None:
        if input_ids is not None:
            embedding_checks.check_embedded(decoder_input, input_ids, model.num_parts)
        return position_ids
    if model.cp_group is not None:
        context_parallel_groups.check_part_of_sequence(model, input_ids)
    if position_ids is None and model.position_embedding_type == "learned_absolute":
        return zigzag.places_of(input_ids, model.cp_group)
    return position_ids
