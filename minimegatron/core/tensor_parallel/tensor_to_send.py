"""Which tensors of a batch can be sent to other ranks; those that cannot, in words.

Megatron has no counterpart.
"""

from collections.abc import Mapping

import torch

MAX_DATA_DIM = 5

Shapes = list[tuple[int, ...]]
"""Of each key of a batch."""


def refuse_tensor(key: str, data: Mapping[str, torch.Tensor], datatype: torch.dtype) -> None:
    """Raises ValueError: `key` is missing, has another dtype or too many dimensions."""
    if key not in data:
        raise ValueError(f"the batch has no {key!r}; it has {sorted(data)}")
    if data[key].dtype != datatype:
        raise ValueError(
            f"{key!r} has dtype {data[key].dtype} but is to be broadcast as {datatype}; "
            "convert it or broadcast it in a call of its own"
        )
    raise ValueError(
        f"{key!r} has {data[key].dim()} dimensions; at most {MAX_DATA_DIM} can be sent"
    )
