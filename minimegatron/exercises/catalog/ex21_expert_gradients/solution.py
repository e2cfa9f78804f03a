"""Gradients of experts, solved.

The group says which ranks still have something to add. The divisor says of how many losses the mean is
taken, and that is one number for the whole model: for an expert, some of the sum was made on the way,
when tokens of other ranks came to it.
"""

import math
from collections.abc import Sequence

import torch

from minimegatron.core.collectives import all_reduce
from minimegatron.core.process_groups_config import ProcessGroupCollection


def set_allreduce(
    param: torch.nn.Parameter, is_expert: bool, tp_size: int, ep_size: int, expert_tp_size: int
) -> None:
    """Sets `param.allreduce`: False if the parameter needs the right column of groups, else True."""
    has_own_groups = ep_size > 1 or expert_tp_size != tp_size
    param.allreduce = not (is_expert and has_own_groups)


def sum_over_tensor_ranks(
    params: Sequence[torch.nn.Parameter], groups: ProcessGroupCollection
) -> None:
    """First: completes the gradients that are one term of a sum on each tensor-parallel rank."""
    for param in params:
        if param.allreduce and not param.tensor_model_parallel:
            all_reduce(param.main_grad, groups.tp)


def reduce_gradients(params: Sequence[torch.nn.Parameter], groups: ProcessGroupCollection) -> None:
    """Then: makes every gradient that of the mean of all losses."""
    num_losses = groups.dp_cp.size()
    for param in params:
        group = groups.dp_cp if param.allreduce else groups.expt_dp
        all_reduce(param.main_grad, group)
        param.main_grad /= num_losses


def get_grad_norm(params: Sequence[torch.nn.Parameter], groups: ProcessGroupCollection) -> float:
    """The 2-norm of the whole model's gradient, each element once; the same number on every rank."""
    dense, experts = torch.zeros(2, dtype=torch.float64)
    for param in params:
        tensor_group = groups.tp if param.allreduce else groups.expt_tp
        is_mine = param.tensor_model_parallel or tensor_group.rank() == 0
        square = param.main_grad.double().square().sum() * is_mine
        if param.allreduce:
            dense = dense + square
        else:
            experts = experts + square
    # A rank without experts has a zero to add, and the others wait for it.
    all_reduce(dense, groups.mp)
    all_reduce(experts, groups.tp_ep_pp)
    return math.sqrt(dense.item() + experts.item())


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
