"""What each data-parallel wrapper may be asked for, and does in its own way or not at all.

Megatron has this in `megatron.core.distributed.data_parallel_base`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from minimegatron.core.parameter import reduce_group


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
