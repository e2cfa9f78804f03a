"""A parameter put together again from its tensor-parallel pieces; another tensor that is cut like it.

Megatron keeps this arithmetic inside `layers` and its checkpoint code.
"""

from collections.abc import Sequence
from typing import Any

import torch

from minimegatron.core import collectives
from minimegatron.core.tensor_parallel.sharding import (
    is_cut,
    section_sizes,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)

__all__ = ["copy_tensor_model_parallel_attributes", "gather_parameter", "unshard_parameter"]
"""`sharding` offers these."""


def unshard_parameter(shards: Sequence[torch.Tensor], param: torch.Tensor) -> torch.Tensor:
    """The full parameter of the `shards` of all ranks, in rank order: `shard_parameter` inverted."""
    if not is_cut(param, len(shards)):
        return shards[0]
    dim = param.partition_dim
    per_rank = [shard.split(section_sizes(param, shard.size(dim)), dim) for shard in shards]
    return torch.cat([piece for matrix in zip(*per_rank, strict=True) for piece in matrix], dim)


def gather_parameter(shard: torch.Tensor, param: torch.Tensor, tp_group: Any) -> torch.Tensor:
    """Every rank's `shard` (of `param`'s value, gradient, ...) put together, on every rank.

    A collective over `tp_group` for a parameter that is cut; for others the rank's own value.
    """
    if not is_cut(param, tp_group.size()):
        return shard
    gathered = shard.new_empty((tp_group.size() * shard.size(0), *shard.shape[1:]))
    collectives.all_gather(gathered, shard.contiguous(), tp_group)
    return unshard_parameter(gathered.chunk(tp_group.size(), dim=0), param)


def copy_tensor_model_parallel_attributes(
    destination_tensor: torch.Tensor, source_tensor: torch.Tensor
) -> None:
    """For an optimizer's fp32 copy of a parameter."""
    set_defaults_if_not_set_tensor_model_parallel_attributes(source_tensor)
    set_tensor_model_parallel_attributes(
        destination_tensor,
        source_tensor.tensor_model_parallel,
        source_tensor.partition_dim,
        source_tensor.partition_stride,
        getattr(source_tensor, "partition_sizes", None),
    )
