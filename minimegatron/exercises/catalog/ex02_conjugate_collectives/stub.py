"""Conjugate collectives: what a tensor-parallel region does on entry and exit, and backward.

Write the two autograd functions, then the MLP between them. The check tries them alone, and then puts
`forward` in place of `MLP.forward` and trains a small GPT with it.

    collectives.all_reduce(tensor, group)    sums `tensor` over the group, in place; `tensor` must be
                                             contiguous (`.contiguous()` copies one that is not)
    group.size(), group.rank()               the tensor-parallel group is not always the whole job
"""

import torch
import torch.nn.functional as F  # noqa: F401

from minimegatron.core import collectives  # noqa: F401
from minimegatron.core.transformer.mlp import MLP


class _CopyToModelParallelRegion(torch.autograd.Function):
    """Entry. Every rank has the same tensor, and now uses it for something different."""

    @staticmethod
    def forward(ctx, input_, group):
        raise NotImplementedError("Write copy's forward: the input as it is; keep the group in ctx")

    @staticmethod
    def backward(ctx, grad_output):
        """Returns one gradient per argument of forward: the input's, and None for the group."""
        raise NotImplementedError("Write copy's backward: what is the gradient of all the uses?")


class _ReduceFromModelParallelRegion(torch.autograd.Function):
    """Exit. Every rank has one term of a sum, and needs the sum."""

    @staticmethod
    def forward(ctx, input_, group):
        raise NotImplementedError("Write reduce's forward: the sum, without changing the input")

    @staticmethod
    def backward(ctx, grad_output):
        raise NotImplementedError("Write reduce's backward: how does the sum depend on one term?")


def copy_to_tensor_model_parallel_region(input_, group):
    return _CopyToModelParallelRegion.apply(input_, group)


def reduce_from_tensor_model_parallel_region(input_, group):
    return _ReduceFromModelParallelRegion.apply(input_, group)


def forward(self: MLP, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[s, b, h], the same on every rank -> ([s, b, h], the same on every rank; bias to add).

    This rank's weights, with f the width inside and t ranks (`self.linear_fc1.tp_group`):

        self.linear_fc1.weight [f/t, h]    self.linear_fc1.bias [f/t]
        self.linear_fc2.weight [h, f/t]    self.linear_fc2.bias [h], the same on every rank

    `self.config.activation_func` is the activation; it is not gated here. Both biases are always
    there. The second one is returned, not added: the layer adds it together with the residual.
    """
    raise NotImplementedError("Write forward: copy, first product, activation, second one, reduce")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
