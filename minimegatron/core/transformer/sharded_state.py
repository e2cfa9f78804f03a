"""A module's weights and saved buffers as the boxes that a checkpoint takes.

Megatron has this in `megatron.core.transformer.module` and in each layer.
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
from minimegatron.core.parameter_marks import restore_marks
from minimegatron.core.process_groups_config import ProcessGroupCollection, groups_of
from minimegatron.core.transformer.module import (
    MegatronModule,
    global_parameter_name,
    named_saved_buffers,
)


def sharded_state_dict(
    module: MegatronModule, prefix: str
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """What `MegatronModule.sharded_state_dict` returns for `module`."""
    module.state_dict()  # for the wrapper's hook, which raises
    groups = groups_of(module)
    found = {}
    restore_marks(module)
    for name, param in module.named_parameters():
        key, group = prefix + global_parameter_name(module, name), tensor_group(param, groups)
        second_copy = int(getattr(param, "shared", False))
        boxes = partial(_boxes, param=param, tp_rank=group.rank(), tp_size=group.size())
        parts = boxes(key, param.detach(), second_copy)
        if len(parts) > 1:  # stacked matrices: each has its own place in the whole
            whole = partial(_filled, param.detach())
            parts = [ShardedTensorFactory(key, param.detach(), boxes, whole, second_copy)]
        found[prefix + name] = parts[0]
    for name, buffer in named_saved_buffers(module):
        key = prefix + global_parameter_name(module, name)
        found[prefix + name] = sharded_buffer(key, buffer, groups)
    return found


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
