"""What a GPT refuses: positions that it does not know, several input tensors.

Megatron has no counterpart.
"""

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
