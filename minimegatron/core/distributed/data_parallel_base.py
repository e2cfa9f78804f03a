"""What the rest of the chain may ask of a data-parallel wrapper, whichever one it is.

Counterpart: `megatron.core.distributed.data_parallel_base`.
"""

from typing import Any

import torch

from minimegatron.core.distributed import step_checks
from minimegatron.core.distributed.data_parallel_surface import DataParallelSurface
from minimegatron.core.parameter_marks import restore_marks


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


class _BaseDataParallel(DataParallelSurface, torch.nn.Module):
    """What all wrappers have in common; each also has `_places`, for `refuse_changed_parameters`.

    The module inside is `self.module`, its configuration `self.config`.
    `grad_scaler` is that of the optimizer which divides these gradients by a loss scale, if one does.
    """

    def __init__(self, config: Any, module: torch.nn.Module, ddp_config: Any = None):
        super().__init__()
        self.config, self.ddp_config = config, ddp_config
        self.module = module
        restore_marks(module)
        self.grad_scaler: Any = None
        self._built_with = step_checks.factors_of(config, ddp_config)
        self._grads_are_final = False
        self._grads_came = self._grads_are_partial = False
        """Whether a gradient has come since `finish_grad_sync`, and since `finalize_model_grads`."""

    def _begin_grads(self) -> None:
        """Of `zero_grad_buffer`: a new step's gradients begin. ValueError for a late change."""
        step_checks.refuse_other_factors(self._built_with, self.config, self.ddp_config)
        step_checks.refuse_changed_parameters(self.module, self._places)
        self._grads_are_final = self._grads_came = self._grads_are_partial = False
        if self.grad_scaler is not None:
            self.grad_scaler.was_read = False

    def note_final(self) -> None:
        """Of `finalize_model_grads`: a step's gradients are made final once, else RuntimeError."""
        if self._grads_are_final:
            step_checks.refuse_final_grads()
        self._grads_are_final, self._grads_are_partial = True, False
