"""What each data-parallel wrapper may be asked for, and does in its own way or not at all.

Megatron has this in `megatron.core.distributed.data_parallel_base`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class DataParallelSurface:
    """The part of `_BaseDataParallel` that keeps nothing of a step."""

    module: torch.nn.Module

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataParallelSurface":
        """Raises TypeError: a copy's gradients would have no buffers, and its hooks would be ours."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied: copy the model inside, "
            "copy.deepcopy(unwrap_model(model)), and wrap the copy if it is trained; with "
            "overlap_param_gather, which has hooks in the model, build another one and give it "
            "load_state_dict(model.state_dict())"
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backward accumulates gradients and communicates nothing."""
        yield

    def start_grad_sync(self, *unused: Any) -> None:
        """Launches the summation of gradients over data-parallel ranks."""

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Returns once the summed gradients are in place."""

    def start_param_sync(self, *unused: Any, force_sync: bool = False) -> None:
        """Launches the gathering of parameters that other ranks have updated."""

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies every gradient by `scaling_factor`, in place."""
        raise NotImplementedError

    def zero_grad_buffer(self) -> None:
        """Readies the gradients for the next step."""
        raise NotImplementedError

    def broadcast_params(self) -> None:
        """Copies every parameter from data-parallel rank 0 to the others."""
        raise NotImplementedError

    # -- State dicts are the wrapped module's --
    # A checkpoint must not depend on which wrapper, if any, the model was trained in.
    def state_dict(
        self,
        prefix: str = "",
        keep_vars: bool = False,
        destination: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The wrapped module's state dict; torch's arguments, in Megatron's order."""
        return self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The same: nothing is left out of a checkpoint here."""
        return self.state_dict(prefix, keep_vars)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Loads into the wrapped module."""
        return self.module.load_state_dict(state_dict, strict)
