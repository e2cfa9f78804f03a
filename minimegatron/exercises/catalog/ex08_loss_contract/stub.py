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

from minimegatron.core.collectives import all_reduce, broadcast  # noqa: F401
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
    """On the last stage, makes the loss of one microbatch out of its output, scaled for backward.

    With M = num_microbatches, c = cp_group_size (None: 1) and n tokens:

    | `loss_func(output_tensor)` returns | `calculate_per_token_loss` | loss for backward      |
    |------------------------------------|----------------------------|------------------------|
    | (sum, n, report)                   | off                        | sum / n / M            |
    | (sum, n, report)                   | on                         | sum                    |
    | (mean, report)                     | off or on                  | mean * c / M           |

    n is an int tensor, and 0 for a microbatch whose tokens are all masked: its loss is 0. The report
    goes into `forward_data_store`, as it is, of a masked microbatch too: it may share memory with the
    loss. Call `loss_func` once.

    With `collect_non_loss_data`, what `loss_func(output_tensor, non_loss_data=True)` returns goes
    into `forward_data_store`, and the output stays as it is. On other stages (`is_last_stage` is False
    or None) nothing happens at all.

    Returns two values: the loss, or the output where there is no loss; and n, or an int tensor 0 where
    the loss function gave no n.
    """
    raise NotImplementedError("Write forward_step_calc_loss: the table, row by row")


def _divide_by_num_tokens(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor,
    pp_group: dist.ProcessGroup,
    dp_cp_group: dist.ProcessGroup,
) -> None:
    """With `calculate_per_token_loss`: divides gradients by the tokens of the whole global batch.

    `num_tokens` is an int tensor with the tokens of this replica's step on the last stage, and 0 on
    the others. Leave it as it is; if there are no tokens at all, divide by 1.
    """
    raise NotImplementedError("Write _divide_by_num_tokens: who knows the number, and whose is it?")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
