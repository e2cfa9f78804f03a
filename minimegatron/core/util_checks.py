"""What the helpers of `core.utils` and of `core.parameter` refuse.

Torch-free. Megatron has no counterpart.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn


def refuse_division(numerator: int, denominator: int) -> NoReturn:
    """Raises ValueError, with the nearest sizes that divide."""
    below = numerator // denominator * denominator
    raise ValueError(
        f"{numerator} is not divisible by {denominator}; "
        f"the nearest sizes that are: {below} and {below + denominator}"
    )


def refuse_chunks(model: list, attr: str) -> NoReturn:
    """Raises ValueError: one chunk is to be asked, and this is a list of some."""
    raise ValueError(f"model is a list of {len(model)} chunks; ask each chunk for {attr!r}")


def refuse_without(model: Any, attr: str) -> NoReturn:
    """Raises RuntimeError: no layer of wrapping has this."""
    raise RuntimeError(f"neither {type(model).__name__} nor what it wraps has {attr!r}")


def refuse_graph_of(backward: Callable) -> NoReturn:
    """Raises RuntimeError: autograd does not see what this backward computes."""
    raise RuntimeError(
        f"create_graph=True, but {backward.__qualname__} cannot be differentiated again; take "
        "gradients of gradients of a model of torch's own layers, without recomputation"
    )


def refuse_kind(name: str, kinds: Iterable[str]) -> NoReturn:
    """Raises ValueError with the kinds of parameters that there are."""
    raise ValueError(f"no kind of parameter is called {name!r}; use {', '.join(kinds)}")
