"""A row of the table gives one value.

Expected: (row (mean, report), c = 1: mean / M) returned one Tensor; two values are expected
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from minimegatron.core.collectives import all_reduce, broadcast
from minimegatron.core.model_parallel_config import ModelParallelConfig


def forward_step_calc_loss(
    model: torch.nn.Module,
    output_tensor: torch.Tensor,
    loss_func: Callable,
    config: ModelParallelConfig,
    vp_stage: int | None,
    collect_non_loss_data: bool,
    num_microbatches: int,
    forward_data_store: list,
    cp_group_size: int | None = None,
    is_last_stage: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """On the last stage, makes the loss of one microbatch out of its output, scaled for backward."""
    num_tokens = torch.tensor(0, dtype=torch.int)
    if not is_last_stage:
        return output_tensor, num_tokens
    if collect_non_loss_data:
        forward_data_store.append(loss_func(output_tensor, non_loss_data=True))
        return output_tensor, num_tokens
    outputs = loss_func(output_tensor)
    forward_data_store.append(outputs[-1])
    loss = outputs[0]
    if len(outputs) == 3:
        num_tokens = outputs[1]
        if not config.calculate_per_token_loss:
            # New tensors, not `/=`: the report may look into the memory of the loss.
            loss = loss / torch.clamp(num_tokens, min=1) / num_microbatches
    else:
        # The mean is over all c ranks' tokens; gradients are averaged over those ranks later.
        return loss * (cp_group_size or 1) / num_microbatches
    return loss, num_tokens


def _divide_by_num_tokens(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor,
    pp_group: dist.ProcessGroup,
    dp_cp_group: dist.ProcessGroup,
) -> None:
    """With `calculate_per_token_loss`: divides gradients by the tokens of the whole global batch."""
    total = num_tokens.clone()
    broadcast(total, pp_group.size() - 1, pp_group)
    all_reduce(total, dp_cp_group)
    for chunk in model:
        chunk.scale_gradients(1.0 / max(total.item(), 1))
