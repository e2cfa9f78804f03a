"""Sizes of batches that all have the same: on a GPU they are broadcast once.

A rank that reads sizes waits until its GPU has done all that is queued. Megatron has no counterpart; it
sends sizes with each batch.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from minimegatron.core.tensor_parallel.shape_checks import Shapes

_told: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], Shapes]] = weakref.WeakKeyDictionary()
"""By group and keys: sizes that all of the group's ranks know."""


def sizes_of_first_batch(
    ask: Callable[[], Shapes],
    keys: Sequence[str],
    data: Mapping[str, torch.Tensor] | None,
    group: Any,
) -> Shapes:
    """What `ask()` has returned for the first batch of these keys in this group.

    Raises ValueError if this rank has a batch of other sizes. The ranks that receive it would not know.
    """
    if group.size() == 1:
        return ask()
    told = _told.setdefault(group, {})
    if tuple(keys) not in told:
        told[tuple(keys)] = ask()
    shapes = told[tuple(keys)]
    if group.rank() == 0 and shapes != (found := [tuple(data[key].shape) for key in keys]):
        raise ValueError(
            f"the batch's {', '.join(keys)} have sizes {found}, and the first batch had {shapes}; "
            "give each microbatch the same sizes, or call broadcast_data with sizes_vary=True"
        )
    return shapes
