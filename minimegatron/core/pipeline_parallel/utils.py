"""Where a stage and a chunk are, for schedules that are told groups; and what Megatron has beside it.

Counterpart: `megatron.core.pipeline_parallel.utils`.
"""

import torch.distributed as dist

from minimegatron.core.pipeline_parallel.failed_step import schedule
from minimegatron.core.pipeline_parallel.hooked_frame import clear_embedding_activation_buffer
from minimegatron.core.pipeline_parallel.p2p_communication import get_tensor_shapes
from minimegatron.core.pipeline_parallel.schedule_node import (
    AbstractSchedulePlan,
    NoopScheduleNode,
    ScheduleNode,
)
from minimegatron.core.pipeline_parallel.step_frame import GradSync, finish_step, of_chunk
from minimegatron.core.tensor_parallel.weight_grad_store import finish_embedding_wgrad_compute
from minimegatron.core.utils import unwrap_model

__all__ = [
    "AbstractSchedulePlan",
    "GradSync",
    "NoopScheduleNode",
    "ScheduleNode",
    "clear_embedding_activation_buffer",
    "finish_embedding_wgrad_compute",
    "finish_step",
    "get_tensor_shapes",
    "is_pp_first_stage",
    "is_pp_last_stage",
    "is_vp_first_stage",
    "is_vp_last_stage",
    "of_chunk",
    "schedule",
    "unwrap_model",
]


def is_pp_first_stage(pp_group: dist.ProcessGroup) -> bool:
    """True on the stage that reads the data."""
    return pp_group.rank() == 0


def is_pp_last_stage(pp_group: dist.ProcessGroup) -> bool:
    """True on the stage that computes the loss."""
    return pp_group.rank() == pp_group.size() - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """True for a stage's first chunk, and for the only one."""
    return vp_size is None or vp_size == 1 or vp_stage == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """True for a stage's last chunk, and for the only one."""
    return vp_size is None or vp_size == 1 or vp_stage == vp_size - 1
