"""Gradients of experts: which ranks to sum over, what to divide by, and one norm for everything."""

import torch

from minimegatron.core.collectives import all_reduce


def set_allreduce(param, is_expert, tp_size, ep_size, expert_tp_size):
    are_columns_equal = ep_size == 1 and expert_tp_size == tp_size
    param.allreduce = are_columns_equal or not is_expert


def sum_over_tensor_ranks(params, groups):
    partial = [p for p in params if p.allreduce and not p.tensor_model_parallel]
    if not partial:
        return
    # one message for all of them
    flat = torch.cat([p.main_grad.reshape(-1) for p in partial])
    all_reduce(flat, groups.tp)
    begin = 0
    for p in partial:
        end = begin + p.main_grad.numel()
        p.main_grad.copy_(flat[begin:end].view_as(p.main_grad))
        begin = end


def reduce_gradients(params, groups):
    losses = groups.dp_cp.size()
    for wants_dense, group in ((False, groups.expt_dp), (True, groups.dp_cp)):
        for p in params:
            if p.allreduce == wants_dense:
                scaled = p.main_grad / losses
                all_reduce(scaled, group)
                p.main_grad = scaled


def get_grad_norm(params, groups):
    total = 0.0
    for wants_dense, over, shared in (
        (True, groups.mp, groups.tp),
        (False, groups.tp_ep_pp, groups.expt_tp),
    ):
        square = torch.zeros(1, dtype=torch.float64)
        for p in params:
            if p.allreduce != wants_dense:
                continue
            # what a tensor group holds whole: each of them a part of its square
            part = 1 if p.tensor_model_parallel else shared.size()
            square += p.main_grad.norm() ** 2 / part
        all_reduce(square, over)
        total += float(square)
    return total**0.5


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
