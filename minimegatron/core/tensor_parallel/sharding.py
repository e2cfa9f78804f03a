"""One parameter of the full model and its tensor-parallel pieces: how it is cut, and cutting it.

Megatron keeps this arithmetic inside `layers` and its checkpoint code.

Every parameter says how it is cut, by three attributes that the layers set:

- `tensor_model_parallel`: cut at all? If not, each rank holds the whole.
- `partition_dim`: the dimension that is cut.
- `partition_stride`: how many matrices lie stacked along it, each cut by itself. SwiGLU's first
  projection stacks gate and up (stride 2): full = [gate; up], rank r holds [gate_r; up_r].
- `partition_sizes`: for stacked matrices of unequal sizes, what one rank holds of each. A Mamba
  layer's projection stacks z, x, B, C and dt. None for equal ones.

Over which ranks a parameter is cut depends on its kind; see `core.parameter`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from minimegatron.core.tensor_parallel import shape_checks
from minimegatron.core.tensor_parallel.utils import tensor_model_parallel_rank
from minimegatron.exports import all_of

__getattr__, __dir__ = all_of(__name__, "minimegatron.core.tensor_parallel.whole_parameters")


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor,
    is_parallel: bool,
    dim: int,
    stride: int,
    partition_sizes: Sequence[int] | None = None,
) -> None:
    """Records how `tensor` is cut over the tensor-parallel ranks. Mirrors: `layers`, same name."""
    tensor.tensor_model_parallel = is_parallel
    tensor.partition_dim, tensor.partition_stride = dim, stride
    tensor.partition_sizes = partition_sizes


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Marks `tensor` as whole on every rank, unless a layer said otherwise."""
    if not hasattr(tensor, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(tensor, is_parallel=False, dim=-1, stride=1)


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor, tp_group: Any = None) -> bool:
    """True on exactly one rank per value: everywhere if cut, on tensor rank 0 if whole."""
    is_parallel = getattr(param, "tensor_model_parallel", False)
    return is_parallel or tensor_model_parallel_rank(tp_group) == 0


def is_cut(param: torch.Tensor, tp_size: int) -> bool:
    """True if the ranks hold different pieces of `param`."""
    return tp_size > 1 and getattr(param, "tensor_model_parallel", False)


def section_sizes(param: torch.Tensor, length: int, tp_size: int = 1) -> list[int]:
    """Sizes of the matrices stacked along the cut dimension of `param`, the first one first.

    `length` is the size of that dimension, in one rank's piece or in the whole. Raises ValueError if
    the matrices do not fill it, or if one of them cannot be cut over `tp_size` ranks.
    """
    sizes = getattr(param, "partition_sizes", None) or [1] * param.partition_stride
    shape_checks.check_sections(param.partition_dim, length, sizes, tp_size)
    return [length // sum(sizes) * size for size in sizes]


def full_shape(param: torch.Tensor, tp_size: int) -> torch.Size:
    """The shape `param` has in the full model."""
    shape = list(param.shape)
    if is_cut(param, tp_size):
        shape[param.partition_dim] *= tp_size
    return torch.Size(shape)


def shard_parameter(
    full: torch.Tensor, param: torch.Tensor, tp_rank: int, tp_size: int
) -> torch.Tensor:
    """The piece of `full` that rank `tp_rank` of `tp_size` holds; the whole if `param` is not cut.

    Args:
        full: a tensor of `param`'s full shape: a weight, its gradient, an optimizer moment.
        param: says how it is cut; its own values are not read.

    Raises:
        ValueError: the cut dimension cannot be divided so.
    """
    if not is_cut(param, tp_size):
        return full
    dim = param.partition_dim
    stacked = full.split(section_sizes(param, full.size(dim), tp_size), dim)
    return torch.cat([matrix.chunk(tp_size, dim)[tp_rank] for matrix in stacked], dim)
