"""Data parallelism: every rank's gradients end up in buffers, summed over ranks bucket by bucket.

Counterpart: `megatron.core.distributed.distributed_data_parallel.DistributedDataParallel`.

One step, seen from here: `zero_grad_buffer`; for each microbatch forward and backward, whose hooks
add `param.grad` into `param.main_grad` and free it, all but the last within `no_sync` (a weight
gradient that backward leaves for later comes the same way, from `backward_dw`);
`finish_grad_sync` (by `finalize_model_grads`); the optimizer reads `main_grad`. An optimizer of torch's
own reads `param.grad`: set it to `main_grad` before each of its steps, or the step is refused
(`refuse_idle_optimizer`).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from minimegatron.core.distributed import ddp_config_checks, frozen_alike, grad_checks, step_checks
from minimegatron.core.distributed.data_parallel_base import (
    _BaseDataParallel,
    named_parameters_inside,
)
from minimegatron.core.distributed.ddp_on_demand import OnDemand, refuse_use_before_gathering
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBuffer,
    partition_buckets,
)
from minimegatron.core.parameter import reduce_group
from minimegatron.core.process_groups_config import ProcessGroupCollection, groups_of
from minimegatron.core.tensor_parallel.weight_grad_store import (
    WeightGradStore,
    forget_owed,
    is_owed,
)
from minimegatron.core.transformer.stages_as_told import has_first_stage
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.utils import HALF_DTYPES


def gradient_scaling_factor(
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    num_ranks: int,
    group_size: int | None = None,
) -> float:
    """What gradients are multiplied by before they are summed.

    1 / num_ranks makes the sum a mean. With `calculate_per_token_loss` the sum is wanted as it is,
    for `finalize_model_grads` divides by the global number of tokens; with `average_in_collective`
    the collective divides. Raises ValueError for both.

    Args:
        num_ranks: that have a loss each: the size of `dp_cp`.
        group_size: of the group that is summed over, if that is another; see `core.parameter`.
    """
    ddp_config_checks.check_divided_once(config, ddp_config)
    divided = (group_size or num_ranks) if ddp_config.average_in_collective else 1
    return 1.0 if config.calculate_per_token_loss else divided / num_ranks


class DistributedDataParallel(OnDemand, _BaseDataParallel):
    """Wraps one model chunk. `OnDemand` has what a program may ask between steps. A step calls one of
    these, after the update of a distributed optimizer without overlap: `start_param_sync`, which with
    `force_sync` gathers the parameters of all groups, and waits.

    Args:
        config: of the model; `calculate_per_token_loss` decides the scaling of gradients.
        ddp_config: buckets, overlap, precision.
        module: the chunk. Parameters with `requires_grad=False` are left alone; they must stay so.
        disable_bucketing: one bucket per buffer. `get_model` sets it for all chunks but the one that
            the model begins in, and other ranks than that one's do the same: in a pipeline's flush
            only stage 0 computes until the end, so only there is communication hidden by being cut
            up.
        pg_collection: needs `dp_cp`, `pp` and what the parameters are reduced over; None for the
            module's own, or `parallel_state`'s (see `groups_of`).

    `all_bucket_groups` are in the order of backward, so the next forward meets them in reverse.
    Megatron's names have them apart: `buffers` and `bucket_groups` are of dense parameters,
    `expert_parallel_buffers` and `expert_parallel_bucket_groups` of those that are summed over other
    ranks; without experts these are empty.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config, module, ddp_config)
        self.pg_collection = pg_collection = groups_of(module, pg_collection)
        self.dp_cp_group = pg_collection.dp_cp
        # Without overlap nothing is gained by several launches; on a later stage neither, whoever
        # wraps the chunk (see `disable_bucketing`).
        is_cut_up = ddp_config.overlap_grad_reduce and not disable_bucketing
        is_cut_up = is_cut_up and has_first_stage(pg_collection.pp, config)
        size = ddp_config.bucket_size or max(40_000_000, 1_000_000 * self.dp_cp_group.size())
        self.bucket_size = size if is_cut_up else None
        self.all_buffers = self._allocate_buffers()
        frozen_alike.refuse_unmarked_in_experts(module, pg_collection)
        self.all_bucket_groups = partition_buckets(
            self.all_buffers,
            backward_order=[*module.parameters()][::-1],
            force_single_bucket_group=not ddp_config.overlap_grad_reduce,
        )
        self.param_to_bucket_group = {
            param: group for group in self.all_bucket_groups for param in group.params
        }
        # By address: a layer may be given `weight.detach()`, another tensor at the same address.
        self._group_at = {
            param.data_ptr(): group for param, group in self.param_to_bucket_group.items()
        }
        self.optimizer_checks_grads = False
        """Whether `check_grads` is called by an optimizer. If not, `finish_grad_sync` calls it."""
        self._places = step_checks.places_in(self.all_buffers)
        self._gathering_hooks: list[Any] = []
        self._register_hooks()

    def _allocate_buffers(self) -> list[_ParamAndGradBuffer]:
        """One buffer per (parameter dtype, gradient dtype, group that gradients are summed over)."""
        named = named_parameters_inside(self.module)
        param_to_name = {param: name for name, param in named if param.requires_grad}
        params_of: dict[tuple[torch.dtype, torch.dtype, Any], list[torch.nn.Parameter]] = {}
        for param in param_to_name:
            param.grad_added_to_main_grad = False
            in_fp32 = self.ddp_config.grad_reduce_in_fp32 and param.dtype in HALF_DTYPES
            grad_dtype = torch.float32 if in_fp32 else param.dtype
            key = (param.dtype, grad_dtype, reduce_group(param, self.pg_collection))
            params_of.setdefault(key, []).append(param)
        num_ranks = self.dp_cp_group.size()
        return [
            _ParamAndGradBuffer(
                self.ddp_config,
                param_dtype,
                grad_dtype,
                params,
                group,
                self.bucket_size,
                param_to_name,
                gradient_scaling_factor(self.config, self.ddp_config, num_ranks, group.size()),
            )
            for (param_dtype, grad_dtype, group), params in params_of.items()
        ]

    def _register_hooks(self) -> None:
        step_checks.watch_torch_optimizers()
        # Torch never frees what such a hook holds, and this wrapper holds the groups.
        wrapper = weakref.ref(self)

        def after_grad(param: torch.nn.Parameter) -> None:
            if (ddp := wrapper()) is not None:
                ddp._after_grad(param)

        for param in self.param_to_bucket_group:
            param.register_post_accumulate_grad_hook(after_grad)
        if self.ddp_config.overlap_param_gather:
            for submodule in self.module.modules():
                submodule.register_state_dict_pre_hook(self._before_state_dict)
                submodule.register_load_state_dict_pre_hook(self._before_state_dict)
            self.enable_forward_pre_hook()

    def enable_forward_pre_hook(self) -> None:
        """From now on a forward gathers what it needs of the parameters, just before it needs it.

        With `overlap_param_gather` it is so from the beginning.
        """
        assert not self._gathering_hooks, "the forward hooks are there already"
        self._gathering_hooks = [
            submodule.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            for submodule in self.module.modules()
        ]

    def _after_grad(self, param: torch.nn.Parameter) -> None:
        """Hook, once a gradient of this microbatch is in `param.grad`: by backward or `backward_dw`.

        A layer that adds its weight gradient into `main_grad` itself sets
        `param.grad_added_to_main_grad` and returns some gradient of the right shape (an expanded
        zero costs nothing). A layer that owes its weight gradient returns None; torch 2.13 then
        calls this hook all the same, torch 2.9 to 2.12 do not. It does nothing.
        """
        if param.grad is None and not param.grad_added_to_main_grad:
            return
        group = self.param_to_bucket_group[param]
        if group.params_are_stale or group.param_gather_handles is not None:
            refuse_use_before_gathering(group.params[param])
        if not param.grad_added_to_main_grad:
            param.main_grad.add_(param.grad)
        param.grad_added_to_main_grad = False
        param.grad = None
        self._grads_came = self._grads_are_partial = True
        # Another microbatch's weight gradient, or the output layer's for a tied embedding, may follow.
        more_follows = WeightGradStore.any_made and is_owed(param)
        if self.ddp_config.overlap_grad_reduce and not more_follows:
            group.register_grad_ready(param)

    def _before_forward(
        self, submodule: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Forward hook: before a submodule computes, the weights that it reads must have arrived.

        Its own, and those that it is given, as the output layer is given the embedding's.
        """
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        for weight in (*submodule.parameters(recurse=False), *given):
            if (group := self._group_at.get(weight.data_ptr())) is not None:
                group.finish_param_sync()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, gradients accumulate and no bucket is launched."""
        for group in self.all_bucket_groups:
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group in self.all_bucket_groups:
                group.is_last_microbatch = True

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Returns once `main_grad` holds the gradients of all data-parallel ranks.

        With a distributed optimizer only this rank's shard of every bucket does, unless
        `force_all_reduce`. Raises RuntimeError naming the parameters if weight gradients are still
        owed or if, with overlap, some bucket was never launched.
        """
        for group in self.all_bucket_groups:
            group.check_launched(force_all_reduce)
        for group in self.all_bucket_groups:
            group.finish_grad_sync(force_all_reduce)
        self._grads_came = False
        if not self.optimizer_checks_grads:
            self.check_grads()

    def check_grads(self) -> None:
        """Raises RuntimeError for gradients that nobody has made final since they came.

        On a GPU also where this rank's gradients were not finite before the sum. The optimizer calls it
        with the gradient norm, for which the program waits anyway. On a CPU, `start_grad_sync` has
        looked already.
        """
        if self._grads_are_partial:
            params, is_synced = self.param_to_bucket_group, not self._grads_came
            step_checks.refuse_unsummed_grads(params, self.pg_collection, is_synced)
        groups = self.all_bucket_groups
        if groups and groups[0].is_asynchronous:
            grad_checks.check_noted_grads(groups)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's; RuntimeError where parts of it are missing and no hook gathers them."""
        self.check_params()
        return self.module(*inputs, **kwargs)

    def check_params(self) -> None:
        """Before a forward: raises RuntimeError for parameters that nobody will gather."""
        if self.ddp_config.use_distributed_optimizer and not self._gathering_hooks:
            self._require_complete_params("forward hooks, which are off")

    def params_were_updated(self) -> None:
        """Called by the distributed optimizer: this rank's shard of every bucket is new.

        Gathers them all, or with overlap launches only the bucket that forward needs first: each
        bucket's first use launches the next.
        """
        for group in self.all_bucket_groups:
            group.params_are_stale = True
        if not self.ddp_config.overlap_param_gather:
            self.start_param_sync(force_sync=True)
        elif self.all_bucket_groups:
            self.all_bucket_groups[-1].start_param_sync()

    def zero_grad_buffer(self) -> None:
        """Sets all gradients to zero, and forgets those that are owed; before each step.

        The first call compares the copies of the chunk, so all ranks that have one must make it; no
        observer sees that. Raises ValueError where the copies would sum other gradients, and if a
        parameter's `requires_grad`, dtype or memory, or what gradients are divided by, is not what it
        was when the module was wrapped.
        """
        if not self._is_compared:
            self._compare_copies()
        self._begin_grads()
        if WeightGradStore.any_made:
            forget_owed(self.param_to_bucket_group)
        for param in self.param_to_bucket_group:
            # A step that failed in a hook may have left it here.
            param.grad, param.grad_added_to_main_grad = None, False
        for buffer in self.all_buffers:
            buffer.reset()
        for group in self.all_bucket_groups:
            group.reset()
