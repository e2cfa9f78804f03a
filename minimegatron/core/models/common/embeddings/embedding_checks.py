"""What the embedding refuses: sequences, positions, token types that do not fit tokens or tables.

Megatron has no counterpart.
"""

from typing import Any

import torch


def check_of_tokens(
    name: str, tensor: torch.Tensor | None, tokens: torch.Tensor, may_be_shared: bool = False
) -> None:
    """Raises ValueError unless `tensor` has the shape of `tokens`, [b, s].

    `may_be_shared`: [1, s] will do, or [s]. Any other shape would broadcast by accident, or not at all.
    """
    shape, wanted = None if tensor is None else tuple(tensor.shape), tuple(tokens.shape)
    shared = ((1, *wanted[1:]), wanted[1:]) if may_be_shared else ()
    if shape not in (wanted, *shared):
        raise ValueError(
            f"{name} is {None if shape is None else list(shape)}, but the tokens are {list(wanted)}; "
            "give one number for each token"
        )


def check_positions(position_ids: torch.Tensor | None, tokens: torch.Tensor) -> None:
    """`check_of_tokens` for positions, [b, s]; [1, s] are those of each sequence."""
    check_of_tokens("position_ids", position_ids, tokens, may_be_shared=True)


def check_embedded(states: torch.Tensor, tokens: torch.Tensor, ranks: int) -> None:
    """Raises ValueError unless `states` are [s/ranks, b, h] for tokens [b, s]."""
    b, s = tokens.shape
    if s % ranks or states.shape[:2] != (s // ranks, b):
        raise ValueError(
            f"decoder_input is {list(states.shape)}, but the tokens are {[b, s]}, and their states are "
            f"over {ranks} ranks; give [{s // ranks}, {b}, h]"
        )


def check_length(embedding: Any, length: int) -> None:
    """Raises ValueError for sequences that are longer than learned positions, or cannot be cut."""
    if embedding.add_position_embedding and length > embedding.max_sequence_length:
        raise ValueError(
            f"the batch has sequences of {length} tokens but the model has "
            f"{embedding.max_sequence_length} learned positions; raise max_sequence_length"
        )
    if length % embedding.num_parts:
        raise ValueError(
            f"sequence_parallel cuts the sequence over {embedding.num_parts} ranks, which does "
            f"not divide its length {length}; pad it or turn sequence_parallel off"
        )


def check_numbers(
    embedding: Any,
    tokens: torch.Tensor,
    position_ids: torch.Tensor | None,
    tokentype_ids: torch.Tensor | None,
) -> None:
    """`check_length`, and `check_positions` where they are looked up; types are checked later."""
    check_length(embedding, tokens.size(1))
    if embedding.add_position_embedding:
        check_positions(position_ids, tokens)


def without_row(
    embedding: Any,
    error: IndexError,
    tokens: torch.Tensor,
    position_ids: torch.Tensor | None,
    tokentype_ids: torch.Tensor | None,
) -> Exception:
    """What to raise after an `error` of a look-up: ValueError with the numbers that have no row.

    It is of tokens, positions or types, the first that do not fit their table; if all fit, `error`.
    """
    looked_up = {"token ids": (embedding.word_embeddings, tokens)}
    if embedding.add_position_embedding:
        looked_up["positions"] = (embedding.position_embeddings, position_ids)
    if tokentype_ids is not None:
        looked_up["token types"] = (embedding.tokentype_embeddings, tokentype_ids)
    for name, (table, numbers) in looked_up.items():
        least, most, rows = numbers.min(), numbers.max(), table.num_embeddings
        if least < 0 or most >= rows:
            return ValueError(
                f"{name} go from {least} to {most}, but the embedding has rows 0 to {rows - 1}"
            )
    return error
