"""An optimizer of torch's own, given a model whose gradients are in `main_grad`: it would do nothing.

It skips a parameter whose `grad` is None, and `DistributedDataParallel` leaves all of them so. Megatron
has no counterpart: there such a run keeps its first weights, without a word.
"""

import weakref
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_looked_at: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_hooks: list[Any] = []


def watch_torch_optimizers() -> None:
    """From now on, the first step of each `torch.optim.Optimizer` is looked at, in this process.

    That step raises RuntimeError where every gradient is in `main_grad` and none in `grad`.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, *unused: Any) -> None:
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
