"""Reports of a loss function that cannot be added up, in words.

Megatron has no counterpart; there the sum fails, or is of this copy of the model alone.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch


def refuse_kinds(kinds: list[dict[str, int]]) -> NoReturn:
    """Raises ValueError: microbatches have reported other keys, or other sizes under one.

    Args:
        kinds: of each microbatch, how many numbers stand under each key.
    """
    number, kind = next(
        (number, kind)
        for number, kind in enumerate(kinds)
        if kind != kinds[0] or set(kind.values()) - {1, 2}
    )
    raise ValueError(
        f"the loss function reported {_in_words(kinds[0])} in microbatch 0, "
        f"{_in_words(kind)} in microbatch {number}; report the same keys in each, with 1 "
        "number or a pair [loss sum, number of tokens], which may be [0, 0]"
    )


def refuse_kind_of_copy(group: Any, kind: dict[str, int]) -> NoReturn:
    """Raises ValueError: this copy of the model has reported `kind`, another copy something else."""
    raise ValueError(
        f"copy {group.rank()} of {group.size()} of the model: the loss function reported "
        f"{_in_words(kind)} here, and other keys or sizes on another copy; report the same on "
        "all"
    )


def refuse_report(report: Any) -> NoReturn:
    """Raises ValueError: it is no dictionary, or torch cannot make a tensor of one of its values."""
    if not isinstance(report, Mapping):
        raise ValueError(
            f"the loss function reported a {type(report).__name__}; its last value is a dictionary of "
            'what the log is to show, such as {"lm loss": loss.detach()}'
        )
    for key, value in report.items():
        try:
            torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"the loss function reported a {type(value).__name__} under {key!r}; report one "
                "number, or a pair [loss sum, number of tokens]"
            ) from None


def _in_words(kind: dict[str, int]) -> str:
    """
    >>> _in_words({"lm loss": 2, "z": 1})
    "'lm loss' (2 numbers), 'z' (1 number)"
    """
    words = [f"{key!r} ({size} number{'s' * (size != 1)})" for key, size in kind.items()]
    return ", ".join(words) or "nothing"
