"""One rank of a tensor-parallel group reads the batch; the others receive it.

Counterpart: `megatron.core.tensor_parallel.data`.

All tensor-parallel ranks work on the same samples, so only one needs to load them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from minimegatron.core import collectives
from minimegatron.core.tensor_parallel import sizes_of_first_batch as first_batch
from minimegatron.core.tensor_parallel.shape_checks import MAX_DATA_DIM, Shapes, refuse_tensor
from minimegatron.core.tensor_parallel.utils import get_tensor_model_parallel_group_if_none
from minimegatron.core.utils import device_is_asynchronous, get_device


def _broadcast_sizes(
    keys: Sequence[str], data: Mapping[str, torch.Tensor] | None, group: Any, device: torch.device
) -> Shapes:
    """The shape of each key, known to every rank: one row of (dimensions, sizes...) per key."""
    if group.size() == 1:
        return [tuple(data[key].shape) for key in keys]  # nobody to tell, and nothing to wait for
    table = torch.zeros(len(keys), 1 + MAX_DATA_DIM, dtype=torch.int64)
    if group.rank() == 0:
        for row, key in zip(table, keys, strict=True):
            shape = data[key].shape
            row[0] = len(shape)
            row[1 : 1 + len(shape)] = torch.tensor(shape)
    table = table.to(device)
    collectives.broadcast(table, 0, group)
    return [tuple(row[1 : 1 + row[0]]) for row in table.tolist()]


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
        for key in keys:
            if key not in data or data[key].dtype != datatype or data[key].dim() > MAX_DATA_DIM:
                refuse_tensor(key, data, datatype)
    # A CPU gets sizes each time, so that a step that failed on some ranks leaves nothing behind.
    is_told_once = not sizes_vary and device_is_asynchronous()
    ask = partial(_broadcast_sizes, keys, data, group, device)
    shapes = first_batch.sizes_of_first_batch(ask, keys, data, group) if is_told_once else ask()

    # -- All tensors travel as one --
    numels = [torch.Size(shape).numel() for shape in shapes]
    if group.rank() == 0:
        flat = torch.cat([data[key].to(device, non_blocking=True).reshape(-1) for key in keys])
    else:
        flat = torch.empty(sum(numels), dtype=datatype, device=device)
    collectives.broadcast(flat, 0, group)
    pieces = flat.split(numels)
    return {key: piece.view(shape) for key, piece, shape in zip(keys, pieces, shapes, strict=True)}
