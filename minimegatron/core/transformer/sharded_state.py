"""One weight, one saved buffer as the box that a checkpoint takes.

Megatron has this in `megatron.core.transformer.utils` and in each layer.
"""

from functools import partial
from typing import Any

import torch

from minimegatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    make_sharded_tensors,
)
from minimegatron.core.parameter import tensor_group
from minimegatron.core.process_groups_config import ProcessGroupCollection


def sharded_tensor(
    key: str, tensor: torch.Tensor, groups: ProcessGroupCollection
) -> ShardedTensor | ShardedTensorFactory:
    """A weight or a saved buffer as a checkpoint takes it, as `key`.

    Stacked matrices are one box that makes several.
    """
    if isinstance(tensor, torch.nn.Parameter):
        return _sharded_parameter(key, tensor, groups)
    return sharded_buffer(key, tensor, groups)


def _sharded_parameter(
    key: str, param: torch.nn.Parameter, groups: ProcessGroupCollection
) -> ShardedTensor | ShardedTensorFactory:
    group, second_copy = tensor_group(param, groups), int(getattr(param, "shared", False))
    boxes = partial(_boxes, param=param, tp_rank=group.rank(), tp_size=group.size())
    parts = boxes(key, param.detach(), second_copy)
    if len(parts) == 1:
        return parts[0]
    # Each of the matrices has its own place in the whole.
    whole = partial(_filled, param.detach())
    return ShardedTensorFactory(key, param.detach(), boxes, whole, second_copy)


def _boxes(
    key: str, data: torch.Tensor, replica_id: int, flattened_range: None = None, **cut: Any
) -> list[ShardedTensor]:
    return make_sharded_tensors(key, data=data, replica_id=replica_id, **cut)


def _filled(data: torch.Tensor, parts: list) -> torch.Tensor:
    """The parts were views of `data`, so a load has filled it."""
    return data


def sharded_buffer(key: str, buffer: torch.Tensor, groups: ProcessGroupCollection) -> ShardedTensor:
    """As a checkpoint takes it, as `key`.

    Copies of the model may differ, as in a running mean: the first is saved, as in Megatron, and a save
    warns. Experts' copies are other ranks, and must have the same.
    """
    copies = None if ".experts." in key else vars(groups).get("dp_cp")
    replica_id = 0 if copies is None else copies.rank()
    tensor = ShardedTensor.from_rank_offsets(key, buffer, replica_id=replica_id)
    tensor.is_buffer = True
    return tensor
