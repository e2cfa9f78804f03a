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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from minimegatron.core.tensor_parallel.sharding import full_shape, is_cut, section_sizes

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size in every dimension."""


@dataclass(eq=False)
class ShardedTensor:
    """`data` is the box at `global_offset` of the tensor `key` of the whole model.

    `data` is what is saved, or the memory that is loaded into; it may be a view.
    """

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int = 0
    """0 where this copy is the one to save; others are only loaded."""
    allow_shape_mismatch: bool = False
    """The checkpoint's tensor may be longer or shorter (a vocabulary is padded according to tp):
    what is common is loaded, the rest of `data` stays as it is."""

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> "ShardedTensor":
        """For a tensor cut evenly: each of `rank_offsets` is (axis, index of the part, parts).

        >>> part = ShardedTensor.from_rank_offsets("weight", torch.zeros(2, 3), (0, 1, 4))
        >>> part.global_shape, part.global_offset
        ((8, 3), (2, 0))
        """
        shape, offset = list(data.shape), [0] * data.dim()
        for axis, index, parts in rank_offsets:
            offset[axis] = index * shape[axis]
            shape[axis] *= parts
        return cls(key, data, tuple(shape), tuple(offset), replica_id, allow_shape_mismatch)


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
