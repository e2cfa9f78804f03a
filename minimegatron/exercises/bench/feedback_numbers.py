"""What a check says of numbers that are wrong: where, by what factor, and what that usually means.

Megatron has no counterpart.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from minimegatron.exercises.bench.cases import Wrong
from minimegatron.exercises.bench.feedback import on_rank, wrong_value

MEANINGS = {
    "num_microbatches": (
        "every microbatch counted in full: the loss was not divided by the number of microbatches",
        "only one microbatch's share arrived, or it was divided by the number of microbatches twice",
    ),
    "dp": (
        "gradients were summed over the data-parallel ranks and not averaged",
        "it was divided by the number of data-parallel ranks once too often, or the sum over them "
        "is missing",
    ),
    "tp": (
        "every tensor-parallel rank added the same thing: a sum over ranks that each hold all of it",
        "the sum over tensor-parallel ranks is missing, or it was made an average",
    ),
    "cp": (
        "every context-parallel rank added the same thing",
        "the sum over context-parallel ranks is missing, or it was made an average",
    ),
    "ep": (
        "an expert's gradient was divided by the number of its copies: it has seen the tokens of all "
        "ranks that share the experts",
        "what the tokens of the other ranks contribute to an expert is missing, or it was divided once "
        "too often",
    ),
    "pp": (
        "every stage added the same thing",
        "only one stage's share arrived, or it was divided by the number of stages",
    ),
    "world": (
        "every rank added the same thing: a sum over ranks that each hold all of it",
        "the sum over ranks is missing, or it was made an average",
    ),
}
"""Name of a size in `layout` -> what "that many times too large" means, and "too small"."""

ROUNDING = 1e-5
"""Relative to the largest element; a float32 sum is off by less."""


def check_numbers(
    name: str,
    got: Any,
    expected: Any,
    rank: int | None = None,
    layout: Mapping[str, int] | None = None,
    *,
    rtol: float = 1e-6,
    atol: float = 1e-9,
) -> None:
    """Raises `wrong_numbers(...)` unless the tensors (or numbers, or dicts of either) agree."""
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping):
            raise wrong_value(name, type(got).__name__, "a dict with " + ", ".join(expected))
        for key, value in expected.items():
            if key not in got:
                raise Wrong(f"{on_rank(rank)}{name} has no {key!r}")
            check_numbers(f"{name} of {key}", got[key], value, rank, layout, rtol=rtol, atol=atol)
        return
    found, wanted = _pair(got, expected)
    if found is None or found.shape != wanted.shape or not _close(found, wanted, rtol, atol).all():
        raise wrong_numbers(name, got, expected, rank, layout, rtol=rtol, atol=atol)


def wrong_numbers(
    name: str,
    got: Any,
    expected: Any,
    rank: int | None = None,
    layout: Mapping[str, int] | None = None,
    *,
    rtol: float = 1e-6,
    atol: float = 1e-9,
) -> Wrong:
    """First differing element, ratio, and what such a ratio usually means.

    `layout` gives the sizes that the ratio is compared with, by the names of `MEANINGS`:
    `{"dp": 2, "num_microbatches": 4}`. Other names are shown as they are.
    """
    found, wanted = _pair(got, expected)
    if found is None:
        return Wrong(f"{on_rank(rank)}{name} is {_type_words(got)}; a tensor is expected")
    if found.shape != wanted.shape:
        return Wrong(
            f"{on_rank(rank)}{name} has shape {list(found.shape)}, but {list(wanted.shape)} is expected"
        )
    is_off = ~_close(found, wanted, rtol, atol)
    where = is_off.reshape(-1).nonzero()
    first = int(where[0]) if len(where) else 0
    index = list(torch.unravel_index(torch.tensor(first), found.shape)) if found.ndim else []
    place = f"[{', '.join(str(int(i)) for i in index)}]" if index else ""
    here, there = found.reshape(-1)[first].item(), wanted.reshape(-1)[first].item()
    mine, theirs = told_apart(here, there)
    lines = [f"{on_rank(rank)}{name} is wrong: {place or 'it'} is {mine}, expected {theirs}"]
    if found.numel() > 1:
        lines.append(f"{int(is_off.sum())} of {found.numel()} elements differ")
    lines.append(explain_ratio(found, wanted, layout or {}))
    return Wrong("\n".join(lines))


def told_apart(one: float, other: float) -> tuple[str, str]:
    """Two numbers with six digits, or with twelve if six do not tell them apart.

    >>> told_apart(1 / 3, 0.5), told_apart(1.0000001, 1.0)
    (('0.333333', '0.5'), ('1.0000001', '1'))
    """
    few, many = (f"{one:.6g}", f"{other:.6g}"), (f"{one:.12g}", f"{other:.12g}")
    return few if few[0] != few[1] else many


def explain_ratio(got: torch.Tensor, expected: torch.Tensor, layout: Mapping[str, int]) -> str:
    """What the ratio of the two, if it is the same everywhere, usually means.

    >>> print(explain_ratio(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0]), {"dp": 2}))
    ratio got / expected = 2 everywhere = x dp (2): gradients were summed over the data-parallel \
ranks and not averaged
    """
    found, wanted = got.reshape(-1).double(), expected.reshape(-1).double()
    if not torch.isfinite(found).all():
        return "it has values that are nan or inf: 0 / 0, or memory that was never written"
    if not found.any() and wanted.any():
        return "it is 0 everywhere: nothing arrived here, or it was cleared afterwards"
    if not wanted.any():
        return "it should be 0 everywhere: something was added here that belongs elsewhere"
    large = wanted.abs() > 1e-6 * wanted.abs().max()
    ratios = found[large] / wanted[large]
    if ratios.max() - ratios.min() > 1e-4 * ratios.abs().max():
        return _uneven(found, wanted, float(ratios.min()), float(ratios.max()))
    ratio = float(ratios.mean())
    if abs(ratio - 1) < 1e-4:
        return _nearly_equal(float((found - wanted).abs().max() / wanted.abs().max()))
    everywhere = " everywhere" if len(ratios) > 1 else ""
    text = f"ratio got / expected = {ratio:.6g}{everywhere}"
    meaning = _meaning(ratio, layout)
    return f"{text} = {meaning}" if meaning else f"{text}; none of the layout's sizes explains it"


def _nearly_equal(error: float) -> str:
    """What a small difference comes from, by the largest one of all elements, relative.

    >>> _nearly_equal(3e-8)
    'equal up to rounding (3e-08 of the largest): is something on the way float32 or of fewer digits?'
    """
    if error < ROUNDING:
        words = f"equal up to rounding ({error:.1g} of the largest)"
        return f"{words}: is something on the way float32 or of fewer digits?"
    return (
        "ratio got / expected = 1 nearly everywhere: a small part is missing, was added, or comes from "
        "another place"
    )


def _uneven(found: torch.Tensor, wanted: torch.Tensor, low: float, high: float) -> str:
    text = f"ratio got / expected lies between {low:.4g} and {high:.4g}: no common factor"
    if torch.allclose(found.sort().values, wanted.sort().values):
        return "the same values in another order: a permutation, or ranks in another order"
    return (
        f"{text}, so this is not a matter of scale; something else was added, left out or mixed up"
    )


def _meaning(ratio: float, layout: Mapping[str, int]) -> str:
    if abs(ratio + 1) < 1e-4:
        return "-1: the sign is turned round"
    for name, size in _sizes(layout):
        if size > 1 and math.isclose(ratio, size, rel_tol=1e-4):
            return f"x {name} ({size})" + _said(name, 0)
        if size > 1 and math.isclose(ratio, 1 / size, rel_tol=1e-4):
            return f"1 / {name} (1/{size})" + _said(name, 1)
    return ""


def _sizes(layout: Mapping[str, int]) -> list[tuple[str, float]]:
    """The layout's sizes, then their products, quotients and squares."""
    single = [(name, size) for name, size in layout.items() if size > 1]
    pairs = [(f"{a} x {b}", x * y) for i, (a, x) in enumerate(single) for b, y in single[i + 1 :]]
    pairs += [(f"{a} / {b}", x / y) for a, x in single for b, y in single if x > y]
    return single + pairs + [(f"{name}^2", size * size) for name, size in single]


def _said(name: str, which: int) -> str:
    return f": {MEANINGS[name][which]}" if name in MEANINGS else ""


def _pair(got: Any, expected: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
    wanted = torch.as_tensor(expected).detach().cpu().double()
    try:
        return torch.as_tensor(got).detach().cpu().double(), wanted
    except (TypeError, ValueError, RuntimeError):
        return None, wanted


def _close(found: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    return torch.isclose(found, wanted, rtol=rtol, atol=atol)


def _type_words(value: Any) -> str:
    return "None (was `return` forgotten?)" if value is None else f"a {type(value).__name__}"
