"""Re-sharding a checkpoint: where does this rank's memory lie in the full model?

Started by: you, and `minimegatron exercises check`. A checkpoint knows no ranks, only tensors of the
full model, each put together from boxes. Whoever loads asks for other boxes, and the overlaps are
found for it. So one function decides whether a model that was trained on tp=2 can go on at tp=1: the
one that says which boxes a rank holds. Write it. The check saves a small GPT with its optimizer at
one layout, loads it at another, and trains on.

Useful here:

    is_cut(param, tp_size)          True if tensor-parallel ranks hold different pieces of param
    param.partition_dim             the dimension along which it is cut
    param.partition_stride          how many matrices lie stacked along that dimension, each cut by
                                    itself: with 2 (SwiGLU), the full tensor is [gate; up], and rank r
                                    holds [its piece of gate; its piece of up]
    full_shape(param, tp_size)      the shape in the full model
    boxes_of_range(shape, a, b)     the elements [a, b) of a flattened tensor of that shape, as boxes
                                    (offset, size) of the tensor, in the same order:
                                    (4, 5), 3, 17 gives ((0,3),(1,2)), ((1,0),(2,5)), ((3,0),(1,2))
    ShardedTensor(key, data, global_shape, global_offset, replica_id)
"""

import torch

from minimegatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    boxes_of_range,  # noqa: F401
)
from minimegatron.core.tensor_parallel.sharding import full_shape, is_cut  # noqa: F401


def make_sharded_tensors(
    key: str,
    param: torch.Tensor,
    data: torch.Tensor,
    tp_rank: int,
    tp_size: int,
    start: int = 0,
    replica_id: int = 0,
) -> list[ShardedTensor]:
    """Where `data` lies in the full model, as a list of boxes.

    Args:
        key: the tensor's name in the full model; every box gets it.
        param: this rank's piece of a parameter, with 1 dimension or more; says how it is cut. Its
            values do not matter.
        data: elements `start` to `start + data.numel()` of the flattened piece: the parameter itself,
            or something that an optimizer keeps per element of it, which with ZeRO-1 is a range.
            Either of the piece's shape, or flat.
        tp_rank, tp_size: this rank among those that hold pieces.
        replica_id: 0 where these boxes are the ones to save; passed on. But of a tensor that every
            tensor-parallel rank holds whole only tp_rank 0 may save: the others use `tp_rank`.

    Each box's `data` is a view into `data`, of the box's size: loading writes into it. No more boxes
    than `boxes_of_range` gives, times the stride.
    """
    raise NotImplementedError(
        "Write make_sharded_tensors: cut the range into boxes of the piece, then move each box to its "
        "place in the full tensor"
    )


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
