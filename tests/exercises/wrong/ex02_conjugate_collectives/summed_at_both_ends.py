"""What enters is summed too.

Expected: the input was summed over the 4 ranks on its way in All ranks have the same input
"""

import torch
import torch.nn.functional as F

from minimegatron.core import collectives
from minimegatron.core.transformer.mlp import MLP


class _CopyToModelParallelRegion(torch.autograd.Function):
    """Entry. Every rank has the same tensor, and now uses it for something different."""

    @staticmethod
    def forward(ctx, input_, group):
        ctx.group = group
        return input_.view_as(input_)

    @staticmethod
    def backward(ctx, grad_output):
        # A new tensor: autograd may still use the one it gave us.
        total = grad_output.contiguous().clone()
        collectives.all_reduce(total, ctx.group)
        return total, None


class _ReduceFromModelParallelRegion(torch.autograd.Function):
    """Exit. Every rank has one term of a sum, and needs the sum."""

    @staticmethod
    def forward(ctx, input_, group):
        total = input_.contiguous().clone()
        collectives.all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        # After the sum all ranks compute the same, so this gradient is whole on each of them.
        return grad_output, None


def copy_to_tensor_model_parallel_region(input_, group):
    return _CopyToModelParallelRegion.apply(input_, group)


def reduce_from_tensor_model_parallel_region(input_, group):
    return _ReduceFromModelParallelRegion.apply(input_, group)


def forward(self: MLP, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[s, b, h], the same on every rank -> ([s, b, h], the same on every rank; bias to add)."""
    fc1, fc2 = self.linear_fc1, self.linear_fc2
    entered = reduce_from_tensor_model_parallel_region(hidden_states, fc1.tp_group)
    # Column-parallel: this rank's f/t features, whole. Element-wise work needs no other rank.
    wide = self.config.activation_func(F.linear(entered, fc1.weight, fc1.bias))
    # Row-parallel: from f/t features comes one term of every output.
    term = F.linear(wide, fc2.weight)
    return reduce_from_tensor_model_parallel_region(term, fc2.tp_group), fc2.bias
