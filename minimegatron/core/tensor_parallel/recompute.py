"""Recompute of activations: forward keeps a function's inputs, backward runs the function again.

Counterpart: `checkpoint` and `CheckpointFunction` of `megatron.core.tensor_parallel.random`. The second
run draws the random numbers of the first, so where all of them stand is kept here too.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from minimegatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_rng_state,
    set_rng_state,
)
from minimegatron.core.tensor_parallel.tensor_pieces import (
    gather_split_1d_tensor,
    split_tensor_into_1d_equal_chunks,
)
from minimegatron.core.tensor_parallel.utils import get_tensor_model_parallel_group_if_none
from minimegatron.core.tensor_parallel.weight_grad_store import (
    WeightGradStore,
    within_this_backward,
)
from minimegatron.core.tracing import traced
from minimegatron.core.utils import get_device, without_graph

__all__ = ["CheckpointFunction", "checkpoint", "keep_rng_states"]
"""`core.tensor_parallel.random` offers these."""

# -- Random numbers again --


@contextlib.contextmanager
def repeats_from(state: torch.Tensor | None) -> Iterator[None]:
    """Within it, the generator gives again what it gave after `get_rng_state` returned `state`.

    Afterwards it goes on as if nothing had happened. None: nothing was random, and nothing is done.
    """
    if state is None:
        yield
        return
    now = get_rng_state()
    set_rng_state(state)
    try:
        yield
    finally:
        set_rng_state(now)


RngStates = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], str | None]
"""Of the CPU, of the device in use (the CPU again where that is all), and of the tracker: its states,
and which of them a `fork` has put into the device's generator."""


def _all_rng_states() -> RngStates:
    """Where this process's random numbers stand, for `_restore_rng_states`."""
    tracker = get_cuda_rng_tracker()
    return torch.get_rng_state(), get_rng_state(), tracker.get_states(), tracker.current


def _restore_rng_states(states: RngStates) -> None:
    """Randomness continues from `states`."""
    cpu, device, tracked, current = states
    torch.set_rng_state(cpu)
    set_rng_state(device)
    tracker = get_cuda_rng_tracker()
    tracker.set_states(tracked)
    tracker.current = current


def keep_rng_states(models: list[torch.nn.Module]) -> Callable[[], None]:
    """For a configuration's `before_step_funcs`: puts random numbers back after a step that failed."""
    return partial(_restore_rng_states, _all_rng_states())


@contextlib.contextmanager
def _as_it_was(rng_states: RngStates) -> Iterator[None]:
    """Within it, randomness continues from `rng_states`; afterwards as if nothing had happened."""
    now = _all_rng_states()
    _restore_rng_states(rng_states)
    try:
        yield
    finally:
        _restore_rng_states(now)


# -- A function that runs again --


def _autocast_state(device_type: str) -> Callable[[], Any]:
    """Makes the context in which autocast is what it is now."""
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled)


@traced("recompute")
def _recompute(ctx: Any, inputs: tuple[Any, ...]) -> Any:
    """Runs `ctx.run_function` again, with gradients, on the same inputs and random numbers."""
    with _as_it_was(ctx.rng_states), ctx.autocast(), torch.enable_grad():
        return ctx.run_function(*inputs)


class CheckpointFunction(torch.autograd.Function):
    """Forward keeps the inputs only; backward runs the function again before differentiating it."""

    @staticmethod
    def forward(ctx, run_function, distribute_group, *args):
        ctx.run_function = run_function
        ctx.rng_states = _all_rng_states()
        ctx.autocast = _autocast_state(get_device().type)
        # Tensors are saved, so that autograd can tell if one is changed between here and backward.
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        # What was made in inference mode cannot be part of a backward, and counts no changes.
        before = [None if tensor.is_inference() else tensor._version for tensor in tensors]
        with torch.no_grad():
            outputs = run_function(*args)
        changed = [
            i
            for i, version in enumerate(before)
            if version is not None and tensors[i]._version != version
        ]
        if changed:
            raise RuntimeError(
                f"tensor argument {changed[0]}, counted from 0, was changed in place by the function "
                "that is recomputed: backward would run it on what it has left there; change a copy"
            )
        ctx.other_args = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.is_tensor = [isinstance(arg, torch.Tensor) for arg in args]
        ctx.distribute_group = distribute_group
        if distribute_group is not None:
            ctx.first_shape = tensors[0].shape
            tensors[0] = split_tensor_into_1d_equal_chunks(tensors[0], tp_group=distribute_group)
        ctx.save_for_backward(*tensors)
        return outputs

    @staticmethod
    @without_graph
    def backward(ctx, *grads):
        tensors = list(ctx.saved_tensors)
        if ctx.distribute_group is not None:
            whole = gather_split_1d_tensor(tensors[0], ctx.distribute_group)
            tensors[0] = whole.view(ctx.first_shape)
        needs_grad = ctx.needs_input_grad[2:]
        remaining = iter(tensors)
        inputs = tuple(
            next(remaining).detach().requires_grad_(needs) if is_tensor else other
            for is_tensor, other, needs in zip(
                ctx.is_tensor, ctx.other_args, needs_grad, strict=True
            )
        )
        outputs = _recompute(ctx, inputs)
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        differentiable = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad
        ]
        if differentiable:
            with within_this_backward() if WeightGradStore.any_made else contextlib.nullcontext():
                torch.autograd.backward(*zip(*differentiable, strict=True))
        input_grads = (arg.grad if isinstance(arg, torch.Tensor) else None for arg in inputs)
        return None, None, *input_grads


def checkpoint(
    function: Callable,
    distribute_saved_activations: bool,
    *args: Any,
    tp_group: Any = None,
    modules: Iterable[torch.nn.Module] | None = None,
) -> Any:
    """`function(*args)`, keeping only its inputs for backward, which runs it again.

    The second run sees the same random numbers, so dropout drops the same.

    Args:
        function: returns a tensor or a tuple of tensors.
        distribute_saved_activations: each tensor-parallel rank keeps 1/t of the first tensor, which
            all hold alike; they gather it again in backward.
        args: inputs, by position.
        tp_group: for `distribute_saved_activations`; None for `parallel_state`'s.
        modules: whose parameters `function` uses; None for the module that `function` is, or is a
            method of. Where neither they nor the inputs require a gradient, `function` just runs: it
            keeps nothing for a backward.
    """
    group = None
    if distribute_saved_activations:
        group = get_tensor_model_parallel_group_if_none(tp_group)
    if not torch.is_grad_enabled() or _any_requires_grad(args):
        return CheckpointFunction.apply(function, group, *args)
    if modules is None:
        modules = [getattr(function, "__self__", function)]
    modules = list(modules)
    is_known = all(isinstance(module, torch.nn.Module) for module in modules)
    if is_known and not _any_requires_grad(p for m in modules for p in m.parameters()):
        return function(*args)
    # Autograd enters a function by its inputs, and parameters are none of them. Where all that comes
    # before is frozen (an embedding is enough) no input requires a gradient: so one is added.
    entry = torch.empty(0, requires_grad=True)
    return CheckpointFunction.apply(lambda *given: function(*given[:-1]), group, *args, entry)


def _any_requires_grad(candidates: Iterable[Any]) -> bool:
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in candidates)
