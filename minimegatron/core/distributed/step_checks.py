"""What a data-parallel step checks of model, wrappers and optimizers, and changes nothing by it.

Megatron has no counterpart: there, the weights are wrong without a word.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from minimegatron.core.parameter import reduce_group
from minimegatron.core.transformer.stages_as_told import placement_of
from minimegatron.core.utils import get_model_config

# -- Parameters --

Place = tuple[torch.dtype, torch.device, torch.Tensor | None]
"""Where a trained parameter is; the tensor is the memory that it is a view of, if it must be."""


def places_in(buffers: Iterable[Any]) -> dict[torch.nn.Parameter, Place]:
    """Where the parameters of these gradient buffers are now."""
    return {
        param: (buffer.param_dtype, buffer.grad_data.device, buffer.param_data)
        for buffer in buffers
        for param in buffer.params
    }


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


# -- Settings --


def factors_of(config: Any, ddp_config: Any) -> dict[str, Any]:
    """What the factor on every gradient is chosen by, when a wrapper is made.

    Args:
        config: the model's.
        ddp_config: the wrapper's; it may lack what decides, or be None.
    """
    names = ("average_in_collective", "use_distributed_optimizer")
    of_wrapper = {} if ddp_config is None else vars(ddp_config)
    known = {name: of_wrapper.get(name) for name in names}
    return known | {"calculate_per_token_loss": config.calculate_per_token_loss}


def refuse_other_factors(before: Mapping[str, Any], config: Any, ddp_config: Any) -> None:
    """Raises ValueError where what decides by what gradients are divided is not as `before`."""
    for name, now in factors_of(config, ddp_config).items():
        if now != before[name]:
            raise ValueError(
                f"{name} is {now}, but was {before[name]} when the model was wrapped for "
                "data parallelism, which decided by what gradients are divided; set it before, or "
                "make wrapper and optimizer again"
            )


# -- Gradients --


def refuse_final_grads() -> None:
    """Raises RuntimeError: a step's gradients have been made final before."""
    raise RuntimeError(
        "finalize_model_grads() was called already, and zero_grad_buffer() was not called "
        "since: gradients would be summed over ranks, and divided, once more; call it on every "
        "chunk before each step (optimizer.zero_grad() leaves the buffers as they are); to "
        "accumulate more, give one call of the schedule all microbatches"
    )


def refuse_unsummed_grads(
    params: Iterable[torch.nn.Parameter], pg_collection: Any, copies_are_summed: bool = False
) -> None:
    """Raises RuntimeError if some of these gradients are one term of a sum over ranks.

    With `copies_are_summed`, those of data-parallel copies have been.
    """
    params = list(params)
    copies = max((reduce_group(param, pg_collection).size() for param in params), default=1)
    copies = 1 if copies_are_summed else copies
    summed = ("sequence_parallel", "average_gradients_across_tp_domain")
    partial = sum(any(getattr(param, mark, False) for mark in summed) for param in params)
    partial *= vars(pg_collection).get("tp") is not None and pg_collection.tp.size() > 1
    tied = sum(getattr(param, "shared_embedding", False) for param in params)
    if copies > 1 or partial or tied:
        raise RuntimeError(
            f"the gradients were not summed over {copies} data-parallel ranks, nor what {partial} "
            f"parameters need over tensor ranks, nor {tied} copies of the embedding; set "
            "config.finalize_model_grads_func = finalize_model_grads before the schedule runs, or call "
            "finalize_model_grads(model) after the last backward, before optimizer.step()"
        )


# -- The loss scale --


def refuse_unscaled_loss(model: Sequence[torch.nn.Module], pp_group: dist.ProcessGroup) -> None:
    """After backward: that the loss was scaled by what the optimizer divides by.

    Raises ValueError, on the stage with the loss, where nobody has asked for the loss scale since
    `zero_grad_buffer`, or, in a schedule without `config.grad_scale_func`, since the step began. A
    forward step or loss function that asks for it in a log, and does not multiply, passes all the same:
    `float(scale)` is one call for both.
    """
    scalers = [getattr(chunk, "grad_scaler", None) for chunk in model]
    unread = {1 / float(s.inv_scale) for s in scalers if s is not None and not s.was_read} - {1.0}
    if unread and placement_of(get_model_config(model[0]), pp_group.size()).is_last_rank(
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


# -- Optimizers of torch's own --

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
