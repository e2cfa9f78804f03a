"""Runs a schedule's loop with two actors that write down what they are told: its plan, for one stage.

Torch-free. Megatron has no counterpart. The actors stand in for `ModelChunk` and `P2PCommunicator`.
In place of tensors they hand out marks. A mark knows the microbatch and chunk that made it or that
used it, so each message is named by what is done with it.

>>> from minimegatron.core.pipeline_parallel.loops import one_f_one_b
>>> config = PlanConfig("1f1b", pp_size=2, num_microbatches=2)
>>> for action in record_loop(one_f_one_b, config, 1)[:3]:
...     print(action)
recv_forward(receive activation of microbatch 0, chunk 0 from rank 0)
forward of microbatch 0, chunk 0
send_forward_recv_backward()
"""

import inspect
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from minimegatron.core.orders.p2p_methods import ASKED_BY, METHODS, OVERLAP, CommunicatorCall
from minimegatron.core.orders.phases import phases_of_loop
from minimegatron.core.orders.plan_config import COMBINED, PlanConfig
from minimegatron.core.orders.work import (
    ACTIVATION,
    BACKWARD,
    COMMUNICATE,
    FORWARD,
    GRADIENT,
    PAIR,
    RECEIVE,
    SEND,
    Action,
    Message,
    Work,
)
from minimegatron.core.pipeline_parallel.loops import InterleavedRun
from minimegatron.core.pipeline_parallel.schedule_table import InterleavedOrder

Unit = tuple[int, int]
"""(microbatch, chunk)"""

ACTORS = ("chunk", "chunks", "p2p")
"""What the first parameter of a loop may be called."""


def is_loop(function: Callable) -> bool:
    """Whether it is written for actors, by the name of its first parameter."""
    names = parameters_of(function)
    return names != () and names[0] in ACTORS


@lru_cache(maxsize=256)
def parameters_of(function: Callable | None) -> tuple[str, ...]:
    """The names of a function's parameters; empty if they cannot be read, or for None."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def record_loop(loop: Callable, config: PlanConfig, rank: int) -> list[Action]:
    """Everything that the loop does on one stage in a step, in order.

    The loop gets, by the names of its parameters: `chunk` or `chunks`, `p2p`, and what a schedule
    knows of its step: `recv_shapes`, `send_shapes`, `order`, `tensor_shape`, `overlap`. Raises
    ValueError for another name.
    """
    recording = LoopRecording(config, rank)
    recording.run(loop)
    return recording.actions()


def work_of_loop(loop: Callable, config: PlanConfig, rank: int) -> list[Work]:
    """The same without its messages: an order of work."""
    recording = LoopRecording(config, rank)
    recording.run(loop)
    phases = phases_of_loop(recording.done, config, rank)
    return [
        Work(entry[0], *entry[1], (), phase)
        for entry, phase in zip(recording.done, phases, strict=True)
        if entry[0] not in METHODS
    ]


class Mark:
    """Stands for one tensor. `number` counts what belongs to the same unit, where that is several.

    What a chunk makes has its unit from the start; what is received (`has_come`), from its use.
    """

    __slots__ = ("has_come", "number", "unit")

    def __init__(self, unit: Unit | None, number: int = 0):
        self.unit, self.number, self.has_come = unit, number, unit is None

    def wait(self) -> "Mark":
        """As the handle of a message: it is there."""
        return self


class LoopRecording:
    """What is written down on one stage."""

    def __init__(self, config: PlanConfig, rank: int):
        self.config, self.rank = config, rank
        self.done: list[tuple] = []
        """(kind, unit) of each piece of work, a pair with its two; (call, messages, overlap)."""
        stages = config.placement.stages[rank]
        self.chunks = [
            RecordingChunk(self, chunk, len(config.sizes_behind(stage)))
            for chunk, stage in enumerate(stages)
        ]
        self.p2p = RecordingCommunicator(self)

    def run(self, loop: Callable) -> None:
        """Runs a loop with the two actors."""
        known = {
            "chunk": lambda: self.chunks[0],
            "chunks": lambda: self.chunks,
            "p2p": lambda: self.p2p,
            "recv_shapes": lambda: self._shapes(before=1),
            "send_shapes": lambda: self._shapes(before=0),
            "order": self._order,
            "tensor_shape": lambda: (0,),
            "overlap": lambda: self.config.overlap_p2p_comm,
        }
        names = parameters_of(loop)
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"the loop {self.config.schedule} asks for {unknown[0]!r}, which no schedule gives; "
                f"name its parameters after {', '.join(known)}"
            )
        loop(*[known[name]() for name in names])

    def _shapes(self, before: int) -> list[tuple[int, ...]]:
        # In place of sizes: which of the unit's tensors it is.
        stage = max(self.config.placement.stage_of(self.rank, 0) - before, 0)
        return [(number,) for number in range(len(self.config.sizes_behind(stage)))]

    def _order(self) -> InterleavedOrder:
        config = self.config
        return InterleavedOrder(
            config.pp_size,
            self.rank,
            config.num_microbatches,
            config.num_model_chunks,
            config.microbatch_group_size_per_vp_stage or config.pp_size,
            config.forward_only,
            overlap_moe_expert_parallel_comm=config.schedule == COMBINED,
        )

    def pair_of_last_two(self) -> None:
        """The last two pieces of work are one: they start and end together."""
        second, first = self.done.pop(), self.done.pop()
        self.done.append((PAIR, first[1], (first, second)))

    # -- As actions --

    def actions(self) -> list[Action]:
        """What was done, with messages and phases."""
        # One function, and named tuples made as tuples: plans have millions of actions.
        new = tuple.__new__
        rank, actions, size = self.rank, [], self.config.message_bytes
        has_one_size = self.config.message_factors is None and self.config.message_sizes is None
        num_received = {ACTIVATION: 0, GRADIENT: 0}
        phases = phases_of_loop(self.done, self.config, rank)
        for (what, of_what, *more), phase in zip(self.done, phases, strict=True):
            if what == PAIR:
                parts = tuple(Action(kind, rank, phase, *unit) for kind, unit in more[0])
                actions.append(Action(PAIR, rank, phase, *of_what, parts=parts))
            elif what not in METHODS:
                actions.append(new(Action, (what, rank, phase, *of_what, None, (), False, ())))
            else:
                messages = []
                for direction, payload, peer, mark in of_what:
                    if mark.unit is None:  # nothing has used what came
                        mark.unit = (num_received[payload], 0)
                    num_received[payload] += direction == RECEIVE
                    microbatch, chunk = mark.unit
                    if not has_one_size:
                        size = self._size(direction, payload, mark)
                    values = (direction, payload, peer, microbatch, chunk, size)
                    messages.append(new(Message, values))
                values = (COMMUNICATE, rank, phase, None, None, what, tuple(messages), more[0], ())
                actions.append(new(Action, values))
        return actions

    def _size(self, direction: str, payload: str, mark: Mark) -> int:
        is_behind = (direction == SEND) == (payload == ACTIVATION)
        stage = self.config.placement.stage_of(self.rank, mark.unit[1]) - (not is_behind)
        return self.config.sizes_behind(stage)[mark.number]


class RecordingChunk:
    """In place of `ModelChunk`."""

    def __init__(self, recording: LoopRecording, chunk_id: int, num_outputs: int):
        self.recording, self._chunk_id, self._num_outputs = recording, chunk_id, num_outputs
        self.num_microbatches = recording.config.num_microbatches
        self.forward_only = recording.config.forward_only
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._num_backwards = 0

    def forward_step(self, microbatch_id: int, input_tensor: Any) -> Any:
        """Writes it down, and that it uses the input."""
        unit = (microbatch_id, self._chunk_id)
        _use(input_tensor, unit)
        self.recording.done.append((FORWARD, unit))
        if not self.forward_only:
            self._in_flight.append((microbatch_id, input_tensor))
        if type(input_tensor) is list:
            return [Mark(unit, number) for number in range(self._num_outputs)]
        return Mark(unit)

    def free_output(self, output_tensor: Any) -> None:
        """Says nothing of a plan."""

    def backward_step(self, output_tensor_grad: Any) -> Any:
        """Writes it down, and that it uses the gradient."""
        # One too early is written down too: who checks the plan names it.
        in_flight = self._in_flight.popleft() if self._in_flight else (self._num_backwards, None)
        microbatch_id, input_tensor = in_flight
        self._num_backwards += 1
        unit = (microbatch_id, self._chunk_id)
        _use(output_tensor_grad, unit)
        self.recording.done.append((BACKWARD, unit))
        if type(input_tensor) is list:
            return [mark and Mark(unit, mark.number) for mark in input_tensor]
        return input_tensor and Mark(unit)

    def num_in_flight(self) -> int:
        """Microbatches whose forward is done and whose backward is not."""
        return len(self._in_flight)


def _use(marks: Any, unit: Unit) -> None:
    for mark in marks if type(marks) is list else (marks,):
        if mark is not None and mark.has_come:
            mark.unit = unit


class _Stages:
    """In place of the pipeline's process group."""

    def __init__(self, config: PlanConfig, rank: int):
        self._rank, self._size = rank, config.pp_size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


# The order in which one call starts its messages, as `P2PCommunicator` does: a batch lists the
# previous stage's first; of separate ones, odd stages receive first.
_BATCHED = ((SEND, GRADIENT), (RECEIVE, ACTIVATION), (SEND, ACTIVATION), (RECEIVE, GRADIENT))
_EVEN = ((SEND, ACTIVATION), (RECEIVE, ACTIVATION), (SEND, GRADIENT), (RECEIVE, GRADIENT))
_ODD = ((RECEIVE, ACTIVATION), (SEND, ACTIVATION), (RECEIVE, GRADIENT), (SEND, GRADIENT))


def order_of_messages(config: PlanConfig, rank: int) -> tuple[tuple[str, str], ...]:
    """(direction, payload) of the up to four messages of a call, in the order of their start."""
    if config.batch_p2p_comm:
        return _BATCHED
    return _ODD if rank % 2 else _EVEN


class RecordingCommunicator:
    """In place of `P2PCommunicator`. Its nine methods are made from `METHODS`."""

    def __init__(self, recording: LoopRecording):
        config, rank = recording.config, recording.rank
        self.recording, self.pp_group = recording, _Stages(config, rank)
        self.messages = messages_of_calls(rank, config.pp_size, order_of_messages(config, rank))


@lru_cache(maxsize=256)
def messages_of_calls(
    rank: int, pp_size: int, order: tuple[tuple[str, str], ...]
) -> dict[str, list[tuple]]:
    """Of each call, in the order of their start: direction, payload and peer of a message, and which
    argument it depends on; None for a receive that every such call has."""
    after, before = (rank + 1) % pp_size, (rank - 1) % pp_size
    peers = {
        (SEND, ACTIVATION): after,
        (RECEIVE, ACTIVATION): before,
        (SEND, GRADIENT): before,
        (RECEIVE, GRADIENT): after,
    }
    return {
        call: [(*part, peers[part], _asked_by(row, *part)) for part in order if _has(row, *part)]
        for call, row in METHODS.items()
    }


def _has(row: CommunicatorCall, direction: str, payload: str) -> bool:
    if direction == RECEIVE:
        return payload in row.receives
    return payload in [payload for _, payload in row.sends]


def _asked_by(row: CommunicatorCall, direction: str, payload: str) -> int | None:
    if direction == RECEIVE:
        return None if row.silent_if else row.parameters.index(ASKED_BY[payload])
    return row.parameters.index({payload: name for name, payload in row.sends}[payload])


def _recording(call: str, row: CommunicatorCall) -> Callable:
    """The method that writes down a call."""
    names = [name for name in row.parameters if name != OVERLAP]
    silent_at = None if row.silent_if is None else names.index(row.silent_if)
    shape_at = next((at for at, name in enumerate(names) if name.startswith("tensor_sh")), None)
    num_received, has_overlap = len(row.receives), OVERLAP in row.parameters

    def record(self: RecordingCommunicator, *args: Any, **given: Any) -> Any:
        overlap = given.pop(OVERLAP, False) if has_overlap else False
        if given or len(args) != len(names):
            args, overlap = _bound(call, row.parameters, args, given, overlap)
        shape = None if shape_at is None else args[shape_at]
        moved: list[tuple] = []
        self.recording.done.append((call, moved, overlap))
        received = [None, None]
        if silent_at is None or not args[silent_at]:
            for direction, payload, peer, at in self.messages[call]:
                if direction == SEND:
                    marks = args[at]
                elif at is None or args[at]:
                    marks = [Mark(None, *x) for x in shape] if type(shape) is list else Mark(None)
                    received[payload == GRADIENT and num_received == 2] = marks
                else:
                    continue
                for mark in marks if type(marks) is list else (marks,):
                    if mark is not None:
                        moved.append((direction, payload, peer, mark))
        elif type(shape) is list:
            received[0] = [None] * len(shape)
        if overlap:
            mark = received[0]
            return mark, {} if mark is None else {ASKED_BY[row.receives[0]]: mark}
        return tuple(received) if num_received == 2 else received[0]

    record.__name__ = call
    return record


def _bound(
    call: str, parameters: tuple[str, ...], args: tuple, given: dict[str, Any], overlap: bool
) -> tuple[tuple, bool]:
    """The call's arguments by position, and whether it is overlapped."""
    values = {OVERLAP: overlap, **dict(zip(parameters, args, strict=False)), **given}
    wanted = [name for name in parameters if name != OVERLAP]
    is_unknown = not given.keys() <= set(parameters)
    if is_unknown or len(args) > len(parameters) or values.keys() != {*wanted, OVERLAP}:
        raise TypeError(f"{call} takes {', '.join(parameters)}; it got {len(args)} and {[*given]}")
    return tuple(values[name] for name in wanted), values[OVERLAP]


for _name, _row in METHODS.items():
    setattr(RecordingCommunicator, _name, _recording(_name, _row))


class RecordedRun(InterleavedRun):
    """Interleaving as it is recorded: it goes on where nothing has come, which checks find."""

    def _input(self, chunk_id: int) -> Any:
        return super()._input(chunk_id) if self._inputs[chunk_id] else None

    def _grad(self, chunk_id: int) -> Any:
        return super()._grad(chunk_id) if self._grads[chunk_id] else None


class RecordedPairs(RecordedRun):
    """Combined 1F1B as it is recorded: in the steady state a forward and a backward are one piece."""

    def _step(self, f_k: int | None = None, b_k: int | None = None) -> tuple[Any, Any]:
        if f_k is None or b_k is None:
            return super()._step(f_k, b_k)
        output, input_grad = self._forward(f_k), self._backward(b_k)
        self.p2p.recording.pair_of_last_two()
        if self.overlap:
            self._after_forward(f_k, output)
            self._after_backward(b_k, input_grad)
        return output, input_grad
