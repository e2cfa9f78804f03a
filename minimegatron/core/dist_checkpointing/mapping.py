"""Which box of which tensor of the whole model a rank holds.

Counterpart: `megatron.core.dist_checkpointing.mapping`.

A checkpoint knows no ranks, only tensors of the whole model, each a set of boxes. Whoever reads it
asks for other boxes, and `torch.distributed.checkpoint` finds the overlaps. So all that must be told
is where a rank's memory lies in the whole. Three cuts can come together:

    tensor parallelism    a slice along `partition_dim`; a slice of each of the stacked matrices
    pipeline, chunks      whole parameters, under their names in the full model
    distributed optimizer elements [start, end) of the flattened local slice: up to 2n - 1 boxes of
                          a tensor of n dimensions
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.core.dist_checkpointing.core import CheckpointingException
from minimegatron.core.tensor_parallel.sharding import full_shape, is_cut, section_sizes

StateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]
"""Nested dicts and lists, with a ShardedTensor for each tensor."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size in every dimension."""

ReplicaId = int | tuple[int, ...]
"""0, or zeros only, for the copy that is saved."""


class ShardedTensor:
    """`data` is the box at `global_offset` of the tensor `key` of the whole model.

    Args:
        key: the tensor's name in the whole model.
        data: what is saved, or the memory that is loaded into; it may be a view. A tensor on the device
            "meta" says a shape and a dtype; `load` makes the memory.
        global_shape: of the whole tensor. It may have more dimensions than `data`: these come first,
            and the box has the size 1 in them.
        global_offset: where the box begins, in elements, in each dimension of the whole tensor.
        replica_id: 0 where this copy is the one to save; others are only loaded. A tuple of numbers is
            one too: the copy to save has zeros only.
        allow_shape_mismatch: the checkpoint's tensor may be longer or shorter in its first dimension (a
            vocabulary is padded according to tp).
    """

    is_buffer = False
    """Whether a save tells where copies differ from the one that is saved."""

    def __init__(
        self,
        key: str,
        data: torch.Tensor,
        global_shape: Sequence[int],
        global_offset: Sequence[int],
        replica_id: ReplicaId = 0,
        allow_shape_mismatch: bool = False,
    ):
        self.key, self.data = key, data
        self.global_shape, self.global_offset = tuple(global_shape), tuple(global_offset)
        self.replica_id, self.allow_shape_mismatch = replica_id, allow_shape_mismatch

    def __repr__(self) -> str:
        return (
            f"ShardedTensor({self.key!r}, {self.dtype} {self.local_shape} at {self.global_offset} "
            f"of {self.global_shape}, replica_id={self.replica_id})"
        )

    def validate_metadata_integrity(self) -> None:
        """Raises CheckpointingException if the numbers of dimensions do not fit.

        It is called when tensors are saved and loaded.
        """
        dims = len(self.global_shape)
        if len(self.global_offset) != dims or self.data.dim() > dims:
            raise CheckpointingException(
                f"{self.key} has the global shape {self.global_shape}, but its part has the offset "
                f"{self.global_offset} and the shape {self.local_shape}; give an offset for each "
                f"dimension of the global shape, and a part of {dims} dimensions or fewer"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Of `data`."""
        return self.data.dtype

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of `data`."""
        return tuple(self.data.shape)

    @property
    def prepend_axis_num(self) -> int:
        """Dimensions of the whole tensor that `data` does not have."""
        return len(self.global_shape) - self.data.dim()

    @property
    def axis_fragmentations(self) -> tuple[int, ...] | None:
        """How many parts of this size make the whole, in each dimension; None if parts differ."""
        found = []
        for whole, part, offset in zip(
            self.global_shape, self.box.shape, self.global_offset, strict=True
        ):
            if not part or whole % part or offset % part:
                return None
            found.append(whole // part)
        return tuple(found)

    @property
    def box(self) -> torch.Tensor:
        """`data`, as a view with as many dimensions as the whole tensor."""
        return self.data.detach()[(None,) * self.prepend_axis_num]

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> "ShardedTensor":
        """For a tensor cut evenly: each of `rank_offsets` is (axis, index of the part, parts).

        `prepend_axis_num` dimensions of the whole tensor come before those of `data`; axes count from
        the first of them. Raises CheckpointingException for a part that there cannot be.

        >>> part = ShardedTensor.from_rank_offsets("weight", torch.zeros(2, 3), (0, 1, 4))
        >>> part.global_shape, part.global_offset
        ((8, 3), (2, 0))
        """
        shape = [*(1,) * prepend_axis_num, *data.shape]
        offset = [0] * len(shape)
        for axis, index, parts in rank_offsets:
            if not (0 <= axis < len(shape) and 0 <= index < parts):
                raise CheckpointingException(
                    f"{key}, with {len(shape)} dimensions, cannot be part {index} of {parts} along "
                    f"axis {axis}; count axes and parts from 0"
                )
            offset[axis] = index * shape[axis]
            shape[axis] *= parts
        return cls(key, data, shape, offset, replica_id, allow_shape_mismatch)


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether this copy is the one to save.

    >>> is_main_replica(0), is_main_replica((0, 0)), is_main_replica((0, 1))
    (True, True, False)
    """
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0


@dataclass
class ShardedTensorFactory:
    """A tensor that is several tensors, or several boxes, in a checkpoint.

    `build_fn(key, data, replica_id, flattened_range)` makes the nested dict or list of them, and
    `merge_fn` one tensor of what was loaded into it. `flattened_range` is None.
    """

    key: str
    data: torch.Tensor
    build_fn: Callable[[str, torch.Tensor, ReplicaId, None], Any]
    merge_fn: Callable[[Any], torch.Tensor]
    replica_id: ReplicaId = 0

    def build(self) -> Any:
        """The tensors that are saved instead."""
        return self.build_fn(self.key, self.data, self.replica_id, None)


class LocalNonpersistentObject:
    """An object that is not saved: a load gives back the one that it was asked with."""

    def __init__(self, obj: Any):
        self.obj = obj

    def unwrap(self) -> Any:
        """The object."""
        return self.obj


def make_sharded_tensors(
    key: str,
    param: torch.Tensor,
    data: torch.Tensor,
    tp_rank: int,
    tp_size: int,
    start: int = 0,
    replica_id: int = 0,
) -> list[ShardedTensor]:
    """Where `data` lies in the full model: a parameter, or something kept per element of it.

    Args:
        key: the parameter's name in the full model, with a prefix for what is kept.
        param: this rank's slice; says how it is cut, its values are not read.
        data: `numel` elements of the flattened slice from `start` on, contiguous or of its shape.
        replica_id: not 0 for a second copy within a tensor-parallel rank, such as a tied embedding's.
            Copies that tensor-parallel ranks hold alike are numbered here.
    """
    shape = tuple(param.shape)
    whole = tuple(full_shape(param, tp_size))
    cut = is_cut(param, tp_size)
    if not cut and tp_rank > 0:
        replica_id = tp_rank
    if not shape:
        return [ShardedTensor(key, data, (), (), replica_id)]
    dim, sections = 0, [shape[0]]
    if cut:
        dim = param.partition_dim
        sections = section_sizes(param, shape[dim])
    result, position = [], 0
    for offset, size in boxes_of_range(shape, start, start + data.numel()):
        count = math.prod(size)
        part = data if tuple(data.shape) == size else data.reshape(-1)[position : position + count]
        part, position = part.view(size), position + count
        for begin, end, first, section in _overlaps(sections, offset[dim], offset[dim] + size[dim]):
            global_offset = list(offset)
            if cut:
                global_offset[dim] = tp_size * first + tp_rank * section + begin - first
            result.append(
                ShardedTensor(
                    key,
                    part.narrow(dim, begin - offset[dim], end - begin),
                    whole,
                    tuple(global_offset),
                    replica_id,
                    getattr(param, "is_embedding_or_output_parameter", False),
                )
            )
    return result


def boxes_of_range(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """The elements [start, end) of a flattened tensor, as boxes of the tensor, in the same order.

    >>> list(boxes_of_range((4, 5), 3, 17))  # the end of a row, two rows, the beginning of a row
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    """
    if start >= end:
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # [first, last): the rows that are covered whole
    parts = []
    if first > last:
        parts.append((last, start - last * row, end - last * row))
    else:
        if start < first * row:
            parts.append((first - 1, start - (first - 1) * row, row))
        if first < last:
            parts.append((first, 0, (last - first) * row))
        if last * row < end:
            parts.append((last, 0, end - last * row))
    for index, begin, stop in parts:
        if begin == 0 and stop % row == 0:
            yield (index, *(0 for _ in shape[1:])), (stop // row, *shape[1:])
            continue
        for offset, size in boxes_of_range(shape[1:], begin, stop):
            yield (index, *offset), (1, *size)


def _overlaps(sections: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """[begin, end) cut at the ends of sections: each part, with its section's first and size."""
    first = 0
    for section in sections:
        start, stop = max(begin, first), min(end, first + section)
        if start < stop:
            yield start, stop, first, section
        first += section
