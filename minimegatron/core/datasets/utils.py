"""Names of the splits, weights that add up to one, and the two ways to write a blend.

Torch-free. Counterpart: `megatron.core.datasets.utils`.
"""

from collections.abc import Sequence
from enum import Enum

import numpy

Blend = tuple[list[str], list[float] | None]
"""Path prefixes, and a weight for each, or None: in proportion to their lengths."""


class DataError(ValueError):
    """Data that cannot be trained on. Its message is all that a reader needs: who ends a run because of
    it shows no traceback."""

    @classmethod
    def sentence(cls, error: "DataError") -> str:
        """The message alone, also of an error that a loader's process raised: torch wraps it."""
        return str(error).rpartition(f"{cls.__name__}: ")[2].strip()


class Split(Enum):
    """The three parts of a corpus, in the order of `--split 949,50,1`."""

    train = 0
    valid = 1
    test = 2


def compile_helpers() -> None:
    """Does nothing: the helpers of datasets are NumPy here, and need no compiler.

    Megatron's are C++, and its programs call this on one rank before they build datasets.
    """


def normalize(weights: Sequence[float]) -> list[float]:
    """`weights` divided by their sum."""
    array = numpy.array(weights, dtype=numpy.float64)
    return (array / numpy.sum(array)).tolist()


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """What `--data-path` means: `["30", "a", "70", "b"]`, weights and prefixes in turn, or prefixes
    only. Raises ValueError where some of the places for weights hold a number and others do not,
    and for weights that are not above 0."""
    if not blend:
        return None
    weights = [_number(word) for word in blend[::2]]
    if len(blend) % 2 or all(weight is None for weight in weights):
        return [prefix.strip() for prefix in blend], None
    for position, weight in enumerate(weights):
        word, prefix = blend[2 * position], blend[2 * position + 1]
        if weight is None:
            raise ValueError(
                f"data path: {word!r} stands before {prefix!r} where its weight should; give a "
                "weight before every prefix, or none at all"
            )
        if not 0 < weight < float("inf"):
            raise ValueError(f"data path: the weight of {prefix!r} is {word}; give one above 0")
    return [prefix.strip() for prefix in blend[1::2]], weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
