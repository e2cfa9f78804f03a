"""ZeRO-1: data-parallel ranks each update one shard of the parameters, and exchange the results.

Counterpart: `megatron.core.optimizer.distrib_optimizer.DistributedOptimizer`.

Adam keeps 12 bytes per bf16 parameter (main copy and two moments), and d data-parallel ranks would
keep them d times. Here rank r keeps the r-th part of every bucket:

    bucket      |  layer1.weight          |  layer1.bias  |  layer0.weight          |  pad |
    rank        |         0         |         1         |         2         |      3       |

    gradients   reduce-scatter   each rank gets the sum of its own shard only
    update      local            each rank's shard, whatever parameters it cuts through
    parameters  all-gather       at once, or before the next forward needs them

With gradients and parameters of one dtype, the bytes sent are those of one all-reduce.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from minimegatron.core.optimizer.grad_scaler import MegatronGradScaler
from minimegatron.core.optimizer.optimizer import MixedPrecisionOptimizer, ParamShard
from minimegatron.core.optimizer.optimizer_config import OptimizerConfig
from minimegatron.core.optimizer.param_groups import NamedParamGroup
from minimegatron.core.parameter import ParameterKind
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tracing import traced


def local_ranges(buffer: _ParamAndGradBuffer) -> dict[torch.nn.Parameter, tuple[int, int]]:
    """For each parameter that this rank's shards touch, which of its elements they cover.

    A parameter lies in one bucket and a rank has one stretch of each bucket, so the elements are
    one range [start, end) of the flattened parameter.
    """
    group = buffer.data_parallel_group
    ranges = {}
    for param, (param_start, param_end, bucket_id) in buffer.param_index_map.items():
        bucket = buffer.buckets[bucket_id]
        shard_numel = bucket.grad_data.numel() // group.size()
        shard_start = bucket.offset + group.rank() * shard_numel
        start = max(param_start, shard_start)
        end = min(param_end, shard_start + shard_numel)
        if start < end:
            ranges[param] = (start - param_start, end - param_start)
    return ranges


class DistributedOptimizer(MixedPrecisionOptimizer):
    """As the other optimizers, for one shard; any dtype.

    Args: as for `MegatronOptimizer`, and `model_chunks`, each in a `DistributedDataParallel` whose
    configuration has `use_distributed_optimizer`.

    Between a step and the next forward, with `overlap_param_gather`, the model's parameters are a
    mixture of old and new: `DDP.start_param_sync(force_sync=True)` before reading them otherwise. It
    says which readers are refused, and which are not.
    """

    def __init__(
        self,
        param_groups: Sequence[NamedParamGroup],
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
        pg_collection: ProcessGroupCollection,
        model_chunks: Sequence[DistributedDataParallel],
    ):
        self.model_chunks = model_chunks
        # -- Which part of which parameter is ours --
        # Needed by `_make_shard`, which the base class calls.
        self._ranges: dict[torch.nn.Parameter, tuple[int, int]] = {}
        for chunk in model_chunks:
            for buffer in chunk.all_buffers:
                self._ranges |= local_ranges(buffer)
        super().__init__(param_groups, config, grad_scaler, pg_collection)

    def _grad_stats_groups(self, kind: ParameterKind) -> tuple[dist.ProcessGroup, ...]:
        # Every element is on one of the ranks that have the parameter, so these count too.
        return (getattr(self.pg_collection, kind.reduce), *super()._grad_stats_groups(kind))

    def _make_shard(self, name: str, param: torch.nn.Parameter) -> ParamShard | None:
        if param not in self._ranges:
            return None
        start, end = self._ranges[param]
        main_param = self._main_copy_or_view(param.detach().view(-1)[start:end])
        if end - start == param.numel():
            main_param = main_param.view(param.shape)
        return ParamShard(name, param, main_param, start, end)

    def step_with_ready_grads(self) -> bool:
        """Updates this rank's shard, then sees to it that all ranks get all shards."""
        update_successful = super().step_with_ready_grads()
        self._gather_params()
        return update_successful

    @traced("params-all-gather")
    def _gather_params(self) -> None:
        for chunk in self.model_chunks:
            chunk.params_were_updated()
