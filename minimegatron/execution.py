"""Runs a planned schedule on real ranks: a user's order of work, with real tensors and gradients.

Called by: whoever wrote a schedule, as a `forward_backward_func` (pass it where
`get_forward_backward_func()` would stand). Calls: `planner.plan` for this stage's list of actions,
`planner.check` before anything moves, then `ModelChunk` and `P2PCommunicator`, one call per action.
Megatron has no counterpart: a schedule there is the code that runs it.

The built-in schedules do not come this way; they are written out to be read. But their plans can be
run here too, and do the same: see `tests/test_execution.py`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.core.distributed.torch_ddp import TorchDistributedDataParallel
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.model_chunk import ModelChunk
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.send_limits import (
    FORWARD_ONLY_SEND_LIMIT,
    SEND_LIMIT,
    SendPlan,
)
from minimegatron.core.pipeline_parallel.step_frame import StepFrame, framed_schedule
from minimegatron.core.pipeline_parallel.utils import get_tensor_shapes
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.utils import get_model_config
from minimegatron.planner.actions import (
    ACTIVATION,
    BACKWARD,
    COMMUNICATE,
    FORWARD,
    GRADIENT,
    RECEIVE,
    SEND,
    Action,
    Message,
)
from minimegatron.planner.check import require_valid
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.registry import ScheduleFunction
from minimegatron.planner.unreceived import count_unreceived


def get_planned_forward_backward_func(name_or_function: str | ScheduleFunction) -> Callable:
    """A function like those of `get_forward_backward_func`, in the order of a planned schedule.

    Args:
        name_or_function: what `register_schedule` registered, or the function itself.

    The returned function takes the same keyword arguments; `adjust_tensor_shapes_fn` must be None.
    It raises `planner.check.ScheduleError` (a ValueError), naming rank and microbatch, if the
    schedule could not work: before any message is sent, and on every rank alike.
    """

    def forward_backward_planned(
        *,
        forward_step_func: Callable,
        data_iterator: Iterator | list[Iterator],
        model: torch.nn.Module | list[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable | None = None,
        p2p_communicator: P2PCommunicator | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> list:
        if adjust_tensor_shapes_fn is not None:
            raise ValueError(
                "a planned schedule sends one shape, but adjust_tensor_shapes_fn is given; use "
                "plain 1F1B (get_forward_backward_func), or leave it out"
            )
        models = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(models[0])
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        p2p = p2p_communicator or P2PCommunicator(pg_collection.pp, config)
        step = require_valid(
            _plan_step(name_or_function, p2p, len(models), num_microbatches, forward_only)
        )
        frame = _make_frame(config, pg_collection, p2p, step)
        actions = step.ranks[p2p.pp_group.rank()]
        for chunk_id, (chunk, iterator) in enumerate(zip(models, iterators, strict=True)):
            frame.add_chunk(
                forward_step_func,
                iterator,
                chunk,
                num_microbatches,
                collect_non_loss_data=collect_non_loss_data,
                first_val_step=first_val_step,
                num_in_flight=_count_in_flight(actions),
                vp_stage=None if p2p.virtual_pipeline_model_parallel_size is None else chunk_id,
                is_last_stage=_is_last(p2p, chunk_id, len(models)),
            )
        _refuse_torch_ddp(models, 0 if forward_only else _count_in_flight(actions))
        (shape,) = get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=pg_collection.tp,
            cp_group=pg_collection.cp,
        )
        with frame:
            _PlannedRun(actions, frame.chunks, p2p, shape).run()
        return frame.forward_data_store

    is_name = isinstance(name_or_function, str)
    name = name_or_function if is_name else name_or_function.__name__
    return framed_schedule(forward_backward_planned, name)


def _plan_step(
    name_or_function: str | ScheduleFunction,
    p2p: P2PCommunicator,
    num_chunks: int,
    num_microbatches: int,
    forward_only: bool,
) -> Plan:
    interleaved = p2p.virtual_pipeline_model_parallel_size is not None
    return plan(
        name_or_function,
        p2p.pp_group.size(),
        num_microbatches,
        vpp=num_chunks if interleaved else None,
        group_size=p2p.config.microbatch_group_size_per_vp_stage if interleaved else None,
        forward_only=forward_only,
        overlap_p2p_comm=interleaved and p2p.config.overlap_p2p_comm,
        batch_p2p_comm=p2p.config.batch_p2p_comm,
    )


def _make_frame(
    config: ModelParallelConfig,
    pg_collection: ProcessGroupCollection,
    p2p: P2PCommunicator,
    step: Plan,
) -> StepFrame:
    rank, num_stages = p2p.pp_group.rank(), p2p.pp_group.size()
    order = None
    if p2p.virtual_pipeline_model_parallel_size is not None:
        order = [(a.microbatch, a.chunk) for a in step.ranks[rank] if a.kind == FORWARD]
    return StepFrame(
        config,
        pg_collection,
        p2p if num_stages > 1 else None,
        step.config.forward_only,
        order,
        _plan_sends(step, rank),
    )


def _is_last(p2p: P2PCommunicator, chunk_id: int, num_chunks: int) -> bool:
    return p2p.pp_group.rank() == p2p.pp_group.size() - 1 and chunk_id == num_chunks - 1


def _plan_sends(step: Plan, rank: int) -> SendPlan:
    least = FORWARD_ONLY_SEND_LIMIT if step.config.forward_only else SEND_LIMIT
    limits = {channel: k for channel, k in count_unreceived(step)[rank].items() if k > least}
    chunks: dict[str, list[int]] = {ACTIVATION: [], GRADIENT: []}
    for action in step.ranks[rank]:
        for message in action.messages:
            if message.direction == SEND:
                chunks[message.payload].append(message.chunk)
    return SendPlan(least, limits, chunks)


def _refuse_torch_ddp(models: list[torch.nn.Module], num_in_flight: int) -> None:
    kinds = (TorchDistributedDataParallel, torch.nn.parallel.DistributedDataParallel)
    if num_in_flight > 1 and any(isinstance(model, kinds) for model in models):
        raise ValueError(
            f"this schedule has {num_in_flight} microbatches in flight, but torch's "
            "DistributedDataParallel pairs each backward with the latest forward and would not sum "
            "gradients; use our own, or a schedule with one in flight"
        )


def _count_in_flight(actions: list[Action]) -> int:
    """Forwards before the first backward: what a schedule calls its warm-up, and one more."""
    kinds = [action.kind for action in actions if action.kind != COMMUNICATE]
    return max(1, kinds.index(BACKWARD) if BACKWARD in kinds else len(kinds))


class _PlannedRun:
    """One stage's actions, one after the other.

    `_made` holds what has been computed here and is not yet sent, `_arrived` what has arrived and is
    not yet used, by payload, microbatch and chunk; a received tensor comes with the handle to wait
    for, or None.
    """

    def __init__(
        self,
        actions: list[Action],
        chunks: list[ModelChunk],
        p2p: P2PCommunicator,
        shape: tuple[int, ...],
    ):
        self.actions, self.chunks, self.p2p, self.shape = actions, chunks, p2p, shape
        self._made: dict[tuple, torch.Tensor] = {}
        self._arrived: dict[tuple, tuple[torch.Tensor, Any]] = {}

    def run(self) -> None:
        """All of them."""
        for action in self.actions:
            if action.kind == FORWARD:
                self._forward(action)
            elif action.kind == BACKWARD:
                self._backward(action)
            else:
                self._communicate(action)

    def _forward(self, action: Action) -> None:
        unit = (action.microbatch, action.chunk)
        received = self._take(ACTIVATION, unit)
        chunk = self.chunks[action.chunk]
        output = chunk.forward_step(action.microbatch, received)
        if not chunk.is_last_stage:  # a loss is sent nowhere, and would keep its graph
            self._made[ACTIVATION, unit] = output

    def _backward(self, action: Action) -> None:
        unit = (action.microbatch, action.chunk)
        grad = self._take(GRADIENT, unit)
        chunk = self.chunks[action.chunk]
        self._made[GRADIENT, unit] = chunk.backward_step(grad, action.microbatch)

    def _take(self, payload: str, unit: tuple[int, int]) -> torch.Tensor | None:
        tensor, handle = self._arrived.pop((payload, unit), (None, None))
        if handle is not None:
            handle.wait()
        return tensor

    def _communicate(self, action: Action) -> None:
        found = {(message.direction, message.payload): message for message in action.messages}
        output = self._to_send(found.get((SEND, ACTIVATION)))
        input_grad = self._to_send(found.get((SEND, GRADIENT)))
        new_input, new_grad = found.get((RECEIVE, ACTIVATION)), found.get((RECEIVE, GRADIENT))
        received = self._call(action, output, input_grad, new_input, new_grad)
        for message, (tensor, handle) in zip((new_input, new_grad), received, strict=True):
            if message is not None:
                unit = (message.microbatch, message.chunk)
                self._arrived[message.payload, unit] = (tensor, handle)
        if output is not None:
            self.chunks[found[SEND, ACTIVATION].chunk].free_output(output)

    def _to_send(self, message: Message | None) -> torch.Tensor | None:
        if message is None:
            return None
        return self._made.pop((message.payload, (message.microbatch, message.chunk)))

    def _call(
        self,
        action: Action,
        output: torch.Tensor | None,
        input_grad: torch.Tensor | None,
        new_input: Message | None,
        new_grad: Message | None,
    ) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """The communicator's method of that name; returns (input, handle), (gradient, handle)."""
        method, shape = getattr(self.p2p, action.call), self.shape
        recv_prev, recv_next = new_input is not None, new_grad is not None
        if action.call == "recv_forward":
            return (method(shape, not recv_prev), None), (None, None)
        if action.call == "recv_backward":
            return (None, None), (method(shape, not recv_next), None)
        if action.call in ("send_forward", "send_backward"):
            tensor = output if action.call == "send_forward" else input_grad
            method(tensor, tensor is None)
            return (None, None), (None, None)
        if action.call == "send_forward_recv_backward":
            return (None, None), (method(output, shape, not recv_next), None)
        if action.call == "send_backward_recv_forward":
            return (method(input_grad, shape, not recv_prev), None), (None, None)
        if action.call == "send_forward_backward_recv_forward_backward":
            tensors = method(output, input_grad, recv_prev, recv_next, shape)
            return (tensors[0], None), (tensors[1], None)
        forward = action.call == "send_forward_recv_forward"
        arguments = (output, recv_prev) if forward else (input_grad, recv_next)
        result = method(*arguments, shape, overlap_p2p_comm=action.overlap)
        tensor, handles = result if action.overlap else (result, {})
        arrived = (tensor, handles.get("recv_prev" if forward else "recv_next"))
        return (arrived, (None, None)) if forward else ((None, None), arrived)
