"""Torch's own data parallelism behind our surface, to compare with and to fall back on.

Megatron's training script wraps the same class (`torchDDP`) in a few lines of its own; the surface
here lets the schedules, `finalize_model_grads` and the optimizers use it unchanged.
"""

from typing import Any

import torch

from minimegatron.core.collectives import broadcast
from minimegatron.core.distributed.data_parallel_base import _BaseDataParallel
from minimegatron.core.distributed.distributed_data_parallel import gradient_scaling_factor
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.distributed.frozen_alike import (
    check_summed_alike,
    refuse_unmarked_in_experts,
)
from minimegatron.core.distributed.step_checks import refuse_unsummed_grads
from minimegatron.core.parameter import reduce_group
from minimegatron.core.process_groups_config import ProcessGroupCollection, groups_of
from minimegatron.core.transformer.transformer_config import TransformerConfig


class TorchDistributedDataParallel(_BaseDataParallel):
    """Wraps one model chunk. Args as for our `DistributedDataParallel`.

    Gradients are in `param.grad`, in the parameters' own dtype. Torch averages them in the backward
    that is not within `no_sync`, and has waited for them when that backward returns.

    Raises ValueError where torch's cannot do the job: with a pipeline, for it pairs each backward
    with the latest forward, while a schedule has several microbatches in flight; with the
    distributed optimizer, which needs buffers it can shard; with fp32 accumulation; with weight
    gradients that come after their backward, which it would send without them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        pg_collection = groups_of(module, pg_collection)
        if pg_collection.pp.size() > 1:
            raise ValueError(
                f"torch's DistributedDataParallel cannot follow a pipeline of "
                f"{pg_collection.pp.size()} stages; use pipeline_model_parallel_size=1 or our own"
            )
        for name in ("use_distributed_optimizer", "grad_reduce_in_fp32"):
            if getattr(ddp_config, name):
                raise ValueError(
                    f"torch's DistributedDataParallel has no gradient buffers of ours, which {name} "
                    "needs; turn that off or use our own"
                )
        for name in ("delay_wgrad_compute", "defer_embedding_wgrad_compute"):
            if getattr(config, name):
                raise ValueError(
                    f"torch's DistributedDataParallel sends a gradient at the end of its backward, "
                    f"but {name} computes weight gradients after it; turn {name} off or use our own"
                )
        others = [
            name
            for name, param in module.named_parameters()
            if reduce_group(param, pg_collection) is not pg_collection.dp_cp
        ]
        if others:
            raise ValueError(
                f"torch's DistributedDataParallel sums all gradients over one group, but those of "
                f"{len(others)} parameters, such as {others[0]}, need another; use our own"
            )
        super().__init__(config, module, ddp_config)
        refuse_unmarked_in_experts(module, pg_collection)
        check_summed_alike(module, pg_collection, ddp_config)
        self._places = {
            param: (param.dtype, param.device, None)
            for param in module.parameters()
            if param.requires_grad
        }
        self.buffers, self.bucket_groups = [], []
        self.expert_parallel_buffers, self.expert_parallel_bucket_groups = [], []
        self.pg_collection, self.dp_cp_group = pg_collection, pg_collection.dp_cp
        # Torch divides by the number of ranks; the loss's contract may want the plain sum.
        num_ranks = self.dp_cp_group.size()
        per_token = config.calculate_per_token_loss
        gradient_scaling_factor(config, ddp_config, num_ranks)  # raises for what excludes itself
        self._undo_mean = float(num_ranks) if per_token else 1.0
        bucket_size = None if disable_bucketing else ddp_config.bucket_size
        self.torch_ddp = torch.nn.parallel.DistributedDataParallel(
            module,
            process_group=self.dp_cp_group,
            bucket_cap_mb=None if bucket_size is None else bucket_size * 4 / 2**20,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, through torch's wrapper."""
        return self.torch_ddp(*inputs, **kwargs)

    def no_sync(self) -> Any:
        """Torch's own: around forward and backward both."""
        return self.torch_ddp.no_sync()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Undoes torch's mean where the sum is wanted."""
        if self._undo_mean != 1.0:
            self.scale_gradients(self._undo_mean)

    def check_grads(self) -> None:
        """RuntimeError where gradients need `finalize_model_grads` and have not seen it."""
        if not self._grads_are_final:
            refuse_unsummed_grads(self._places, self.pg_collection, copies_are_summed=True)

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies every gradient by `scaling_factor`, in place."""
        for param in self.module.parameters():
            if param.grad is not None:
                param.grad.mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Forgets all gradients. ValueError where the module is not what it was when it was wrapped."""
        self._begin_grads()
        for param in self.module.parameters():
            param.grad = None

    def broadcast_params(self) -> None:
        """Copies every parameter from data-parallel rank 0 to the others."""
        for param in self.module.parameters():
            broadcast(param.data, 0, self.dp_cp_group)
