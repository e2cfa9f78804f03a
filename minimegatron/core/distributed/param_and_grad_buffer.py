"""Contiguous memory for gradients (and parameters), cut into buckets that are summed as a whole.

Counterpart: `megatron.core.distributed.param_and_grad_buffer`, under the same names.

Backward produces the last layer's gradient first, so parameters are laid out in reverse: a bucket
is a stretch of the buffer whose gradients arrive one after the other, and can be on its way while
earlier layers still compute. A bucket ends with the parameter that fills it.

    params       embed  layer0  layer1  head             (the order of module.parameters())
    buffer       [ head  layer1 | layer0  embed ]        two buckets
    with ZeRO-1  [ head  layer1 . | layer0  embed . . ]  padded so that every rank's shard is equal

From top to bottom: a bucket, a group of buckets with its communication, the buffer that owns the
memory. Where everything lies in it is arithmetic: `buffer_layout`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import tracing
from minimegatron.core.collectives import ReduceOp, all_gather, all_reduce, new_lane, reduce_scatter
from minimegatron.core.distributed import grad_checks
from minimegatron.core.distributed.buffer_layout import BufferLayout, lay_out_buffer  # noqa: F401  asked here too
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from minimegatron.core.tensor_parallel.weight_grad_store import WeightGradStore
from minimegatron.core.tracing import traced
from minimegatron.core.utils import device_is_asynchronous


def shard_buffer(buffer: torch.Tensor, data_parallel_world_size: int) -> list[torch.Tensor]:
    """`buffer` in equal slices, one for each rank: number i is what a reduce-scatter leaves to rank i.

    Views. RuntimeError where the number of ranks does not divide the number of elements.
    """
    return [*buffer.view(data_parallel_world_size, -1)]


@dataclass(eq=False)
class _ParamAndGradBucket:
    """One stretch of a buffer: the unit of communication."""

    params: dict[torch.nn.Parameter, str]
    """Its parameters, by name for messages."""
    param_data: torch.Tensor | None
    """The parameters themselves, only with a distributed optimizer."""
    grad_data: torch.Tensor
    offset: int
    """Where in the buffer it starts."""
    numel_unpadded: int
    gradient_scaling_factor: float
    """What gradients are multiplied by before they are summed."""
    bucket_id: int
    noted: torch.Tensor | None = None
    """On a GPU: of each gradient the largest absolute value, before the last sum."""


class _ParamAndGradBucketGroup:
    """Buckets that are launched together: with overlap one, without it all of a model chunk's.

    In one step: `register_grad_ready` for each parameter during the last backward, which calls
    `start_grad_sync` at the last of them; `finish_grad_sync`; the optimizer; then, with a
    distributed optimizer, `start_param_sync` and `finish_param_sync` before the next forward.

    Groups are launched in one order, whatever the order in which they fill up: collectives of one
    process group are told apart only by their order, and a rank that misses a gradient must not
    offer bucket 2 where its peers offer bucket 1. (Torch's DDP has the same rule. Megatron trusts
    backward; there such a rank sums the wrong buckets, or hangs.)

    Megatron counts, in the first iteration, how often each gradient becomes ready, and overlaps
    from the second on. Here every parameter counts as ready once per backward, so the first
    iteration overlaps too. A second gradient, or a missing one, raises an error.
    """

    def __init__(
        self,
        buckets: list[_ParamAndGradBucket],
        ddp_config: DistributedDataParallelConfig,
        data_parallel_group: dist.ProcessGroup,
    ):
        self.buckets = buckets
        self.ddp_config, self.data_parallel_group = ddp_config, data_parallel_group
        self.params = {param: name for bucket in buckets for param, name in bucket.params.items()}
        # Neighbours in the order of backward. Forward meets the groups in the opposite order.
        self.previous_bucket_group: _ParamAndGradBucketGroup | None = None
        self.next_bucket_group: _ParamAndGradBucketGroup | None = None
        # False within `no_sync`.
        self.is_last_microbatch = True
        self.params_with_grad: set[torch.nn.Parameter] = set()
        # Both None until launched, then one per bucket.
        self.grad_reduce_handles: list[Any] | None = None
        self.param_gather_handles: list[Any] | None = None
        self.reset()
        # True from the optimizer's update of the local shards until their gathering is launched.
        self.params_are_stale = False
        # The gathering belongs to the update, not to the step in which it happens to be launched; so
        # it has a lane of its own, from the first time on.
        self._lane: int | None = None

    # -- Gradients --

    def reset(self) -> None:
        """Readies the group for the next step."""
        self.params_with_grad.clear()
        self.grad_reduce_handles = None
        # Who judges the gradients, and whether a look at a number would stop the program.
        self._machine, self.is_asynchronous = get_rerun_state_machine(), device_is_asynchronous()

    def register_grad_ready(self, param: torch.nn.Parameter) -> None:
        """Notes that `param.main_grad` is complete; launches the groups that are now due.

        For `overlap_grad_reduce` alone: without it, `finish_grad_sync` launches.
        """
        assert self.ddp_config.overlap_grad_reduce, "without overlap, no gradient is counted"
        if self.grad_reduce_handles is not None:
            grad_checks.refuse_another_grad(self.params[param])
        if not self.is_last_microbatch:
            return
        self.params_with_grad.add(param)
        self._launch_what_is_due()

    def _launch_what_is_due(self) -> None:
        group: _ParamAndGradBucketGroup | None = self
        while group is not None and group._is_due():
            group.start_grad_sync()
            group = group.next_bucket_group

    def _is_due(self) -> bool:
        """True when it is complete, and its turn."""
        previous = self.previous_bucket_group
        is_its_turn = previous is None or previous.grad_reduce_handles is not None
        is_complete = len(self.params_with_grad) == len(self.params)
        return is_complete and is_its_turn and self.grad_reduce_handles is None

    @traced("bucket-launch", tracing.of_bucket_launch)
    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Launches one collective per bucket, without waiting for any.

        A reduce-scatter into this rank's shard with a distributed optimizer, else an all-reduce.
        """
        assert self.grad_reduce_handles is None, "launched twice in one step"
        if self.ddp_config.check_for_nan_in_grad:
            self._check_grads()
        self.grad_reduce_handles = [self._reduce(one, force_all_reduce) for one in self.buckets]

    def _reduce(self, bucket: _ParamAndGradBucket, force_all_reduce: bool) -> Any:
        if bucket.gradient_scaling_factor != 1.0:
            bucket.grad_data.mul_(bucket.gradient_scaling_factor)
        group = self.data_parallel_group
        op = ReduceOp.AVG if self.ddp_config.average_in_collective else ReduceOp.SUM
        if not self.ddp_config.use_distributed_optimizer or force_all_reduce:
            return all_reduce(bucket.grad_data, group, op, async_op=True)
        shard = shard_buffer(bucket.grad_data, group.size())[group.rank()]
        return reduce_scatter(shard, bucket.grad_data, group, op, async_op=True)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Waits for the sum. Without overlap it is launched here, unless somebody has launched it."""
        if self.grad_reduce_handles is None:
            assert not self.ddp_config.overlap_grad_reduce, "never launched: a gradient is missing"
            self.start_grad_sync(force_all_reduce)
        for handle in self.grad_reduce_handles:
            handle.wait()
        self.reset()

    def check_launched(self, force_all_reduce: bool) -> None:
        """With overlap, raises RuntimeError naming the parameters that kept the group from launching.

        Called before the first wait. A peer whose gradients did all come has launched, and waits
        for us: to launch now would hide the fault, and to wait on other buckets would hang. With or
        without overlap, raises RuntimeError for weight gradients that are owed.
        """
        is_late = force_all_reduce or self.grad_reduce_handles is None
        if WeightGradStore.any_made or self.ddp_config.overlap_grad_reduce and is_late:
            grad_checks.check_launched(self, force_all_reduce)

    def _check_grads(self) -> None:
        """Has each bucket judged that may be bad: see `grad_checks.judge_bucket`.

        A finite sum has only finite terms. On a GPU that is not looked at here, and where a bad result
        has the step run again, each sum is compared.
        """
        is_told_by_sum = self._machine.mode is RerunMode.DISABLED and not self.is_asynchronous
        for bucket in self.buckets:
            if not (is_told_by_sum and math.isfinite(bucket.grad_data.sum())):
                grad_checks.judge_bucket(bucket, self._machine, self.is_asynchronous)

    # -- Parameters, with a distributed optimizer --

    def start_param_sync(self) -> None:
        """Launches the gathering of updated shards, one all-gather per bucket; once per update."""
        if self.params_are_stale:
            self.params_are_stale = False
            self.param_gather_handles = [self._gather(bucket) for bucket in self.buckets]

    def _gather(self, bucket: _ParamAndGradBucket) -> Any:
        group = self.data_parallel_group
        if self._lane is None:
            self._lane = new_lane(group)
        shard = shard_buffer(bucket.param_data, group.size())[group.rank()]
        return all_gather(bucket.param_data, shard, group, async_op=True, lane=self._lane)

    def finish_param_sync(self) -> None:
        """Makes this group's parameters usable; launches the group that forward needs next."""
        self.start_param_sync()
        if self.param_gather_handles is None:
            return
        for handle in self.param_gather_handles:
            handle.wait()
        self.param_gather_handles = None
        if self.previous_bucket_group is not None:
            self.previous_bucket_group.start_param_sync()


class _ParamAndGradBuffer:
    """The memory: gradients of parameters of one dtype, and with ZeRO-1 the parameters too.

    Args:
        param_dtype, grad_dtype: of `param_data` and `grad_data`.
        params: in module order; all of `param_dtype`.
        data_parallel_group: the ranks over which gradients are summed.
        bucket_size: elements per bucket, None for one bucket.
        param_to_name: for messages.
        gradient_scaling_factor: applied to every gradient before summation.

    Afterwards `param.main_grad` is a view into `grad_data`, shaped like `param`, and with a
    distributed optimizer `param.data` is a view into `param_data`. `param_index_map[param]` is
    (start, end, bucket_id).
    """

    def __init__(
        self,
        ddp_config: DistributedDataParallelConfig,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        params: list[torch.nn.Parameter],
        data_parallel_group: dist.ProcessGroup,
        bucket_size: int | None,
        param_to_name: Mapping[torch.nn.Parameter, str],
        gradient_scaling_factor: float,
    ):
        self.ddp_config, self.data_parallel_group = ddp_config, data_parallel_group
        self.param_dtype, self.grad_dtype = param_dtype, grad_dtype
        self.params = params
        sharded, device = ddp_config.use_distributed_optimizer, params[0].device
        self.layout = lay_out_buffer(
            [param.numel() for param in params],
            [self._needs_own_bucket(param) for param in params],
            bucket_size,
            data_parallel_group.size() if sharded else None,
        )
        self.numel = self.layout.numel
        self.param_index_map = dict(zip(params, self.layout.params, strict=True))
        self.grad_data = torch.zeros(self.numel, dtype=grad_dtype, device=device)
        of_params = {"dtype": param_dtype, "device": device}
        self.param_data = torch.zeros(self.numel, **of_params) if sharded else None
        for param, (start, end, _) in self.param_index_map.items():
            param.main_grad = self.grad_data[start:end].view(param.shape)
            if self.param_data is not None:
                inside = self.param_data[start:end].view(param.shape)
                inside.copy_(param.data)
                param.data = inside
        self.buckets = [
            _ParamAndGradBucket(
                params={
                    param: param_to_name[param]
                    for param, (_, _, its_bucket) in self.param_index_map.items()
                    if its_bucket == bucket_id
                },
                param_data=None if self.param_data is None else self.param_data[start:end],
                grad_data=self.grad_data[start:end],
                offset=start,
                numel_unpadded=self.layout.buckets_unpadded[bucket_id],
                gradient_scaling_factor=gradient_scaling_factor,
                bucket_id=bucket_id,
            )
            for bucket_id, (start, end) in enumerate(self.layout.buckets)
        ]

    def _needs_own_bucket(self, param: torch.nn.Parameter) -> bool:
        """True for a weight that several stages have copies of: of words, in T5 also of positions.

        After a reduce-scatter, data-parallel rank i holds shard i of a bucket. The copies'
        gradients are then summed between the stages, rank i with rank i: the shards must cover
        the same elements on all of them, which only a bucket of nothing else makes sure of.
        """
        has_copies = getattr(param, "shared_embedding", False) or hasattr(param, "shared")
        return self.ddp_config.use_distributed_optimizer and has_copies

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies all gradients, in place."""
        self.grad_data.mul_(scaling_factor)

    def reset(self) -> None:
        """Sets all gradients to zero."""
        self.grad_data.zero_()


def partition_buckets(
    buffers: Iterable[_ParamAndGradBuffer],
    force_single_bucket_group: bool = False,
    *,
    backward_order: Iterable[torch.nn.Parameter] | None = None,
) -> list[_ParamAndGradBucketGroup]:
    """One group per bucket, or a single one for all that are summed over the same ranks.

    In the order in which they should fill up. `backward_order` are all parameters, last layer first;
    None for one buffer, whose buckets are in that order. Buckets of several buffers take their places
    between each other: by the last gradient that each has to wait for.
    """
    buckets = [(bucket, buffer) for buffer in buffers for bucket in buffer.buckets]
    if backward_order is not None:
        place = {param: i for i, param in enumerate(backward_order)}
        buckets.sort(key=lambda pair: max(place[param] for param in pair[0].params))
    parts: dict[Any, tuple[list[_ParamAndGradBucket], _ParamAndGradBuffer]] = {}
    for bucket, buffer in buckets:
        key = buffer.data_parallel_group if force_single_bucket_group else bucket
        parts.setdefault(key, ([], buffer))[0].append(bucket)
    groups = [
        _ParamAndGradBucketGroup(part, buffer.ddp_config, buffer.data_parallel_group)
        for part, buffer in parts.values()
    ]
    for earlier, later in pairwise(groups):
        earlier.next_bucket_group, later.previous_bucket_group = later, earlier
    return groups
