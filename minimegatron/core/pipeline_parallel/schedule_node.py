"""Pieces of a microbatch's forward and backward that a schedule may order one by one.

Counterpart: the classes of the same names in `megatron.core.pipeline_parallel.utils`, from where they
can be imported here too.

A forward that is cut into nodes builds one autograd graph per node. A node takes detached inputs, and
its backward runs its own graph and hands on the gradients of the inputs.

Megatron gives each node a stream and an event, so that communication runs beside computation. Here a
communication is a start and a wait, on any device: NCCL has a stream of its own, and its `wait` orders
streams. So there are no stream arguments, and no `set_streams`.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from minimegatron.core.pipeline_parallel.steps import run_backward
from minimegatron.core.utils import get_device


def as_tuple(one_or_more: Any) -> tuple:
    """What a node takes or gives: one tensor stands for a tuple of one."""
    return one_or_more if isinstance(one_or_more, tuple) else (one_or_more,)


def detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The same numbers, as a leaf: gradients stop there, and stay there."""
    return None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)


def free(tensors: tuple) -> None:
    """Gives back the memory of tensors; their place in the graph is still needed, and stays."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def _outside_autocast() -> contextlib.AbstractContextManager:
    """Around a backward: a forward beside it may be within autocast, which is for forwards."""
    device = get_device().type
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


class ScheduleNode:
    """A piece that computes.

    Args:
        forward_func: from tensors to a tensor, or to a tuple of them; None where `forward_impl` is
            overridden.
        backward_func: `(outputs, gradients) -> None`, both tuples; leaves gradients in `inputs`. None:
            autograd.
        free_input: give back the inputs' memory after the forward; only if nothing saved them.
        name: for those who watch.
    """

    def __init__(
        self,
        forward_func: Callable | None = None,
        backward_func: Callable | None = None,
        free_input: bool = False,
        name: str = "schedule_node",
    ):
        self.forward_func, self.backward_func = forward_func, backward_func
        self.free_input, self.name = free_input, name
        self.inputs: tuple = ()
        self.output: Any = None
        self.before_detached: tuple = ()
        self.detached: tuple = ()

    def forward(self, inputs: Any = ()) -> Any:
        """Runs the piece on one input, or on a tuple of them. What it returns has a graph."""
        inputs = as_tuple(inputs)
        self.inputs = tuple(map(detached, inputs))
        self.output = self.forward_impl(*self.inputs)
        if self.free_input:
            free(inputs)
        return self.output

    def forward_impl(self, *inputs: Any) -> Any:
        """The piece itself."""
        return self.forward_func(*inputs)

    def detach(self, tensor: torch.Tensor) -> torch.Tensor:
        """In a forward: `tensor` as a leaf, for a node that is not the next one.

        Its gradient joins those of the outputs in this node's backward.
        """
        self.before_detached += (tensor,)
        self.detached += (detached(tensor),)
        return self.detached[-1]

    def backward(self, output_grad: Any) -> Any:
        """From the outputs' gradients to those of the inputs; afterwards the node holds no tensor."""
        self.backward_impl(as_tuple(self.output), as_tuple(output_grad))
        grads = self.get_grad()
        self._release_state()
        return grads

    def backward_impl(self, outputs: tuple, output_grad: tuple) -> None:
        """Leaves gradients in the inputs."""
        if self.backward_func is not None:
            self.backward_func(outputs, output_grad)
            return
        outputs += self.before_detached
        output_grad += tuple(leaf.grad for leaf in self.detached)
        pairs = zip(outputs, output_grad, strict=True)
        pairs = [(out, grad) for out, grad in pairs if grad is not None and out.requires_grad]
        if pairs:
            with _outside_autocast():
                run_backward(*zip(*pairs, strict=True))

    def get_output(self) -> Any:
        """What the forward returned."""
        return self.output

    def get_grad(self) -> Any:
        """The inputs' gradients; one for one input, else a tuple."""
        grads = tuple(None if tensor is None else tensor.grad for tensor in self.inputs)
        return grads[0] if len(grads) == 1 else grads

    def _release_state(self) -> None:
        self.inputs = self.before_detached = self.detached = ()
        self.output = None
        self.forward_func = self.backward_func = None


class NoopScheduleNode:
    """Stands for a piece that a layer lacks: what comes goes on, in either direction."""

    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, outgrads: Any) -> Any:
        return outgrads

    def start_forward(self, inputs: Any) -> "TensorsInFlight":
        return TensorsInFlight(inputs)

    def start_backward(self, outgrads: Any) -> "TensorsInFlight":
        return TensorsInFlight(outgrads)

    def backward_dw(self) -> None:
        """It has no weights."""


class TensorsInFlight:
    """What a communication will have brought, once it was waited for.

    Args:
        tensors: one, or a tuple of them.
        handles: to wait for.
        sent: kept until then; with `frees_sent` their memory is given back. What comes for one that
            requires a gradient does so too.
    """

    def __init__(
        self, tensors: Any, handles: tuple = (), sent: tuple = (), frees_sent: bool = False
    ):
        self._tensors, self._handles = tensors, handles
        self._sent, self._frees_sent = sent, frees_sent

    def wait(self) -> Any:
        """The tensors, to be read now. Once: they are not kept here."""
        for handle in self._handles:
            handle.wait()
        tensors = self._tensors
        for tensor, source in zip(as_tuple(tensors), self._sent, strict=False):
            if tensor is not None:
                tensor.requires_grad_(source is not None and source.requires_grad)
        if self._frees_sent:
            free(self._sent)
        self._tensors, self._handles, self._sent = None, (), ()
        return tensors


class CommunicationNode:
    """A piece that sends rows of tensors over a group: a start and a wait, without autograd.

    Megatron has no such class: there a `ScheduleNode` on the communication stream does it, through
    autograd. Here the backward is the exchange with its splits swapped.

    Args:
        get_exchange: returns what knows the splits of this forward: `start(tensor) -> (tensor, handle)`
            and `reversed()`. Asked when the forward starts.
        free_input: give back the memory of what a forward has sent.
        name: for those who watch.
    """

    def __init__(self, get_exchange: Callable[[], Any], free_input: bool = False, name: str = ""):
        self.get_exchange, self.free_input, self.name = get_exchange, free_input, name
        self.exchange: Any = None
        self._wanted: tuple[torch.Tensor | None, ...] = ()

    def forward(self, inputs: Any) -> Any:
        """Start and wait."""
        return self.start_forward(inputs).wait()

    def backward(self, output_grad: Any) -> Any:
        """Start and wait."""
        return self.start_backward(output_grad).wait()

    def start_forward(self, inputs: Any) -> TensorsInFlight:
        """Sends one tensor, or each of a tuple, in this order. What comes is a leaf."""
        self.exchange = self.get_exchange()
        sent = as_tuple(inputs)
        received, handles = _start(self.exchange, sent)
        # What a gradient will look like, of those that are wanted; no memory is behind it.
        self._wanted = tuple(
            torch.empty_like(come, device="meta") if tensor.requires_grad else None
            for come, tensor in zip(received, sent, strict=True)
        )
        return TensorsInFlight(_like(inputs, received), handles, sent, self.free_input)

    def start_backward(self, output_grad: Any) -> TensorsInFlight:
        """Sends the gradients of what came back to where it came from.

        Which ones are wanted follows from what requires a gradient, the same on all ranks: of a model
        that is partly frozen perhaps none.
        """
        grads = tuple(
            torch.zeros_like(like, device=get_device())
            if grad is None and like is not None
            else grad
            for grad, like in zip(as_tuple(output_grad), self._wanted, strict=True)
        )
        wanted = [number for number, like in enumerate(self._wanted) if like is not None]
        received: list[torch.Tensor | None] = [None] * len(grads)
        exchange, handles = self.exchange.reversed(), []
        for number in wanted:
            received[number], handle = exchange.start(grads[number])
            handles.append(handle)
        self.get_exchange = self.exchange = None
        return TensorsInFlight(_like(output_grad, tuple(received)), tuple(handles), grads)


def _start(exchange: Any, tensors: tuple) -> tuple[tuple, tuple]:
    return tuple(zip(*map(exchange.start, tensors), strict=True))


def _like(given: Any, tensors: tuple) -> Any:
    return tensors if isinstance(given, tuple) else tensors[0]


class AbstractSchedulePlan(ABC):
    """What `build_schedule_plan` of a model returns: its forward, and later its backward, in nodes."""

    @staticmethod
    @abstractmethod
    def run(
        f_schedule_plan: Any,
        b_schedule_plan: Any,
        b_grad: torch.Tensor | None = None,
        pre_forward: Callable | None = None,
        pre_backward: Callable | None = None,
        post_forward: Callable | None = None,
        post_backward: Callable | None = None,
    ) -> torch.Tensor | None:
        """Runs the forward of one plan and the backward of another; either may be None.

        Args:
            b_grad: of the backward's output.
            pre_forward, pre_backward: called with the chunk before its first node.
            post_forward, post_backward: called with the chunk's output, or its input's gradient, and
                with the chunk: to send them.

        Returns the forward's output.
        """
