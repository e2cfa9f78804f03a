"""Whether two runs of a step gave the same result.

Counterpart: `_compare_floats` of `megatron.core.rerun_state_machine`.
"""

import math
from typing import Any

import torch

COMPARISON_MATCH = 0.0
COMPARISON_MISMATCH = math.inf


def number_of(result: Any) -> float:
    """A number, or that in a scalar tensor, which may be a loss that has its backward still to come."""
    return float(result.detach() if isinstance(result, torch.Tensor) else result)


def relative_difference(first: Any, second: Any) -> float:
    """|a - b| over the mean of |a| and |b|, of two numbers or scalar tensors; 0 where they are equal.

    NaN equals NaN. Another pair in which not both are finite is infinitely far apart. Megatron divides
    by the mean of a and b: for 1 and -1 that is a division by zero, and +Inf beside -Inf gives NaN,
    which exceeds no tolerance and so passes for the same result.

    >>> relative_difference(1.0, 1.0), relative_difference(1.0, -1.0)
    (0.0, 2.0)
    >>> relative_difference(float("nan"), float("nan")), relative_difference(1.0, float("nan"))
    (0.0, inf)
    """
    a, b = number_of(first), number_of(second)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return COMPARISON_MATCH
    if not (math.isfinite(a) and math.isfinite(b)):
        return COMPARISON_MISMATCH
    # Halves first: of two large numbers the sum may be too large.
    return abs(a / 2 - b / 2) / (abs(a) / 4 + abs(b) / 4)


def as_plain(result: Any) -> dict[str, Any]:
    """A result as JSON has it, exactly: a tensor's elements as text, so that NaN and Inf are there.

    Raises ValueError for what is neither a tensor of numbers nor a number.
    """
    tensor = torch.as_tensor(result) if isinstance(result, int | float) else result
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"a rejected result is a {type(result).__name__}, which no checkpoint can hold; give "
            "validate_result a tensor or a number"
        )
    values = [repr(value) for value in tensor.detach().reshape(-1).tolist()]
    name = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(tensor.shape), "values": values}


def from_plain(plain: dict[str, Any]) -> torch.Tensor:
    """The tensor that `as_plain` was given, on the CPU."""
    dtype = getattr(torch, plain["dtype"])
    read = float if dtype.is_floating_point else int
    values = [read(value) for value in plain["values"]]
    return torch.tensor(values, dtype=dtype).reshape(plain["shape"])
