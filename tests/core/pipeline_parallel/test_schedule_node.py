"""Nodes of a schedule: their gradients, their memory, what waits for what."""

import gc
import inspect
import weakref

import pytest
import torch

from minimegatron.core.pipeline_parallel import utils
from minimegatron.core.pipeline_parallel.schedule_node import (
    AbstractSchedulePlan,
    CommunicationNode,
    NoopScheduleNode,
    ScheduleNode,
)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def is_freed(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().size() == 0


def test_two_nodes_give_the_gradient_of_one_graph():
    x, w = leaf(3, 2), leaf(2, 2)

    def first(x):
        return x @ w, (x * w.sum()).sin()

    def second(y, z):
        return (y * z).exp()

    second(*first(x)).sum().backward()
    expected = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    one, two = ScheduleNode(first), ScheduleNode(second)
    output = two.forward(one.forward(x))
    assert one.get_output()[0].grad_fn is not None
    grads = two.backward(torch.ones_like(output))
    assert isinstance(grads, tuple) and x.grad is None  # the nodes share no graph
    assert torch.equal(one.backward(grads), expected[0]) and torch.equal(w.grad, expected[1])


def test_an_input_that_needs_no_gradient_gets_none():
    x = leaf(2)
    node = ScheduleNode(lambda x, y, z: x * y)
    node.forward((x, torch.ones(2, dtype=torch.float64), None))
    grads = node.backward(torch.ones(2, dtype=torch.float64))
    assert torch.equal(grads[0], torch.ones(2)) and grads[1:] == (None, None)


def test_what_skips_a_node_brings_its_gradient_back():
    x = leaf(3)
    kept = []
    first = ScheduleNode(lambda x: x * 2)

    def forward(x):
        kept.append(first.detach(x * 5))
        return x * 2

    first.forward_func = forward
    middle, last = ScheduleNode(torch.sin), ScheduleNode(lambda y: y + kept[0])
    output = last.forward(middle.forward(first.forward(x)))
    grad = last.backward(torch.ones_like(output))
    grad = first.backward(middle.backward(grad))
    assert torch.allclose(grad, 5 + 2 * torch.cos(2 * x))


def test_a_backward_of_ones_own():
    seen = []
    node = ScheduleNode(lambda x: x * 2, lambda outputs, grads: seen.append((outputs, grads)))
    output = node.forward(leaf(2))
    node.backward(torch.ones(2))
    ((outputs, grads),) = seen
    assert outputs[0] is output and torch.equal(grads[0], torch.ones(2))


def test_nothing_is_held_after_the_backward():
    node = ScheduleNode(lambda x: (x * x).exp())
    output = node.forward(leaf(4))
    held = [weakref.ref(node.inputs[0]), weakref.ref(output)]
    gc.disable()  # a cycle would outlive the step until somebody collects it
    try:
        node.backward(torch.ones(4, dtype=torch.float64))
        del output
        assert [ref() for ref in held] == [None, None]
        held = [weakref.ref(node)]
        del node
        assert held[0]() is None
    finally:
        gc.enable()


def test_an_input_that_nobody_saved_is_freed():
    x = leaf(4) * 1.0
    node = ScheduleNode(lambda x: x.view(2, 2) + 1, free_input=True)
    node.forward(x)
    assert is_freed(x)
    assert torch.equal(node.backward(torch.ones(2, 2, dtype=torch.float64)), torch.ones(4))


def test_an_output_freed_after_sending_has_a_backward():
    node = ScheduleNode(lambda x: x * 3)
    output = node.forward(leaf(4))
    output.data = torch.empty(1, dtype=torch.float64)  # as `deallocate_output_tensor`
    assert torch.equal(node.backward(torch.ones(4, dtype=torch.float64)), torch.full((4,), 3.0))


def test_a_backward_beside_an_autocast_forward_is_not_autocast():
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.is_autocast_enabled("cpu"))
            return grad * 2

    node = ScheduleNode(Product.apply)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        node.forward(leaf(2))
        node.backward(torch.ones(2, dtype=torch.float64))
    assert seen == [False]


class Handle:
    def __init__(self, log, name, output, tensor):
        self.log, self.name, self.output, self.tensor = log, name, output, tensor

    def wait(self):
        self.log.append(("wait", self.name))
        self.output.copy_(self.tensor * 10 if self.name == "there" else self.tensor)


class Exchange:
    """Moves nothing: what comes is known after the wait."""

    def __init__(self, log, name="there"):
        self.log, self.name = log, name

    def start(self, tensor):
        self.log.append(("start", self.name))
        output = torch.full_like(tensor, float("nan")).detach()
        return output, Handle(self.log, self.name, output, tensor.detach())

    def reversed(self):
        return Exchange(self.log, f"back from {self.name}")


def test_a_communication_is_a_start_and_a_wait():
    log = []
    state = [Exchange(log)]
    node = CommunicationNode(lambda: state[0], free_input=True)
    x, y = leaf(2) * 1.0, torch.ones(2, dtype=torch.float64)
    flight, ones = node.start_forward((x, y)), y.clone()
    assert log == [("start", "there")] * 2 and not is_freed(x)
    values = x.detach().clone()
    received = flight.wait()
    assert log[2:] == [("wait", "there")] * 2 and is_freed(x) and is_freed(y)
    assert torch.equal(received[0], values * 10)
    assert received[0].is_leaf and received[0].requires_grad and not received[1].requires_grad
    assert flight.wait() is None  # it hands them over, and keeps none
    log.clear()
    state[0] = Exchange(log, "of another forward")
    flight = node.start_backward((ones + 1, ones + 2))
    # Of the second nobody wants a gradient, on any rank.
    assert log == [("start", "back from there")]
    grads = flight.wait()
    assert grads[0].tolist() == [2.0, 2.0] and grads[1] is None
    assert log[1:] == [("wait", "back from there")] and node.exchange is None


def test_a_gradient_that_is_wanted_is_sent_though_it_is_zero():
    log = []
    node = CommunicationNode(lambda: Exchange(log))
    node.forward((leaf(2) * 1.0, leaf(2) * 1.0))
    grads = node.backward((None, torch.ones(2, dtype=torch.float64)))
    assert [grad.tolist() for grad in grads] == [[0.0, 0.0], [1.0, 1.0]]
    assert [event for event, _ in log[4:]] == ["start", "start", "wait", "wait"]


def test_start_and_wait_in_one():
    log = []
    node = CommunicationNode(lambda: Exchange(log))
    received = node.forward(torch.ones(2, requires_grad=True))
    assert torch.equal(received.detach(), torch.full((2,), 10.0))
    assert torch.equal(node.backward(torch.ones(2)), torch.ones(2))
    assert [event for event, _ in log] == ["start", "wait"] * 2


def test_a_node_that_a_layer_lacks_hands_on():
    node, x = NoopScheduleNode(), leaf(1)
    assert node.forward(x) is x and node.backward(x) is x
    assert node.start_forward(x).wait() is x and node.start_backward(x).wait() is x
    node.backward_dw()


def test_names_stand_where_megatron_has_them():
    for name in ("ScheduleNode", "NoopScheduleNode", "AbstractSchedulePlan"):
        assert getattr(utils, name) is globals()[name]
    names = list(inspect.signature(AbstractSchedulePlan.run).parameters)
    assert names[3:] == ["pre_forward", "pre_backward", "post_forward", "post_backward"]
    with pytest.raises(TypeError):
        AbstractSchedulePlan()
