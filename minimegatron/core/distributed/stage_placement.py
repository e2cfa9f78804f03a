"""Where a chunk's stage is, for those who have a pipeline group and a configuration, and no schedule.

Megatron has no counterpart.
"""

from typing import Any

import torch.distributed as dist

from minimegatron.core.orders import orders
from minimegatron.core.orders.placement import Placement, usual_placement


def placement_over(pp_group: dist.ProcessGroup, config: Any) -> Placement:
    """Which rank of `pp_group` holds which stage of the model, for the schedule that `config` names.

    The group counts, not the config's number of stages: a chunk may be used by itself.
    """
    sizes = (pp_group.size(), config.virtual_pipeline_model_parallel_size)
    name = config.pipeline_schedule
    return usual_placement(*sizes) if name is None else orders.get_schedule(name).placed(*sizes)


def has_first_stage(pp_group: dist.ProcessGroup, config: Any) -> bool:
    """Whether the model begins on this rank."""
    return placement_over(pp_group, config).is_first_rank(pp_group.rank())
