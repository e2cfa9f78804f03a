"""What a check says when something is wrong: which invariant, where, and what it usually means.

Called by: each exercise's check, on every rank. Calls: torch. Megatron has no counterpart.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

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


class Wrong(Exception):
    """The student's code does not do what it should. The message is for the student.

    First line: which invariant broke, on which rank and microbatch. Below: how to see it.
    """


# -- Numbers --


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
                raise Wrong(f"{_on(rank)}{name} has no {key!r}")
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
        return Wrong(f"{_on(rank)}{name} is {_type_words(got)}; a tensor is expected")
    if found.shape != wanted.shape:
        return Wrong(
            f"{_on(rank)}{name} has shape {list(found.shape)}, but {list(wanted.shape)} is expected"
        )
    is_off = ~_close(found, wanted, rtol, atol)
    where = is_off.reshape(-1).nonzero()
    first = int(where[0]) if len(where) else 0
    index = list(torch.unravel_index(torch.tensor(first), found.shape)) if found.ndim else []
    place = f"[{', '.join(str(int(i)) for i in index)}]" if index else ""
    here, there = found.reshape(-1)[first].item(), wanted.reshape(-1)[first].item()
    lines = [f"{_on(rank)}{name} is wrong: {place or 'it'} is {here:.6g}, expected {there:.6g}"]
    if found.numel() > 1:
        lines.append(f"{int(is_off.sum())} of {found.numel()} elements differ")
    lines.append(explain_ratio(found, wanted, layout or {}))
    return Wrong("\n".join(lines))


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
        return "ratio got / expected = 1 nearly everywhere: a small part is missing or was added"
    everywhere = " everywhere" if len(ratios) > 1 else ""
    text = f"ratio got / expected = {ratio:.6g}{everywhere}"
    meaning = _meaning(ratio, layout)
    return f"{text} = {meaning}" if meaning else f"{text}; none of the layout's sizes explains it"


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


def _on(rank: int | None) -> str:
    return "" if rank is None else f"rank {rank}: "


def _type_words(value: Any) -> str:
    return "None (was `return` forgotten?)" if value is None else f"a {type(value).__name__}"


# -- Values --


def check_value(what: str, got: Any, expected: Any, why: str = "") -> None:
    """Raises `wrong_value(...)` unless the two are equal."""
    if got != expected:
        raise wrong_value(what, got, expected, why)


def wrong_value(what: str, got: Any, expected: Any, why: str = "") -> Wrong:
    """A plain value (a rank, a list, a table) that differs: yours, the right one, and why."""
    lines = [f"{what} is wrong", f"  yours:    {_short(got)}", f"  expected: {_short(expected)}"]
    if got is None:
        lines[1] += "   (was `return` forgotten?)"
    place = _first_difference(got, expected)
    return Wrong("\n".join([*lines, *([place] if place else []), *([why] if why else [])]))


def _first_difference(got: Any, expected: Any) -> str:
    if not (isinstance(got, list | tuple) and isinstance(expected, list | tuple)):
        return ""
    if type(got) is not type(expected) and list(got) == list(expected):
        return f"the same items, but a {type(expected).__name__} is expected"
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=False)):
        if mine != theirs:
            return f"first difference at [{index}]: {_short(mine)}, expected {_short(theirs)}"
    return f"{len(got)} items, but {len(expected)} are expected"


def _short(value: Any, most: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


# -- Order --


def check_order(
    plan_actions: Sequence[Any],
    trace_actions: Sequence[Any],
    rank: int | None = None,
    words: Callable[[Any], str] | None = None,
) -> None:
    """Raises `wrong_order(...)` unless both lists have the same actions in the same order."""
    say = words or _action_words
    if list(map(say, plan_actions)) != list(map(say, trace_actions)):
        raise wrong_order(plan_actions, trace_actions, rank, words)


def wrong_order(
    plan_actions: Sequence[Any],
    trace_actions: Sequence[Any],
    rank: int | None = None,
    words: Callable[[Any], str] | None = None,
) -> Wrong:
    """The plan beside what was done, one action per line, with the first divergence marked.

    Actions are the planner's, or plain words such as "F0"; `words` says them otherwise.

    >>> print(wrong_order(["F0", "F1", "B0"], ["F0", "B0", "F1"], rank=1))
    rank 1: the order is wrong from action 1 on: the plan has F1, your code did B0
           plan  yours
       0   F0    F0
    -> 1   F1    B0   <- first difference
       2   B0    F1
    """
    say = words or _action_words
    plan, done = list(map(say, plan_actions)), list(map(say, trace_actions))
    longest = max(len(plan), len(done))
    pairs = [(_at(plan, i), _at(done, i)) for i in range(longest)]
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), longest)
    wanted, found = pairs[first] if first < longest else ("nothing", "nothing")
    lines = [
        f"{_on(rank)}the order is wrong from action {first} on: the plan has "
        f"{wanted or 'nothing more'}, your code did {found or 'nothing more'}"
    ]
    begin, end = max(0, first - 6), min(longest, first + 6)
    width = max(4, *(len(a) for a, _ in pairs[begin:end])) if end > begin else 4
    lines.append(f"       {'plan'.ljust(width)}  yours")
    if begin:
        lines.append(f"       ... {begin} equal actions")
    for i in range(begin, end):
        mark, tail = ("->", "   <- first difference") if i == first else ("  ", "")
        lines.append(f"{mark}{i:>3}   {pairs[i][0].ljust(width)}  {pairs[i][1]}{tail}".rstrip())
    if end < longest:
        lines.append(f"       ... {longest - end} more")
    return Wrong("\n".join(lines))


def _at(actions: Sequence[str], index: int) -> str:
    return actions[index] if index < len(actions) else ""


def _action_words(action: Any) -> str:
    """Short for forwards and backwards (F3, or F3.1 on chunk 1), the full words for messages."""
    kind = getattr(action, "kind", None)
    if kind not in ("forward", "backward"):
        return str(action)
    chunk = f".{action.chunk}" if action.chunk else ""
    return f"{kind[0].upper()}{action.microbatch}{chunk}"
