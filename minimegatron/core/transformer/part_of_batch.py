"""A context-parallel rank's part of a batch.

Counterpart: `megatron.core.utils.get_batch_on_this_cp_rank`, which can be imported from there too.
"""

import torch
import torch.distributed as dist

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer import zigzag


def get_batch_on_this_cp_rank(
    batch: dict[str, torch.Tensor | None], cp_group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor | None]:
    """This rank's part of each sequence: `zigzag.take_part` of every field, [b, s] -> [b, s/c].

    `attention_mask` [b, 1, s, s] keeps all its columns, [b, 1, s/c, s]; one row for all tokens,
    [b, 1, 1, s], stays. What is None stays None.
    `cp_group` None means `parallel_state`'s. Raises ValueError where 2c does not divide s, and for a
    mask of other dimensions.
    """
    if cp_group is None:
        cp_group = ProcessGroupCollection.use_mpu_process_groups(["cp"]).cp
    return batch if cp_group.size() == 1 else zigzag.part_of_fields(batch, cp_group)
