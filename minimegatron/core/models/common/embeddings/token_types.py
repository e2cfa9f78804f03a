"""Which of two texts a token is in, as a vector that is added to the token's.

Megatron has this in `megatron.core.models.common.embeddings.language_model_embedding`.
"""

from typing import Any

import torch

from minimegatron.core.models.common.embeddings.embedding_checks import check_of_tokens


def embedded(
    embedding: Any, tokentype_ids: torch.Tensor | None, tokens: torch.Tensor
) -> torch.Tensor:
    """Types [b, s] of tokens [b, s] -> [b, s, h], by the table of `embedding`.

    Raises ValueError if either table or types are missing, or for types of another shape.
    """
    if tokentype_ids is None or embedding.tokentype_embeddings is None:
        raise ValueError(
            "token types are given to an embedding without them, or missing; pass tokentype_ids "
            "exactly if num_tokentypes is more than 0"
        )
    check_of_tokens("tokentype_ids", tokentype_ids, tokens)
    return embedding.tokentype_embeddings(tokentype_ids)
