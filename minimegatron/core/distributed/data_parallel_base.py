"""What the rest of the chain may ask of a data-parallel wrapper, whichever one it is.

Counterpart: `megatron.core.distributed.data_parallel_base`.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from minimegatron.core.distributed.data_parallel_surface import (  # noqa: F401  others ask here
    DataParallelSurface,
    refuse_unsummed_grads,
)
from minimegatron.core.orders.orders import get_schedule
from minimegatron.core.orders.placement import Placement, usual_placement
from minimegatron.core.parameter_marks import restore_marks
from minimegatron.core.utils import get_model_config


def get_main_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Where `param`'s accumulated gradient lives, None if it has none.

    `main_grad`, a view into a buffer, under our own `DistributedDataParallel`; `grad` under torch's,
    and for a model that is not wrapped at all.
    """
    return param.main_grad if hasattr(param, "main_grad") else param.grad


def named_parameters_inside(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The model's parameters under the names they have inside all wrappers.

    Every wrapper keeps what it wraps in `.module`, and so puts "module." before every name.
    """
    named = list(model.named_parameters())
    while named and all(name.startswith("module.") for name, _ in named):
        named = [(name.removeprefix("module."), param) for name, param in named]
    return named


Place = tuple[torch.dtype, torch.device, torch.Tensor | None]
"""Where a trained parameter is; the tensor is the memory that it is a view of, if it must be."""


def refuse_changed_parameters(
    module: torch.nn.Module, trained: Mapping[torch.nn.Parameter, Place]
) -> None:
    """Raises ValueError if the parameters that require a gradient are not `trained`, or have moved.

    One that was frozen late would move all the same, by its moments and its weight decay; one that was
    thawed late, or that took another's place, would not move. One that was converted or moved would no
    longer be where its gradient, its main copy or the other ranks' updates are put.
    """
    named = list(module.named_parameters())
    changed = [name for name, param in named if param.requires_grad != (param in trained)]
    if changed:
        raise ValueError(
            f"requires_grad of {len(changed)} parameters, such as {changed[0]}, was changed after the "
            "model was wrapped, or others took their places (load_state_dict(assign=True), an "
            "assignment); change them before, or make wrapper and optimizer again"
        )
    moved = [n for n, param in named if param in trained and not _is_at(param, *trained[param])]
    if moved:
        param = dict(named)[moved[0]]
        raise ValueError(
            f"{len(moved)} parameters, such as {moved[0]}, now {param.dtype} on {param.device}, were "
            "converted, moved or given other memory after the model was wrapped or got its optimizer; "
            "convert and move it first, then wrap it, then make the optimizer"
        )


def _is_at(
    param: torch.nn.Parameter, dtype: torch.dtype, device: torch.device, home: torch.Tensor | None
) -> bool:
    if param.dtype != dtype or param.device != device:
        return False
    return home is None or _memory(param) == _memory(home)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def placement_over(pp_group: dist.ProcessGroup, config: Any) -> Placement:
    """Which rank of `pp_group` holds which stage of the model, for the schedule that `config` names.

    The group counts, not the config's number of stages: a chunk may be used by itself.
    """
    sizes = (pp_group.size(), config.virtual_pipeline_model_parallel_size)
    name = config.pipeline_schedule
    return usual_placement(*sizes) if name is None else get_schedule(name).placed(*sizes)


def refuse_unscaled_loss(model: Sequence[torch.nn.Module], pp_group: dist.ProcessGroup) -> None:
    """After backward: that the loss was scaled by what the optimizer divides by.

    Raises ValueError, on the stage with the loss, where nobody has asked for the loss scale since
    `zero_grad_buffer`, or, in a schedule without `config.grad_scale_func`, since the step began. A
    forward step or loss function that asks for it in a log, and does not multiply, passes all the same:
    `float(scale)` is one call for both.
    """
    scalers = [getattr(chunk, "grad_scaler", None) for chunk in model]
    unread = {1 / float(s.inv_scale) for s in scalers if s is not None and not s.was_read} - {1.0}
    if unread and placement_over(pp_group, get_model_config(model[0])).is_last_rank(
        pp_group.rank()
    ):
        raise ValueError(
            f"the optimizer divides gradients by its loss scale, {unread.pop():g}, but nothing has "
            "multiplied the loss by it; set config.grad_scale_func = optimizer.scale_loss, and give "
            "each model that is trained a configuration of its own (who multiplies in a loss function "
            "calls optimizer.get_loss_scale() there, not before the step)"
        )


def forget_reads_of_scale(model: Sequence[torch.nn.Module]) -> None:
    """One of `before_step_funcs`: who asked for the loss scale before the step wanted it for a log.

    Not where a schedule will scale the loss, by `config.grad_scale_func`.
    """
    if get_model_config(model[0]).grad_scale_func is None:
        for chunk in model:
            if getattr(chunk, "grad_scaler", None) is not None:
                chunk.grad_scaler.was_read = False


_looked_at: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def refuse_idle_optimizer(optimizer: Optimizer, *unused: Any) -> None:
    """Hook before each step of every `torch.optim.Optimizer`, which skips what has no `grad`.

    Raises RuntimeError, at its first step, where all gradients are in `main_grad`: the weights would
    stay as they are.
    """
    if optimizer in _looked_at:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    elsewhere = sum(hasattr(param, "main_grad") for param in params)
    if elsewhere and all(param.grad is None for param in params):
        raise RuntimeError(
            f"{type(optimizer).__name__} would update none of its {len(params)} parameters: it reads "
            f"param.grad, which is None, and the gradients of {elsewhere} are in param.main_grad; use "
            "get_megatron_optimizer, or set param.grad = param.main_grad before each step, after "
            "finalize_model_grads, and call zero_grad_buffer() in place of zero_grad()"
        )
    _looked_at.add(optimizer)


_hooks: list[Any] = []


def watch_torch_optimizers() -> None:
    """From now on `refuse_idle_optimizer` is called, in this process. May be repeated."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(refuse_idle_optimizer))


WRITTEN_INTO_BUFFERS = ("average_in_collective", "use_distributed_optimizer")
"""Of a wrapper's own configuration."""


class _BaseDataParallel(DataParallelSurface, torch.nn.Module):
    """What all wrappers have in common.

    The module inside is `self.module`, its configuration `self.config`.
    `grad_scaler` is that of the optimizer which divides these gradients by a loss scale, if one does.
    """

    def __init__(self, config: Any, module: torch.nn.Module, ddp_config: Any = None):
        super().__init__()
        self.config = config
        self.module = module
        restore_marks(module)
        self.ddp_config = ddp_config
        self.grad_scaler: Any = None
        self._built_with = self._factors()
        self._grads_are_final = False
        self._grads_came = self._grads_are_partial = False
        """Whether a gradient has come since `finish_grad_sync`, and since `finalize_model_grads`."""

    def _factors(self) -> dict[str, Any]:
        """What the factor on every gradient was chosen by, when this wrapper was made."""
        of_wrapper = {} if self.ddp_config is None else vars(self.ddp_config)
        known = {name: of_wrapper.get(name) for name in WRITTEN_INTO_BUFFERS}
        return known | {"calculate_per_token_loss": self.config.calculate_per_token_loss}

    def _begin_grads(self) -> None:
        """Of `zero_grad_buffer`: a new step's gradients begin. ValueError for a late change."""
        for name, now in self._factors().items():
            if now != self._built_with[name]:
                raise ValueError(
                    f"{name} is {now}, but was {self._built_with[name]} when the model was wrapped for "
                    "data parallelism, which decided by what gradients are divided; set it before, or "
                    "make wrapper and optimizer again"
                )
        self._grads_are_final = self._grads_came = self._grads_are_partial = False
        if self.grad_scaler is not None:
            self.grad_scaler.was_read = False

    def note_final(self) -> None:
        """Of `finalize_model_grads`: a step's gradients are made final once, else RuntimeError."""
        if self._grads_are_final:
            raise RuntimeError(
                "finalize_model_grads() was called already, and zero_grad_buffer() was not called "
                "since: gradients would be summed over ranks, and divided, once more; call it on every "
                "chunk before each step (optimizer.zero_grad() leaves the buffers as they are); to "
                "accumulate more, give one call of the schedule all microbatches"
            )
        self._grads_are_final, self._grads_are_partial = True, False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        return self.module(*inputs, **kwargs)
