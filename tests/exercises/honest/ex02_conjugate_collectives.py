"""Conjugate collectives: what a tensor-parallel region does on entry and exit, and backward.

Write the two autograd functions, then the MLP between them. The check tries them alone, and then puts
`forward` in place of `MLP.forward` and trains a small GPT with it.

    collectives.all_reduce(tensor, group)    sums `tensor` over the group, in place
    group.size(), group.rank()               the tensor-parallel group is not always the whole job
"""

import torch
import torch.nn.functional as F

from minimegatron.core import collectives
from minimegatron.core.transformer.mlp import MLP


class _CopyToModelParallelRegion(torch.autograd.Function):
    """Entry: identity forward, sum backward."""

    @staticmethod
    def forward(ctx, input_, group):
        ctx.group = group
        return input_.view_as(input_)

    @staticmethod
    def backward(ctx, grad_output):
        summed = grad_output.contiguous().clone()
        collectives.all_reduce(summed, ctx.group)
        return summed, None


class _ReduceFromModelParallelRegion(torch.autograd.Function):
    """Exit: sum forward, identity backward."""

    @staticmethod
    def forward(ctx, input_, group):
        total = input_.contiguous().clone()
        collectives.all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


def copy_to_tensor_model_parallel_region(input_, group):
    return _CopyToModelParallelRegion.apply(input_, group)


def reduce_from_tensor_model_parallel_region(input_, group):
    return _ReduceFromModelParallelRegion.apply(input_, group)


def forward(self: MLP, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    up, down = self.linear_fc1, self.linear_fc2
    x = copy_to_tensor_model_parallel_region(hidden_states, up.tp_group)
    inner = self.config.activation_func(F.linear(x, up.weight, up.bias))
    partial = F.linear(inner, down.weight)
    return reduce_from_tensor_model_parallel_region(partial, down.tp_group), down.bias


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
