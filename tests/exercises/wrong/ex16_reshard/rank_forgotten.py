"""Every rank puts its piece where rank 0 puts it.

Expected: you did not use `tp_rank`. It is 1 here.
"""

import torch

from minimegatron.core.dist_checkpointing.mapping import ShardedTensor, boxes_of_range
from minimegatron.core.tensor_parallel.sharding import full_shape, is_cut


def make_sharded_tensors(
    key: str,
    param: torch.Tensor,
    data: torch.Tensor,
    tp_rank: int,
    tp_size: int,
    start: int = 0,
    replica_id: int = 0,
) -> list[ShardedTensor]:
    """Where `data` lies in the full model, as a list of boxes."""
    shape, whole = tuple(param.shape), tuple(full_shape(param, tp_size))
    cut = is_cut(param, tp_size)
    if not cut and tp_rank > 0:
        replica_id = tp_rank
    flat, position, found = data.reshape(-1), 0, []
    for offset, size in boxes_of_range(shape, start, start + data.numel()):
        numel = torch.Size(size).numel()
        part = flat[position : position + numel].view(size)
        position += numel
        if not cut:
            found.append(ShardedTensor(key, part, whole, offset, replica_id))
            continue
        dim = param.partition_dim
        block = shape[dim] // param.partition_stride
        # A box can reach over several of the stacked matrices; they lie apart in the full tensor.
        begin = offset[dim]
        while begin < offset[dim] + size[dim]:
            stacked, inside = divmod(begin, block)
            end = min((stacked + 1) * block, offset[dim] + size[dim])
            place = list(offset)
            place[dim] = (stacked * tp_size) * block + inside
            piece = part.narrow(dim, begin - offset[dim], end - begin)
            found.append(ShardedTensor(key, piece, whole, tuple(place), replica_id))
            begin = end
    return found
