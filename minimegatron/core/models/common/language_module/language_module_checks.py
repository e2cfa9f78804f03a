"""What a language model refuses: to have no width, logits of another part of the vocabulary.

Megatron has no counterpart.
"""

from typing import Any

import torch


def check_hidden_size(config: Any) -> None:
    """Raises ValueError for a configuration without a hidden size."""
    if config.hidden_size == 0:
        raise ValueError("a model needs the configuration's hidden_size, which is 0; set it")


def refuse_logits(logits: torch.Tensor, vocab_size: int, ranks: int) -> None:
    """Raises ValueError: these are not what one of `ranks` ranks scores of the vocabulary."""
    raise ValueError(
        f"logits have {logits.size(-1)} columns, but of a vocabulary of {vocab_size} each "
        f"of {ranks} ranks scores {vocab_size // ranks}; give this rank's slice"
    )
