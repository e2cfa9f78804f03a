"""Predictions: one cell locks them in, a later one sets them beside what was found.

Torch-free. Megatron has no counterpart.

>>> predict(stage=None, receives=[2], idle="30%")     # the reader has answered two of three
Locked in: receives = [2], idle = 30%. Not answered: stage.
>>> compare(stage=1, receives=(2,), idle=3 / 11)
          you said                it is
stage     no prediction was made  1
receives  [2]                     [2]     as predicted
idle      30%                     0.2727  not as predicted
>>> compare(layers=8)
        you said                it is
layers  no prediction was made  8
>>> predict(stage=1)
`stage` is not taken: what it is was shown already. Restart the kernel to predict anew.
"""

from numbers import Integral, Real
from typing import Any

TOLERANCE = 0.02
"""How far a prediction may be off where something was measured, as a share of it."""

_locked: dict[str, Any] = {}
_compared: set[str] = set()


def predict(**answers: Any) -> None:
    """Locks in the answers that are not None. Each may be changed until it has been compared."""
    given = [name for name, answer in answers.items() if answer is not None]
    for name in (name for name in given if name in _compared):
        print(
            f"`{name}` is not taken: what it is was shown already. "
            "Restart the kernel to predict anew."
        )
    _locked.update({name: answers[name] for name in given if name not in _compared})
    locked = [f"{name} = {in_words(_locked[name])}" for name in answers if name in _locked]
    missing = [name for name in answers if name not in _locked and name not in given]
    parts = [f"Locked in: {', '.join(locked)}."] if locked else []
    parts += [f"Not answered: {', '.join(missing)}."] if missing else []
    if parts:
        print(" ".join(parts))


def compare(**found: Any) -> None:
    """Shows each prediction beside what was found; without a prediction, what was found."""
    _compared.update(found)
    rows = [("", "you said", "it is", "")]
    for name, here in found.items():
        if name in _locked:
            verdict = "as predicted" if agree(_locked[name], here) else "not as predicted"
            rows.append((name, in_words(_locked[name]), in_words(here), verdict))
        else:
            rows.append((name, "no prediction was made", in_words(here), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def agree(predicted: Any, here: Any) -> bool:
    """Whether a prediction is right: numbers that were measured only nearly, the rest exactly.

    >>> agree("27%", 3 / 11), agree(0.25, 3 / 11), agree(33.1, 33), agree("Both ", "both")
    (True, False, False, True)
    >>> agree([2, 6], (2, 6)), agree({"tp": 0}, {"tp": 0}), agree("a lot", 3)
    (True, True, False)
    """
    if isinstance(predicted, str) and not isinstance(here, str):
        predicted = _number(predicted)
    if isinstance(here, str):
        return str(predicted).strip().casefold() == here.strip().casefold()
    if isinstance(here, list | tuple):
        is_list = isinstance(predicted, list | tuple) and len(predicted) == len(here)
        return is_list and all(map(agree, predicted, here))
    if isinstance(here, Real) and isinstance(predicted, Real) and not isinstance(here, Integral):
        return abs(predicted - here) <= TOLERANCE * abs(here)
    return predicted == here


def _number(text: str) -> Any:
    """The number in "27%" or "0.27"; otherwise the text itself."""
    share = text.strip().endswith("%")
    try:
        return float(text.strip().rstrip("%")) / (100 if share else 1)
    except ValueError:
        return text


def in_words(value: Any) -> str:
    """As a reader writes it.

    >>> in_words([1 / 3, "both"]), in_words({"tp": 0.5})
    ('[0.3333, both]', "{'tp': 0.5}")
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_words, value))}]"
    if isinstance(value, Real) and not isinstance(value, Integral):
        return f"{float(value):.4g}"
    return str(value)
