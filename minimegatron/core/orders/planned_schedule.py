"""Runs any order of work on real ranks, action by action: one runner for every schedule by name.

Megatron has no counterpart: a schedule there is the code that runs it.

Plain 1F1B and interleaving do not come this way; they are written out to be read. Their orders can be
run here too, and compute the same.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from minimegatron.core.collectives import is_tagged
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders.lowering import (
    EXCHANGE,
    RankStep,
    common_order,
    count_in_flight,
    target_of,
    work_of,
)
from minimegatron.core.orders.orders import (
    TAGGED,
    UNTAGGED,
    PlanConfig,
    Schedule,
    get_schedule,
    require_own_name,
)
from minimegatron.core.orders.p2p_methods import ASKED_BY, METHODS, OVERLAP
from minimegatron.core.orders.runnable import check_step
from minimegatron.core.orders.send_limits import least_send_limit
from minimegatron.core.orders.shared_step import Asked, keep_step, step_of_rank
from minimegatron.core.orders.work import (
    ACTIVATION,
    COMMUNICATE,
    FORWARD,
    GRADIENT,
    RECEIVE,
    SEND,
    Action,
    Message,
    parts_of,
)
from minimegatron.core.pipeline_parallel.failed_step import framed_schedule
from minimegatron.core.pipeline_parallel.hooked_frame import HookedFrame, ParamSync
from minimegatron.core.pipeline_parallel.p2p_communication import (
    P2PCommunicator,
    TensorMessage,
    communicator_of,
    get_tensor_shapes,
    sends_shapes,
)
from minimegatron.core.pipeline_parallel.step_frame import groups_of_step
from minimegatron.core.pipeline_parallel.steps import ModelChunk
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tracing import traced
from minimegatron.core.utils import config_of_run, get_model_config

StepAsker = Callable[[P2PCommunicator, int, bool], Asked]
"""From the communicator, the number of microbatches and forward_only to the step to ask for."""


def get_named_forward_backward_func(name: str) -> Callable:
    """A function like those of `get_forward_backward_func`, in the order of a registered schedule.

    A schedule that names its own messages, and has no order, runs with these. Raises ValueError for an
    unknown name, and for one that a flag chooses.
    """
    require_own_name(name)
    schedule = get_schedule(name)
    if schedule.order is None:
        return get_messages_forward_backward_func(schedule)
    return planned_forward_backward_func(name, partial(_ask_for_order, schedule), _describe_wire)


def get_messages_forward_backward_func(schedule: Schedule) -> Callable:
    """The same, with the messages that the schedule names."""
    return planned_forward_backward_func(schedule.name, partial(_ask_for_messages, schedule))


def _ask_for_order(
    schedule: Schedule, p2p: P2PCommunicator, num_microbatches: int, forward_only: bool
) -> Asked:
    vp_size = p2p.virtual_pipeline_model_parallel_size
    placement = schedule.placed(p2p.pp_group.size(), vp_size)
    wire = _wire_of(p2p.is_tagged, p2p.config)
    config = PlanConfig(
        schedule.name,
        p2p.pp_group.size(),
        num_microbatches,
        placement.num_model_chunks,
        None if vp_size is None else p2p.config.microbatch_group_size_per_vp_stage,
        forward_only,
        batch_p2p_comm=wire == TAGGED or p2p.config.batch_p2p_comm,
        placement=placement,
        wire=wire,
    )
    sizes = tuple((field.name, getattr(config, field.name)) for field in fields(config)[1:])
    return Asked(schedule, sizes, partial(common_order, config, schedule), config)


def _wire_of(has_tags: bool, config: ModelParallelConfig) -> str:
    """The wire to lower for. A receive that waits for its sizes must not be asked for early."""
    return TAGGED if has_tags and not sends_shapes(config) else UNTAGGED


def _ask_for_messages(
    schedule: Schedule, p2p: P2PCommunicator, num_microbatches: int, forward_only: bool
) -> Asked:
    vp_size = p2p.virtual_pipeline_model_parallel_size
    is_interleaved = vp_size is not None
    sizes = {
        "pp": p2p.pp_group.size(),
        "num_microbatches": num_microbatches,
        "vpp": vp_size,
        "group_size": p2p.config.microbatch_group_size_per_vp_stage if is_interleaved else None,
        "forward_only": forward_only,
        "overlap_p2p_comm": is_interleaved and p2p.config.overlap_p2p_comm,
        "batch_p2p_comm": p2p.config.batch_p2p_comm,
    }
    make = partial(schedule.make_step, schedule, **sizes)
    return Asked(schedule, tuple(sizes.items()), make)


def _describe_wire(arguments: dict[str, Any]) -> dict[str, Any]:
    """What observers are told of a step whose messages were lowered."""
    p2p, models = arguments.get("p2p_communicator"), arguments["model"]
    model = models[0] if isinstance(models, list) else models
    if p2p is not None:
        has_tags = p2p.is_tagged
    else:
        has_tags = is_tagged(groups_of_step(model, arguments.get("pg_collection")).pp)
    return {"wire": _wire_of(has_tags, get_model_config(model))}


def planned_forward_backward_func(
    name: str,
    ask: StepAsker,
    describe: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Callable:
    """A `forward_backward_func` that runs the steps that `ask` asks for.

    It takes the keyword arguments of `get_forward_backward_func`'s functions;
    `adjust_tensor_shapes_fn` must be None. What cannot work raises a ValueError (for an order or a
    schedule, `ScheduleError`) before any message is sent, and on every rank alike.
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
        config = config_of_run(models)
        pg_collection = groups_of_step(models[0], pg_collection)
        p2p = p2p_communicator or communicator_of(pg_collection, get_model_config(models[0]))
        asked = ask(p2p, num_microbatches, forward_only)
        pipeline = p2p if p2p.pp_group.size() > 1 else None
        frame = PlannedFrame(config, pg_collection, pipeline, forward_only)
        with frame.begun():
            step = step_of_rank(asked, p2p.pp_group)
            check_step(step, config, models, iterators)
            frame.follow(_order_of_forwards(step, p2p), _send_limit(step))
            (shape,) = get_tensor_shapes(
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=decoder_seq_length,
                config=config,
                tp_group=pg_collection.tp,
                cp_group=pg_collection.cp,
            )
            for chunk_id, (chunk, iterator) in enumerate(zip(models, iterators, strict=True)):
                frame.add_chunk(
                    forward_step_func,
                    _data_in_order(iterator, _forwards_of(step, chunk_id)),
                    chunk,
                    num_microbatches,
                    collect_non_loss_data=collect_non_loss_data,
                    first_val_step=first_val_step,
                    most_in_flight=count_in_flight(step.actions),
                    vp_stage=None if p2p.virtual_pipeline_model_parallel_size is None else chunk_id,
                    is_last_stage=step.config.placement.is_last(step.rank, chunk_id),
                    sends=shape,
                )
            with frame:
                PlannedRun(step, frame.chunks, p2p, shape).run()
                keep_step(asked, step, p2p.pp_group)
        return _in_order_of_microbatches(frame.forward_data_store, step)

    return framed_schedule(forward_backward_planned, name, describe)


class PlannedFrame(HookedFrame):
    """The frame of a step that ranks must agree on before they have their chunks."""

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Begins the step before the frame is entered, which is done inside.

        For what ranks must tell each other before they have their chunks: if that fails on one of them,
        it tells the others, as in the step.
        """
        try:
            self.begin()
            yield
        except BaseException as error:
            if not self._has_failed:
                self.give_up(error)
            raise

    def follow(self, forward_order: Sequence[tuple[int, int]] | None, send_limit: int) -> None:
        """Says both where they are not known when the frame is made. Before it is entered."""
        self.param_sync = ParamSync(self.config, forward_order or (), self.stage)
        self.send_limit = send_limit


def _order_of_forwards(step: RankStep, p2p: P2PCommunicator) -> list[tuple[int, int]] | None:
    """As a frame takes it."""
    if p2p.virtual_pipeline_model_parallel_size is None:
        return None
    return [(a.microbatch, a.chunk) for a in work_of(step.actions) if a.kind == FORWARD]


def _send_limit(step: RankStep) -> int:
    return max(least_send_limit(step.config.forward_only), step.limit)


def _forwards_of(step: RankStep, chunk: int) -> list[int]:
    """The microbatches of one chunk's forwards, in the order in which they are run."""
    work = work_of(step.actions)
    return [a.microbatch for a in work if a.kind == FORWARD and a.chunk == chunk]


def _data_in_order(data_iterator: Iterator | None, microbatches: list[int]) -> Iterator | None:
    """What a chunk's forwards read, one sample each, if they do not come in the order of the data."""
    if data_iterator is None or microbatches == sorted(microbatches):
        return data_iterator
    return _Reordered(data_iterator, microbatches)


class _Reordered:
    """An iterator over samples in another order than that of `data_iterator`."""

    def __init__(self, data_iterator: Iterator, numbers: list[int]):
        self._data_iterator, self._numbers = data_iterator, iter(numbers)
        self._read: list[Any] = []

    def __iter__(self) -> "_Reordered":
        return self

    def __next__(self) -> Any:
        number = next(self._numbers)
        while len(self._read) <= number:
            self._read.append(next(self._data_iterator))
        sample, self._read[number] = self._read[number], None
        return sample


def _in_order_of_microbatches(reports: list, step: RankStep) -> list:
    """What the loss function reported, by microbatch, whatever the order of the forwards."""
    placement = step.config.placement
    last = [c for c in range(placement.num_model_chunks) if placement.is_last(step.rank, c)]
    if not last or len(reports) != step.config.num_microbatches:
        return reports
    found = dict(zip(_forwards_of(step, last[0]), reports, strict=True))
    return [found[microbatch] for microbatch in sorted(found)]


# -- The run --

_exchange = traced("exchange")(P2PCommunicator.exchange)


class PlannedRun:
    """One rank's actions, one after the other.

    `_made` holds what has been computed here and is not yet sent, `_arrived` what has arrived and is
    not yet used, by payload, microbatch and chunk; a received tensor comes with the handle to wait
    for, or None.

    Each of `config.schedule_plan_builders` is called as `build(run, action)` before a piece of work,
    until one returns a plan: a function that does the work, in place of forward and backward as they
    come. For each of `parts_of(action)` it gets the input from `run.take` (a pair's two need not wait
    for each other), computes with `run.chunks[part.chunk]`, and gives what it made to `run.hand_over`.
    """

    def __init__(
        self,
        step: RankStep,
        chunks: list[ModelChunk],
        p2p: P2PCommunicator,
        shape: tuple[int, ...],
    ):
        self.actions, self.rank = step.actions, step.rank
        self.placement, self.forward_only = step.config.placement, step.config.forward_only
        self.chunks, self.p2p, self.shape = chunks, p2p, shape
        self._made: dict[tuple, torch.Tensor] = {}
        self._arrived: dict[tuple, tuple[torch.Tensor, Any]] = {}

    def run(self) -> None:
        """All of them."""
        builders = self.chunks[0].config.schedule_plan_builders
        for action in self.actions:
            if action.kind == COMMUNICATE:
                self._communicate(action)
                continue
            plans = (build(self, action) for build in builders)
            next(filter(None, plans), partial(self._one_by_one, action))()

    # -- Work --

    def _one_by_one(self, action: Action) -> None:
        for part in parts_of(action):
            chunk, tensor = self.chunks[part.chunk], self.take(part)
            if part.kind == FORWARD:
                self.hand_over(part, chunk.forward_step(part.microbatch, tensor))
            else:
                self.hand_over(part, chunk.backward_step(tensor, part.microbatch))

    def take(self, part: Action) -> torch.Tensor | None:
        """A forward's input, or the gradient of a backward's output, waited for; None at the ends."""
        payload = ACTIVATION if part.kind == FORWARD else GRADIENT
        unit = (payload, part.microbatch, part.chunk)
        tensor, handle = self._arrived.pop(unit, (None, None))
        if handle is not None:
            handle.wait()
        return tensor

    def hand_over(self, part: Action, made: torch.Tensor | None) -> None:
        """To the neighbour: a forward's output, or the gradient of a backward's input."""
        target = target_of(self.placement, self.rank, part)
        if target is None:  # a loss, which would keep its graph; or the chunk that starts from data
            return
        payload, place = target
        if place.rank != self.rank:
            self._made[payload, part.microbatch, part.chunk] = made
            return
        if part.kind == FORWARD:
            # The next chunk's input is a tensor of its own: its backward ends there, and leaves the
            # gradient there for this chunk's backward.
            leaf = made.detach()
            leaf.requires_grad_(not self.forward_only)
            self.chunks[part.chunk].free_output(made)
            made = leaf
        self._arrived[payload, part.microbatch, place.chunk] = (made, None)

    # -- Messages --

    def _communicate(self, action: Action) -> None:
        tensors = [self._to_send(message) for message in action.messages]
        if action.call == EXCHANGE:
            messages = list(map(self._message, action.messages, tensors))
            handles = _exchange(self.p2p, messages, overlap=True)
            received = [(getattr(handle, "tensor", None), handle) for handle in handles]
        else:
            received = called_by_name(self.p2p, action, tensors, self.shape)
        for message, tensor, arrived in zip(action.messages, tensors, received, strict=True):
            if message.direction == RECEIVE:
                unit = (message.payload, message.microbatch, message.chunk)
                self._arrived[unit] = arrived
            elif message.payload == ACTIVATION:
                self.chunks[message.chunk].free_output(tensor)

    def _to_send(self, message: Message) -> torch.Tensor | None:
        if message.direction == RECEIVE:
            return None
        return self._made.pop((message.payload, message.microbatch, message.chunk))

    def _message(self, message: Message, tensor: torch.Tensor | None) -> TensorMessage:
        shape = self.shape if tensor is None else None
        return TensorMessage(tensor is not None, tensor, message.peer, message.payload, shape)


def called_by_name(
    p2p: P2PCommunicator,
    action: Action,
    tensors: list[torch.Tensor | None],
    shape: tuple[int, ...],
) -> list[tuple[torch.Tensor | None, Any]]:
    """Calls the method of the communicator that a schedule names; for its messages, in their order.

    Returns for each message (tensor, handle): None for a send, and for what has been waited for.
    """
    method = METHODS[action.call]
    kinds = [(message.direction, message.payload) for message in action.messages]
    found = dict(zip(kinds, tensors, strict=True))
    given = {"tensor_shape": shape, "tensor_shapes": shape, OVERLAP: action.overlap}
    given |= {name: found.get((SEND, payload)) for name, payload in method.sends}
    given |= {asked_by: (RECEIVE, payload) in found for payload, asked_by in ASKED_BY.items()}
    given[method.silent_if] = not found
    result = getattr(p2p, action.call)(**{name: given[name] for name in method.parameters})
    result, handles = result if action.overlap else (result, {})
    results = result if len(method.receives) > 1 else (result,)
    arrived = {
        (RECEIVE, payload): (tensor, handles.get(ASKED_BY[payload]))
        for payload, tensor in zip(method.receives, results, strict=False)
    }
    return [arrived.get(kind, (None, None)) for kind in kinds]
