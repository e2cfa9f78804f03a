"""What a program may ask of `DistributedDataParallel` itself: between steps, or in place of its hooks.

Megatron has these methods in `megatron.core.distributed.distributed_data_parallel`.
"""

from typing import Any

import torch

from minimegatron.core.collectives import broadcast
from minimegatron.core.distributed.frozen_alike import check_summed_alike
from minimegatron.core.parameter import reduce_group
from minimegatron.core.tensor_parallel import weight_grad_store


class OnDemand:
    """The part of `DistributedDataParallel` that a plain step does without."""

    _is_compared = False

    # -- Buffers and groups, as Megatron has them apart --
    @property
    def buffers(self) -> list[Any]:
        """Those of dense parameters."""
        return [one for one in self.all_buffers if self._is_dense(one)]

    @property
    def expert_parallel_buffers(self) -> list[Any]:
        """Those of parameters that are summed over other ranks; none without experts."""
        return [one for one in self.all_buffers if not self._is_dense(one)]

    @property
    def bucket_groups(self) -> list[Any]:
        """As `buffers`, in the order of backward."""
        return [one for one in self.all_bucket_groups if self._is_dense(one)]

    @property
    def expert_parallel_bucket_groups(self) -> list[Any]:
        """As `expert_parallel_buffers`, in the order of backward."""
        return [one for one in self.all_bucket_groups if not self._is_dense(one)]

    def _is_dense(self, part: Any) -> bool:
        return part.data_parallel_group is self.dp_cp_group

    # -- Gradients --

    def _compare_copies(self) -> None:
        """Before the first step: ValueError where another copy of the chunk sums other gradients."""
        check_summed_alike(self.module, self.pg_collection, self.ddp_config, self.all_buffers)
        self._is_compared = True

    def start_grad_sync(self, *unused: Any) -> None:
        """Launches every bucket; for a schedule that chooses the moment (`grad_sync_func`).

        A bucket whose weight gradients are owed, and those after it, are launched once they came.
        """
        # The first group last: its launch lets the others follow, in their order.
        for group in reversed(self.all_bucket_groups):
            assert group.grad_reduce_handles is None, "launched twice in one step"
            owed = (
                filter(weight_grad_store.is_owed, group.params)
                if weight_grad_store.WeightGradStore.any_made
                else ()
            )
            group.params_with_grad.update(group.params.keys() - set(owed))
            group._launch_what_is_due()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies every gradient by `scaling_factor`, in place."""
        for buffer in self.all_buffers:
            buffer.scale_gradients(scaling_factor)

    # -- Parameters --

    def broadcast_params(self) -> None:
        """Copies every parameter from the first rank that has it to the others.

        RuntimeError while parts of it are still to be gathered.
        """
        self._require_complete_params("the next forward")
        for param in self.module.parameters():
            broadcast(param.data, 0, reduce_group(param, self.pg_collection))

    def start_param_sync(self, *unused: Any, force_sync: bool = False) -> None:
        """Launches the gathering of parameters, where the optimizer has updated shards of them.

        `force_sync` also waits. With `overlap_param_gather` call it on every rank before parameters are
        read other than by a forward. `state_dict` and `load_state_dict` raise without it. Who reads
        `parameters()` themselves, for their norm or their running mean, gets old values of what other
        ranks have updated, and no word, as in Megatron: nothing tells such a reader from one that
        counts them.
        """
        for group in reversed(self.all_bucket_groups):
            group.start_param_sync()
        if force_sync:
            for group in reversed(self.all_bucket_groups):
                group.finish_param_sync()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """From now on a forward gathers no parameters, so that one data-parallel rank may run it alone.

        The parameters are gathered here, unless `param_sync` is off; so every rank must call it. A
        forward while parameters are incomplete then raises RuntimeError.
        """
        assert self._gathering_hooks, (
            "there are no forward hooks: they are off already, or overlap_param_gather is"
        )
        for hook in self._gathering_hooks:
            hook.remove()
        self._gathering_hooks = []
        if param_sync:
            self.start_param_sync(force_sync=True)

    def _before_state_dict(self, *unused: Any) -> None:
        """Hook of what is wrapped: RuntimeError while parts of it are still to be gathered.

        Gathering them here would hang whoever asks on one rank only. What is loaded would be replaced
        by what arrives later.
        """
        self._require_complete_params("the next forward")

    def _require_complete_params(self, gathered_by: str) -> None:
        groups = self.all_bucket_groups
        if any(one.params_are_stale or one.param_gather_handles is not None for one in groups):
            raise RuntimeError(
                "with overlap_param_gather, what other ranks have updated is gathered by "
                f"{gathered_by}; call start_param_sync(force_sync=True) on every rank first"
            )


def refuse_use_before_gathering(name: str) -> None:
    """Raises RuntimeError: backward came to this parameter, but no forward has gathered it."""
    raise RuntimeError(
        f"{name} was used before what other ranks have updated of it came: no "
        "forward of its own module was called, and none that it was given to; call one, or "
        "start_param_sync(force_sync=True) on every rank first"
    )
