"""Random numbers that agree, or differ, between tensor-parallel ranks as they must; and recompute.

Counterpart: `megatron.core.tensor_parallel.random`; its names say CUDA, but here they serve the CPU
too.

Dropout needs two kinds of randomness. Where every tensor-parallel rank holds the same activations,
all must drop the same ones: they use the default generator, seeded alike. Where each holds its own
piece (heads; with sequence parallelism, tokens), each must drop others: they `fork()` to a generator
seeded by rank.

    activations                            without sequence parallelism   with it
    -------------------------------------  -----------------------------  -----------------
    between layers (hidden dropout)        default: equal over tp         model-parallel
    attention probabilities, per head      model-parallel                 model-parallel

Ranks that share a sequence draw alike, as in Megatron, though their tokens differ: no seed depends on a
context-parallel rank.

The default generator is the one of the device that this process computes on. On a CPU that is torch's
default generator, which also draws the weights of a layer that is built by itself, and a number for
each iterator of a `DataLoader` that has no generator of its own. Where only some ranks draw,
`check_same_dropout` refuses the update.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import ReduceOp, all_reduce
from minimegatron.core.left_out import accepts_left_out
from minimegatron.core.tensor_parallel.utils import (
    gather_split_1d_tensor,
    get_tensor_model_parallel_group_if_none,
    split_tensor_into_1d_equal_chunks,
    tensor_model_parallel_rank,
)
from minimegatron.core.tensor_parallel.weight_grad_store import (
    WeightGradStore,
    within_this_backward,
)
from minimegatron.core.tracing import traced
from minimegatron.core.utils import get_device, unwrap_model, without_graph

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_DATA_PARALLEL_RNG_TRACKER_NAME = "data-parallel-rng"


def get_data_parallel_rng_tracker_name() -> str:
    """The state that is equal over tensor-parallel ranks."""
    return _DATA_PARALLEL_RNG_TRACKER_NAME


# -- The default generator of the device that this process computes on --


def _get_rng_state() -> torch.Tensor:
    device = get_device()
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_rng_state(state: torch.Tensor) -> None:
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def get_rng_state() -> torch.Tensor:
    """Where the generator stands, for `repeats_from`."""
    return _get_rng_state()


@contextlib.contextmanager
def repeats_from(state: torch.Tensor | None) -> Iterator[None]:
    """Within it, the generator gives again what it gave after `get_rng_state` returned `state`.

    Afterwards it goes on as if nothing had happened. None: nothing was random, and nothing is done.
    """
    if state is None:
        yield
        return
    now = _get_rng_state()
    _set_rng_state(state)
    try:
        yield
    finally:
        _set_rng_state(now)


def _manual_seed(seed: int) -> None:
    if get_device().type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@accepts_left_out
class CudaRNGStatesTracker:
    """Named states of the default generator, exchanged for it within `fork`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all states."""
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()
        self.current: str | None = None  # the state that a `fork` has put into the generator

    def is_initialized(self) -> bool:
        """True once a state was added or restored."""
        return bool(self.states_)

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name, in a dict of their own. The tensors are the tracker's; it replaces
        them, and does not change them.
        """
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Restores what `get_states` returned."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Adds a state seeded by `seed`. Raises ValueError if either is taken."""
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} is in use already; streams must differ, give another")
        if name in self.states_:
            raise ValueError(f"random state {name!r} exists already; reset() the tracker first")
        before = _get_rng_state()
        _manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = _get_rng_state()
        _set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Within it, random numbers come from `name`'s state, which advances.

        A fork within a fork of the same name goes on with the outer one's numbers, and the outer one
        goes on after the inner one's.

        Raises:
            ValueError: no such state.
        """
        if name not in self.states_:
            raise ValueError(
                f"random state {name!r} is unknown (known: {sorted(self.states_)}); call "
                "model_parallel_cuda_manual_seed(seed) before using dropout"
            )
        outer, before = self.current, _get_rng_state()
        if outer is not None:
            self.states_[outer] = before
        _set_rng_state(self.states_[name])
        self.current = name
        try:
            yield
        finally:
            self.states_[name] = _get_rng_state()
            # An outer fork of the same name, or of a name forked within this one, has advanced.
            _set_rng_state(before if outer is None else self.states_.get(outer, before))
            self.current = outer


_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


@accepts_left_out
def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """This process's tracker."""
    return _CUDA_RNG_STATE_TRACKER


@accepts_left_out
def model_parallel_cuda_manual_seed(seed: int, *, tp_rank: int | None = None) -> None:
    """Seeds a GPU's default generator and the tracker's two states, the model-parallel one by rank too.

    torch's default generator stays as it is. A CPU's dropout between layers comes from it, so the
    caller seeds it alike on the ranks of a tensor-parallel group: `torch.manual_seed(seed)`.

    Pipeline stages and, if wanted, data-parallel ranks differ because the caller gives them another
    `seed` (Megatron: seed + 100 x pipeline rank, + 10 x data rank under data_parallel_random_init).

    Args:
        seed: equal over the ranks of a tensor-parallel group.
        tp_rank: None for `parallel_state`'s.
    """
    if tp_rank is None:
        tp_rank = tensor_model_parallel_rank()
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    if get_device().type == "cuda":
        torch.cuda.manual_seed(seed)
    tracker.add(_DATA_PARALLEL_RNG_TRACKER_NAME, seed)
    # 2718 apart, so that no rank's seed is another use's seed plus a small number.
    tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + tp_rank)


@torch.no_grad()
def check_same_dropout(model: Iterable[torch.nn.Module], tp_group: Any) -> None:
    """Raises ValueError if ranks of a tensor-parallel group drop other activations between layers.

    It compares CPUs' default generators, by one number of 56 bits. All ranks of the group must call it.
    On a GPU, with sequence parallelism or without `hidden_dropout` it asks nobody.
    """
    chunks = unwrap_model(list(model))
    configs = [chunk.config for chunk in chunks if hasattr(chunk, "config")]
    drops = any(
        hasattr(config, "hidden_dropout")
        and config.hidden_dropout > 0.0
        and not config.sequence_parallel
        for config in configs
    )
    is_group = isinstance(tp_group, dist.ProcessGroup) and tp_group.size() > 1
    if not (drops and is_group) or get_device().type == "cuda":
        return
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=7).digest()
    # In evaluation mode nothing drops; and ranks do not differ in it, but if so, all hear of it.
    number = int.from_bytes(digest, "little") if any(chunk.training for chunk in chunks) else 0
    bounds = torch.tensor([number, -number])
    all_reduce(bounds, tp_group, ReduceOp.MAX)
    if bounds.sum() != 0:
        raise ValueError(
            f"rank {tp_group.rank()} of the {tp_group.size()} in group tp: torch's default generator "
            "is not at the same place on all of them, so dropout between layers (hidden_dropout) drops "
            "other activations on each; seed them alike, torch.manual_seed(seed), and draw alike: a "
            "DataLoader that some ranks alone have needs its own, generator=torch.Generator()"
        )


# -- Activation recompute --


RngStates = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], str | None]
"""Of the CPU, of the device in use (the CPU again where that is all), and of the tracker: its states,
and which of them a `fork` has put into the device's generator."""


def _all_rng_states() -> RngStates:
    """Where this process's random numbers stand, for `_restore_rng_states`."""
    tracker = get_cuda_rng_tracker()
    return torch.get_rng_state(), _get_rng_state(), tracker.get_states(), tracker.current


def _restore_rng_states(states: RngStates) -> None:
    """Randomness continues from `states`."""
    cpu, device, tracked, current = states
    torch.set_rng_state(cpu)
    _set_rng_state(device)
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
