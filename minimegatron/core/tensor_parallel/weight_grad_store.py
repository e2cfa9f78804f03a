"""Weight gradients that backward leaves for later: the two factors X and dY of each dW = dY^T X.

The backward of `layers` puts factors in; `DistributedDataParallel` sends no gradient while a part
of it is owed. Megatron has no such module: Transformer Engine keeps a store of this kind inside
each of its layers, and Megatron's classes have a `backward_dw`.

The chain needs dX at once, because the stage before waits for it. No other stage waits for dW, only
the sum over replicas. So with a store backward is two pieces of work, B and W:

    B   dX = dY W        in autograd; puts (X, dY) into the weight's store
    W   dW = dY^T X      later, by `backward_dw`; then the weight's hooks run

Every bit of the gradient stays as it was: W takes the microbatches in the order of their B, adds up
what one backward would have added up, and then adds the sum to `weight.grad`.

A process that delays nothing makes no store, and then nothing here is called: those who call ask for
`WeightGradStore.any_made` first. A layer makes its store before its first backward.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.tensor_parallel.mappings import _gather_along_first_dim
from minimegatron.core.tensor_parallel.utils import (
    get_tensor_model_parallel_group_if_none,
    weight_gradient,
)

# -- Which backward pass is running --


class BackwardPass:
    """The weights whose gradients one backward pass has left, in the order in which it left them."""

    def __init__(self) -> None:
        self._owed: dict[WeightGradStore, torch.nn.Parameter] = {}

    def note(self, store: "WeightGradStore", weight: torch.nn.Parameter) -> None:
        """`store` has got factors of this pass."""
        self._owed[store] = weight

    def backward_dw(self) -> None:
        """Computes everything that this pass left, last layer first; nothing the second time."""
        while self._owed:
            store = next(iter(self._owed))
            store.backward_dw(self._owed.pop(store), self)

    def forget(self) -> None:
        """Drops everything that this pass left, for a step that failed."""
        while self._owed:
            self._owed.popitem()[0].clear()


class _Running:
    """The backward pass that is running in this process, None outside of `backward_pass`.

    Not one per thread: on a GPU autograd computes in threads of its own.
    """

    now: Any = None


@contextlib.contextmanager
def _belongs_to(one_pass: Any) -> Iterator[None]:
    is_outermost = _Running.now is None
    if is_outermost:
        _Running.now = one_pass
    try:
        yield
    finally:
        if is_outermost:
            _Running.now = None


@contextlib.contextmanager
def backward_pass() -> Iterator[BackwardPass]:
    """What backward leaves within it belongs to one microbatch; dropped if an error leaves it."""
    one_pass = BackwardPass()
    with _belongs_to(one_pass):
        try:
            yield one_pass
        except BaseException:
            one_pass.forget()
            raise


@contextlib.contextmanager
def weight_gradients_at_once() -> Iterator[None]:
    """Around one microbatch's backward, where nothing else is to come between its B and its W."""
    with backward_pass() as left:
        yield
    left.backward_dw()


def weight_gradients_of(config: ModelParallelConfig) -> contextlib.AbstractContextManager:
    """Around a backward: at its end, what it has left for later is computed."""
    is_deferring = config.delay_wgrad_compute or config.defer_embedding_wgrad_compute
    return weight_gradients_at_once() if is_deferring else contextlib.nullcontext()


def within_this_backward() -> Any:
    """Around a backward that a backward calls (recompute): its microbatch is the outer one's."""
    return _belongs_to(torch._C._current_graph_task_id())


# -- The store of one weight --


class WeightGradStore:
    """The factors of one weight's gradients, oldest first; see `put` and `backward_dw`.

    Args:
        inputs, grad_outputs: the lists to keep the factors in; by default new ones.
        sequence_group: gather X over this group along the sequence before the product; None if X is
            whole.
        limit: how many pairs to keep at most; 0 for any number.
        until_drained: a backward pass does not compute these; see `drain_embedding_wgrad_compute`.
    """

    any_made = False
    """Whether this process has made a store: if not, no backward leaves anything."""

    def __init__(
        self,
        inputs: list[torch.Tensor] | None = None,
        grad_outputs: list[torch.Tensor] | None = None,
        sequence_group: Any = None,
        limit: int = 0,
        until_drained: bool = False,
    ):
        WeightGradStore.any_made = True
        self.inputs = [] if inputs is None else inputs
        self.grad_outputs = [] if grad_outputs is None else grad_outputs
        self.sequence_group, self.limit, self.until_drained = sequence_group, limit, until_drained
        # Of each pair: the backward pass, and the graph that autograd was running. They differ
        # within recompute, which runs a graph of its own inside of the pass.
        self._origins: list[tuple[Any, int]] = []
        self._num_sums_left = 0

    def is_owed(self) -> bool:
        """True while a gradient, or a part of one, is not yet added to its weight's."""
        return bool(self.grad_outputs) or self._num_sums_left > 0

    def put(
        self, weight: torch.nn.Parameter, input_: torch.Tensor, grad_output: torch.Tensor
    ) -> bool:
        """In backward: keeps X, [s, b, h] or [s/t, b, h], and dY, [s, b, n], of one product.

        False if `limit` pairs are there already, or autograd would not simply add dW to the weight's
        gradient: then the caller computes dW itself.
        """
        is_full = 0 < self.limit <= len(self.grad_outputs)
        if is_full or not _is_simply_added(weight):
            return False
        graph = torch._C._current_graph_task_id()
        one_pass = graph if _Running.now is None else _Running.now
        del self._origins[len(self.grad_outputs) :]  # in case the caller has emptied its lists
        self._origins.append((one_pass, graph))
        self.inputs.append(input_.detach())
        self.grad_outputs.append(grad_output)
        weight.weight_grad_store = self
        if isinstance(one_pass, BackwardPass) and not self.until_drained:
            one_pass.note(self, weight)
        return True

    def backward_dw(self, weight: torch.nn.Parameter, one_pass: BackwardPass | None = None) -> None:
        """W: computes what `one_pass` left, or the oldest pass that left something.

        Adds dW to `weight.grad`, then runs the weight's post-accumulate hooks. Does nothing if
        nothing is owed.
        """
        sums = self._take(one_pass)
        self._num_sums_left = len(sums)
        for pairs in sums:
            grad = self._sum(pairs, weight.dtype)
            self._num_sums_left -= 1
            _accumulate(weight, grad)

    def clear(self) -> None:
        """Forgets everything, for a step that failed."""
        self.inputs.clear()
        self.grad_outputs.clear()
        self._origins.clear()
        self._num_sums_left = 0

    def _take(self, one_pass: BackwardPass | None) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Removes the pairs of one pass, and returns those of each graph: autograd adds them up first.

        The graphs come in the order in which autograd would have finished with the weight.
        """
        if not self.grad_outputs:
            return []
        # Lists that the caller filled by hand say nothing of passes: one pair, one microbatch.
        passes = [origin[0] for origin in self._origins] or [None]
        wanted = passes[0] if one_pass is None else one_pass
        if wanted not in passes:
            return []
        first = passes.index(wanted)
        span = slice(first, first + passes.count(wanted))  # passes do not overlap in time
        pairs = list(zip(self.inputs[span], self.grad_outputs[span], strict=True))
        graphs = [origin[1] for origin in self._origins[span]] or [None]
        del self.inputs[span], self.grad_outputs[span], self._origins[span]
        sums: dict[Any, list] = {}
        for graph, pair in zip(graphs, pairs, strict=True):
            sums[graph] = [*sums.pop(graph, []), pair]
        return list(sums.values())

    def _sum(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
    ) -> torch.Tensor:
        """The sum of dY^T X: a weight applied twice gets one gradient from one backward."""
        total = None
        for input_, grad_output in pairs:
            if self.sequence_group is not None:
                input_ = _gather_along_first_dim(input_, self.sequence_group)
            grad = weight_gradient(grad_output, input_).to(dtype)  # autocast multiplies in another
            total = grad if total is None else total.add_(grad)
        return total


def _is_simply_added(weight: torch.nn.Parameter) -> bool:
    """In backward: whether autograd does with this weight's gradient what `_accumulate` does.

    Not for a weight that was computed from others, or has a hook (`register_hook`) that may change
    gradients on their way; nor in `torch.autograd.grad`, whose caller gets them, or where a backward
    was asked for other weights' gradients.
    """
    if not weight.is_leaf or weight._backward_hooks:
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(weight).node)
    except RuntimeError:  # what it says, of a leaf, in torch.autograd.grad
        return False


@torch.no_grad()
def _accumulate(weight: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """What autograd does with a leaf's gradient: adds it to `.grad`, runs the hooks."""
    weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)


# -- From the weight to its store --


def store_of(weight: torch.nn.Parameter, sequence_group: Any = None) -> WeightGradStore:
    """The weight's store, made at its first use: one for all layers that share the weight."""
    if not hasattr(weight, "weight_grad_store"):
        weight.weight_grad_store = WeightGradStore(sequence_group=sequence_group)
    return weight.weight_grad_store


def is_owed(param: torch.nn.Parameter) -> bool:
    """True while backward has left a part of `param`'s gradient for later."""
    return hasattr(param, "weight_grad_store") and param.weight_grad_store.is_owed()


def forget_owed(params: Iterable[torch.nn.Parameter]) -> None:
    """Drops what a failed step left, so that it does not enter the next step's gradients."""
    for param in params:
        if is_owed(param):
            param.weight_grad_store.clear()


# -- After the last backward --


def drain_embedding_wgrad_compute(
    config: ModelParallelConfig,
    embedding_activation_buffer: list[torch.Tensor],
    grad_output_buffer: list[torch.Tensor],
    weight: torch.nn.Parameter,
    tp_group: Any = None,
) -> None:
    """Computes the output layer's weight gradients that backward put off, oldest first.

    Each is added to `weight.grad` and the weight's hooks run, so that it goes where other gradients
    go: to `weight.main_grad` under `DistributedDataParallel`. The two lists end empty.
    `finish_embedding_wgrad_compute` calls it once the pipeline has drained.

    Args:
        config: `sequence_parallel` says whether the inputs are to be gathered.
        embedding_activation_buffer: inputs X, each [s, b, h], or [s/t, b, h] to be gathered.
        grad_output_buffer: gradients dY, each [s, b, v/t]; as many.
        weight: [v/t, h].
        tp_group: None for `parallel_state`'s.

    Raises ValueError if the lists are not of one length.
    """
    group = get_tensor_model_parallel_group_if_none(tp_group)
    if len(embedding_activation_buffer) != len(grad_output_buffer):
        raise ValueError(
            f"{len(embedding_activation_buffer)} inputs of the output layer are kept, but "
            f"{len(grad_output_buffer)} gradients; clear both lists after a step that failed "
            "(clear_embedding_activation_buffer)"
        )
    weight.weight_grad_store = WeightGradStore(
        embedding_activation_buffer,
        grad_output_buffer,
        group if config.sequence_parallel else None,
        until_drained=True,
    )
    while grad_output_buffer:
        weight.weight_grad_store.backward_dw(weight)


def finish_embedding_wgrad_compute(
    config: ModelParallelConfig,
    embedding_module: torch.nn.Module | None,
    is_last_stage: bool,
    tp_group: dist.ProcessGroup,
) -> None:
    """After the last backward: computes the output layer's deferred weight gradients.

    The last stage has the most to compute: it alone scores the vocabulary. What it puts off it
    does while the others drain. Without a pipeline nothing drains, and the result is the same.
    """
    if is_last_stage and config.defer_embedding_wgrad_compute:
        weight = embedding_module.shared_embedding_or_output_weight()
        drain_embedding_wgrad_compute(
            config,
            embedding_module.embedding_activation_buffer,
            embedding_module.grad_output_buffer,
            embedding_module.output_layer.weight if weight is None else weight,
            tp_group,
        )


# -- A linear layer that may leave the gradient of its weight for later --


class OwingLinear(torch.nn.Module):
    """What both linear layers know of `config.delay_wgrad_compute`, and of the output layer's deferral.

    Where `owes` is False, a forward asks no further.
    """

    owes = False
    """Whether some of the layer's products leave their weight gradient."""

    def set_up_owing(
        self,
        delay_wgrad_compute: bool | None = None,
        sequence_group: Any = None,
        embedding_activation_buffer: list[torch.Tensor] | None = None,
        grad_output_buffer: list[torch.Tensor] | None = None,
    ) -> None:
        """For a constructor, once the layer has its `config` and its `weight`.

        Args:
            delay_wgrad_compute: None for the config's.
            sequence_group: gather the input over it before the product; None if it is whole.
            embedding_activation_buffer, grad_output_buffer: see `ColumnParallelLinear`.
        """
        config = self.config
        self.delay_wgrad_compute = (
            config.delay_wgrad_compute if delay_wgrad_compute is None else delay_wgrad_compute
        )
        self.embedding_activation_buffer = embedding_activation_buffer
        self.grad_output_buffer = grad_output_buffer
        if self.delay_wgrad_compute and self.weight is not None:
            # As in Megatron: the hooks of this weight run in `backward_dw`, not in backward.
            self.weight.skip_backward_post_hook = True
        self._sequence_group = sequence_group
        self._deferred: WeightGradStore | None = None
        if config.defer_embedding_wgrad_compute and grad_output_buffer is not None:
            self._deferred = WeightGradStore(
                embedding_activation_buffer,
                grad_output_buffer,
                sequence_group,
                config.wgrad_deferral_limit,
                until_drained=True,
            )
        self.owes = self.delay_wgrad_compute or self._deferred is not None

    def store_for(self, weight: torch.Tensor) -> WeightGradStore | None:
        """Where the gradient of a product with `weight` is left; None to compute it in backward.

        A delay is of the layer's own weight alone. One that `forward` is given is another layer's.
        """
        if self._deferred is None and self.delay_wgrad_compute and weight is self.weight:
            return store_of(weight, self._sequence_group)
        return self._deferred

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: the weight gradient of the oldest microbatch that is owed."""
        if self.delay_wgrad_compute and self.weight is not None:
            store_of(self.weight, self._sequence_group).backward_dw(self.weight)


# -- A module whose parts have left some; Megatron has `backward_dw` in each class --


class DelayedWgrad:
    """A base of modules; those of their parts that have a `backward_dw` compute the gradients."""

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: weight gradients of the oldest microbatch that is owed.

        The last part first, as in backward: its bucket is the first to be sent.
        """
        _of_parts(self)


def _of_parts(module: torch.nn.Module) -> None:
    for part in reversed([*module.children()]):
        if isinstance(part, torch.nn.ModuleList):
            _of_parts(part)
        elif hasattr(part, "backward_dw"):
            part.backward_dw()
