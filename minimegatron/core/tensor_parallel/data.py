"""One rank of a tensor-parallel group reads the batch; the others receive it.

Counterpart: `megatron.core.tensor_parallel.data`.

All tensor-parallel ranks work on the same samples, so only one needs to load them.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from minimegatron.core import collectives
from minimegatron.core.tensor_parallel.utils import get_tensor_model_parallel_group_if_none
from minimegatron.core.utils import device_is_asynchronous, get_device

_MAX_DATA_DIM = 5

Shapes = list[tuple[int, ...]]

_told: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], Shapes]] = weakref.WeakKeyDictionary()
"""By group and keys: sizes that all of the group's ranks know, of batches that all have the same."""


def _broadcast_sizes(
    keys: Sequence[str],
    data: Mapping[str, torch.Tensor] | None,
    group: Any,
    device: torch.device,
    sizes_vary: bool = True,
) -> Shapes:
    """The shape of each key, known to every rank: one row of (dimensions, sizes...) per key.

    On a GPU, sizes that do not vary are broadcast once: a rank that reads them waits until its GPU
    has done all that is queued. On a CPU they are broadcast each time, so that a step that failed on
    some ranks leaves nothing behind.
    """
    if group.size() == 1:
        return [tuple(data[key].shape) for key in keys]  # nobody to tell, and nothing to wait for
    told = {} if sizes_vary or not device_is_asynchronous() else _told.setdefault(group, {})
    if tuple(keys) in told:
        return _as_told(keys, data, group, told[tuple(keys)])
    table = torch.zeros(len(keys), 1 + _MAX_DATA_DIM, dtype=torch.int64)
    if group.rank() == 0:
        for row, key in zip(table, keys, strict=True):
            shape = data[key].shape
            row[0] = len(shape)
            row[1 : 1 + len(shape)] = torch.tensor(shape)
    table = table.to(device)
    collectives.broadcast(table, 0, group)
    told[tuple(keys)] = [tuple(row[1 : 1 + row[0]]) for row in table.tolist()]
    return told[tuple(keys)]


def _as_told(
    keys: Sequence[str], data: Mapping[str, torch.Tensor] | None, group: Any, shapes: Shapes
) -> Shapes:
    """`shapes`, unless this rank has a batch of others. The ranks that receive it would not know."""
    if group.rank() == 0 and shapes != (found := [tuple(data[key].shape) for key in keys]):
        raise ValueError(
            f"the batch's {', '.join(keys)} have sizes {found}, and the first batch had {shapes}; "
            "give each microbatch the same sizes, or call broadcast_data with sizes_vary=True"
        )
    return shapes


def _check(keys: Sequence[str], data: Mapping[str, torch.Tensor], datatype: torch.dtype) -> None:
    for key in keys:
        if key not in data:
            raise ValueError(f"the batch has no {key!r}; it has {sorted(data)}")
        if data[key].dtype != datatype:
            raise ValueError(
                f"{key!r} has dtype {data[key].dtype} but is to be broadcast as {datatype}; "
                "convert it or broadcast it in a call of its own"
            )
        if data[key].dim() > _MAX_DATA_DIM:
            raise ValueError(
                f"{key!r} has {data[key].dim()} dimensions; at most {_MAX_DATA_DIM} can be sent"
            )


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, torch.Tensor] | None,
    datatype: torch.dtype,
    tp_group: Any = None,
    sizes_vary: bool = True,
) -> dict[str, torch.Tensor]:
    """Sends `data[key]` for each key from the group's first rank to all, on this rank's device.

    Args:
        keys: in the same order on every rank.
        data: read on tensor-parallel rank 0 only; None elsewhere.
        datatype: the dtype of every tensor named.
        tp_group: None for `parallel_state`'s.
        sizes_vary: False if each batch of these keys has the sizes of the first, which saves time.

    Returns:
        A tensor per key, of the same shape on every rank.

    Raises:
        ValueError: a key is missing, has another dtype, too many dimensions, or sizes that vary.
    """
    group, device = tp_group, get_device()
    if group is None:
        group = get_tensor_model_parallel_group_if_none(group)
    if group.rank() == 0:
        _check(keys, data, datatype)
    shapes = _broadcast_sizes(keys, data, group, device, sizes_vary)

    # -- All tensors travel as one --
    numels = [torch.Size(shape).numel() for shape in shapes]
    if group.rank() == 0:
        flat = torch.cat([data[key].to(device, non_blocking=True).reshape(-1) for key in keys])
    else:
        flat = torch.empty(sum(numels), dtype=datatype, device=device)
    collectives.broadcast(flat, 0, group)
    pieces = flat.split(numels)
    return {key: piece.view(shape) for key, piece, shape in zip(keys, pieces, shapes, strict=True)}
