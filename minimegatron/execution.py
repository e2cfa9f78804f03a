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

from minimegatron.core.pipeline_parallel.model_chunk import ModelChunk
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.utils import (
    GradSync,
    finish_step,
    get_tensor_shapes,
    schedule,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.utils import get_model_config
from minimegatron.planner.actions import (
    ACTIVATION,
    BACKWARD,
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


def get_planned_forward_backward_func(name_or_function: str | ScheduleFunction) -> Callable:
    """A function like those of `get_forward_backward_func`, in the order of a planned schedule.

    Args:
        name_or_function: what `register_schedule` registered, or the function itself.

    The returned function takes the same keyword arguments, without `adjust_tensor_shapes_fn` and
    `first_val_step`. It raises `planner.check.ScheduleError` (a ValueError), naming rank and
    microbatch, if the schedule could not work: before any message is sent, and on every rank alike.
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
        p2p_communicator: P2PCommunicator | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> list:
        models = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(models[0])
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        p2p = p2p_communicator or P2PCommunicator(pg_collection.pp, config)
        step = require_valid(
            _plan_step(name_or_function, p2p, len(models), num_microbatches, forward_only)
        )
        forward_data_store: list = []
        chunks = [
            ModelChunk(
                forward_step_func,
                iterator,
                chunk,
                num_microbatches,
                forward_data_store=forward_data_store,
                cp_group_size=pg_collection.cp.size(),
                collect_non_loss_data=collect_non_loss_data,
                forward_only=forward_only,
                vp_stage=chunk_id if len(models) > 1 else None,
                is_last_stage=_is_last(p2p, chunk_id, len(models)),
            )
            for chunk_id, (chunk, iterator) in enumerate(zip(models, iterators, strict=True))
        ]
        (shape,) = get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=pg_collection.tp,
            cp_group=pg_collection.cp,
        )
        run = _PlannedRun(step, chunks, p2p, shape)
        run.run()
        finish_step(config, chunks, forward_only, pg_collection)
        return forward_data_store

    is_name = isinstance(name_or_function, str)
    name = name_or_function if is_name else name_or_function.__name__
    return schedule(forward_backward_planned, name)


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


def _is_last(p2p: P2PCommunicator, chunk_id: int, num_chunks: int) -> bool:
    return p2p.pp_group.rank() == p2p.pp_group.size() - 1 and chunk_id == num_chunks - 1


class _PlannedRun:
    """One stage's actions, one after the other.

    `_tensors` holds what has been made or has arrived and is not yet used, by (payload, is it ours
    to send, microbatch, chunk); a received tensor comes with the handle to wait for, or None.
    """

    def __init__(
        self, step: Plan, chunks: list[ModelChunk], p2p: P2PCommunicator, shape: tuple[int, ...]
    ):
        self.actions = step.ranks[p2p.pp_group.rank()]
        self.chunks, self.p2p, self.shape = chunks, p2p, shape
        self.grad_sync = GradSync(chunks[0].config)
        self._made: dict[tuple, torch.Tensor] = {}
        self._arrived: dict[tuple, tuple[torch.Tensor, Any]] = {}
        self._num_backwards_left = [0] * len(chunks)
        for action in self.actions:
            if action.kind == BACKWARD:
                self._num_backwards_left[action.chunk] += 1

    def run(self) -> None:
        """All of them, and then the gradients' communication that is left to launch."""
        for place, action in enumerate(self.actions):
            if action.kind == FORWARD:
                self._forward(action, place)
            elif action.kind == BACKWARD:
                self._backward(action)
            else:
                self._communicate(action)
        self.p2p.finish()
        self.grad_sync.enable()
        for chunk_id, chunk in enumerate(self.chunks):
            self.grad_sync.launch(chunk.model, chunk_id if len(self.chunks) > 1 else None)

    def _forward(self, action: Action, place: int) -> None:
        unit = (action.microbatch, action.chunk)
        output = self.chunks[action.chunk].forward_step(
            action.microbatch, self._take(ACTIVATION, unit), place
        )
        self._made[ACTIVATION, unit] = output

    def _backward(self, action: Action) -> None:
        unit = (action.microbatch, action.chunk)
        self._num_backwards_left[action.chunk] -= 1
        if self._num_backwards_left[action.chunk] == 0:
            self.grad_sync.enable()
        grad = self._take(GRADIENT, unit)
        input_grad = self.chunks[action.chunk].backward_step(grad, action.microbatch)
        self.grad_sync.disable()
        self._made[GRADIENT, unit] = input_grad

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
