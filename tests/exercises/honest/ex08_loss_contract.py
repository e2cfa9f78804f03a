"""The loss contract: what a loss function may return, and what the schedule makes of it.

The first function is called once per microbatch and stage, the second once per step, on every rank,
after gradients were reduced over the data-parallel ranks. That reduction divides by their number, d,
unless `calculate_per_token_loss` is on: then it is a plain sum.

    broadcast(tensor, group_src, group)    in place; group_src is a rank within the group
    all_reduce(tensor, group)              sum, in place
    chunk.scale_gradients(factor)          multiplies all gradients of a chunk

Auxiliary losses (experts' balance, multi-token prediction) are left out here.
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
    """One microbatch's loss, scaled so that adding up backwards gives the step's gradient."""
    none_here = torch.zeros((), dtype=torch.int, device=output_tensor.device)
    if not is_last_stage:
        return output_tensor, none_here
    if collect_non_loss_data:
        forward_data_store.append(loss_func(output_tensor, non_loss_data=True))
        return output_tensor, none_here

    answer = loss_func(output_tensor)
    if len(answer) == 2:
        mean, report = answer
        forward_data_store.append(report)
        cp = 1 if cp_group_size is None else cp_group_size
        return mean * cp / num_microbatches, none_here

    total, tokens, report = answer
    forward_data_store.append(report)
    if config.calculate_per_token_loss:
        return total, tokens
    return total / torch.clamp(tokens, min=1) / num_microbatches, tokens


def _divide_by_num_tokens(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor,
    pp_group: dist.ProcessGroup,
    dp_cp_group: dist.ProcessGroup,
) -> None:
    """The last stage knows its replica's tokens; the step's number is the sum over replicas."""
    count = num_tokens.clone()
    broadcast(count, group_src=pp_group.size() - 1, group=pp_group)
    all_reduce(count, dp_cp_group)
    everybody = max(int(count.item()), 1)
    for chunk in model:
        chunk.scale_gradients(1.0 / everybody)


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
