"""Numbers that are wrong in a known way: what such a mistake means, in place of a ratio.

Megatron has no counterpart.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from minimegatron.exercises.bench.cases import Wrong
from minimegatron.exercises.bench.feedback_numbers import check_numbers


def check_known(
    name: str,
    got: Any,
    expected: torch.Tensor,
    known: Iterable[tuple[torch.Tensor, str]] = (),
    rank: int | None = None,
    layout: Mapping[str, int] | None = None,
    *,
    rtol: float = 1e-6,
    atol: float = 1e-9,
) -> None:
    """As `check_numbers`; of the first in `known` that `got` equals, the words are said.

    `known` has what a mistake gives, and what to say of it. It is only looked at where `got` is wrong.
    """
    try:
        check_numbers(name, got, expected, rank, layout, rtol=rtol, atol=atol)
    except Wrong as wrong:
        for value, words in known:
            is_expected = torch.allclose(value, expected, rtol=rtol, atol=atol)
            if not is_expected and is_same(got, value, rtol, atol):
                raise Wrong(f"{str(wrong).splitlines()[0]}\n{words}", wrong.part) from None
        raise


def is_same(got: Any, value: torch.Tensor, rtol: float = 1e-6, atol: float = 1e-9) -> bool:
    """Whether `got` is a tensor with these numbers."""
    if not isinstance(got, torch.Tensor) or got.shape != value.shape:
        return False
    return torch.allclose(got.double(), value.double(), rtol=rtol, atol=atol)
