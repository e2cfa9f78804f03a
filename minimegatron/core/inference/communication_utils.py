"""What the last stage of a pipeline has computed, on all its stages.

Counterpart: `megatron.core.inference.communication_utils`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from minimegatron.core import collectives, parallel_state
from minimegatron.core.utils import get_device


def broadcast_from_last_pipeline_stage(
    size: Sequence[int],
    dtype: torch.dtype,
    tensor: torch.Tensor | None = None,
    pp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The last stage's `tensor` on every stage. Every rank of the pipeline must call it.

    Logits, losses and what is drawn from them exist on the last stage alone; a first stage that is to
    read the next token needs it too.

    Args:
        size: the tensor's shape, which all stages know.
        dtype: its dtype, the same on all stages.
        tensor: on the last stage the tensor, which comes back as it is; elsewhere it is not read.
        pp_group: None for `parallel_state`'s, where the schedule's placement says which rank has the
            last stage; of a group that is given, it is the last rank.

    Raises ValueError on the last stage for a tensor of another size or dtype, before it sends anything.
    """
    last_rank = parallel_state.get_pipeline_placement().last_rank if pp_group is None else None
    group = parallel_state.get_pipeline_model_parallel_group() if pp_group is None else pp_group
    last_rank = group.size() - 1 if last_rank is None else last_rank
    if group.rank() != last_rank:
        tensor = torch.empty(tuple(size), dtype=dtype, device=get_device())
    elif tensor is None or tuple(tensor.shape) != tuple(size) or tensor.dtype != dtype:
        has = "None" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
        raise ValueError(
            f"the last stage has {has}, and the stages expect {list(size)} of {dtype}; give the same "
            "size and dtype on every stage"
        )
    tensor = tensor.contiguous()
    collectives.broadcast(tensor, last_rank, group)
    return tensor
