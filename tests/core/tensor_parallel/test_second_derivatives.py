"""A gradient of a gradient is refused: autograd would take for constant what a backward computes."""

import importlib
import pkgutil
from functools import partial

import pytest
import torch

import minimegatron.core
from minimegatron.core.tensor_parallel import random as tensor_parallel_random
from minimegatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from minimegatron.core.tensor_parallel.layers import (
    LinearWithGradAccumulationAndAsyncCommunication,
    linear_with_grad_accumulation_and_async_allreduce,
)
from minimegatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from minimegatron.core.transformer.mtp_loss import MTPLossAutoScaler
from tests.groups import PretendGroup


def own_functions() -> set[type]:
    """Every class of the package whose backward autograd calls."""
    for module in pkgutil.walk_packages(minimegatron.core.__path__, "minimegatron.core."):
        importlib.import_module(module.name)
    found, waiting = set(), [torch.autograd.Function]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if kind.__module__.startswith("minimegatron.core.") and "backward" in vars(kind):
                found.add(kind)
    return found


def test_s7_every_backward_refuses_to_be_differentiated():
    functions = own_functions()
    assert len(functions) >= 14
    for kind in functions:
        # What refuses wraps it: without_graph, or once_differentiable.
        assert hasattr(kind.backward, "__wrapped__"), kind


def twice(function, *inputs: torch.Tensor) -> None:
    """Backward, then backward of the gradients, as a gradient penalty does."""
    first = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
    sum(grad.square().sum() for grad in first).backward()


def test_s7_second_derivatives_are_refused():
    """Was: numbers, without a word."""
    group = PretendGroup(0, 1)
    x, weight = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="create_graph=True, but"):
        twice(lambda x: vocab_parallel_cross_entropy(x, torch.tensor([1, 2]), 0.1, group), x)
    options = (None, False, False, None, group)
    linear = LinearWithGradAccumulationAndAsyncCommunication.apply
    with pytest.raises(RuntimeError, match="create_graph=True, but"):
        twice(lambda x, weight: linear(x, weight, *options), x, weight)
    # Where nothing is exchanged the product is torch's own.
    twice(partial(product_of_one_rank, group), x, weight)


def product_of_one_rank(group, x, weight):
    return linear_with_grad_accumulation_and_async_allreduce(
        x, weight, None, allreduce_dgrad=False, sequence_parallel=False, tp_group=group
    )


def test_s7_recompute_refuses_a_graph_of_its_backward():
    """Was: weights within got gradients without a graph, so that a penalty on them had none either."""
    layer = torch.nn.Linear(3, 3)
    output = tensor_parallel_random.checkpoint(layer, False, torch.randn(2, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match="create_graph"):
        output.square().sum().backward(create_graph=True)

    def nested(x):
        return tensor_parallel_random.checkpoint(layer, False, x)

    # An ordinary backward asks for none, also inside another recomputation.
    output = tensor_parallel_random.checkpoint(nested, False, torch.randn(2, 3, requires_grad=True))
    output.sum().backward()
    assert layer.weight.grad is not None


def test_s7_a_penalty_beside_the_loss_is_refused():
    """A loss's own gradient has no graph: once_differentiable lets it pass, the penalty has none."""
    x, group = torch.randn(2, 3, requires_grad=True), PretendGroup(0, 1)
    loss = vocab_parallel_cross_entropy(x, torch.tensor([1, 2]), 0.0, group).sum()
    with pytest.raises(RuntimeError, match="VocabParallelCrossEntropy.backward cannot"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("kind", [MoEAuxLossAutoScaler, MTPLossAutoScaler])
def test_s7_a_loss_on_an_activation_is_refused_too(kind):
    """Was: the second backward came through once more, and added the loss's own gradient to it."""
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        twice(lambda x: kind.apply(x.sin(), x.pow(3).sum()), x)
