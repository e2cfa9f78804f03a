"""What a rank notes of each traced call: which it is, whom it concerns, how many came before it.

Megatron has no counterpart.

Everything that needs thought is left to whoever reads: `units` finds out which microbatch a message
carries, `diagnosis` who waits for whom. Here a call costs a few lookups and two packed structs.
"""

import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.tracing import Call, add_observer
from minimegatron.core.utils import get_model_config, unwrap_model
from minimegatron.doctor.records import title_of
from minimegatron.doctor.shared_record import MAX_CALLS, NONE, CallFields, RecordWriter, pad_shape
from minimegatron.doctor.torch_calls import note_torch_calls
from minimegatron.planner.actions import ACTIVATION, GRADIENT, KINDS
from minimegatron.planner.links import KIND_OF_LINK, config_of_run, schedule_of_run
from minimegatron.planner.plan import plan_config_to_json
from minimegatron.planner.stack_costs import messages_of_model

DTYPES = {
    d: str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)
}
MAX_PLACED = 256
"""Stages of a placement that is written down; a larger one is left to the schedule's name."""


def start_recording(path: str | os.PathLike, rank: int, world_size: int) -> RecordWriter:
    """From now on, this rank's record is kept up to date in the file at `path`.

    It says `STARTING` until its writer is told otherwise.
    """
    writer = RecordWriter(path, rank, world_size)
    observer = RecordingObserver(writer)
    add_observer(observer)
    note_torch_calls(observer)
    return writer


class _Link(NamedTuple):
    """What is known of a traced function before it is called."""

    name: str
    describe: Callable[[Call, CallFields], CallFields] | None
    """Fills in what is special about one call; None for functions of which nothing is."""
    fields: CallFields


_Open = tuple[Call, CallFields, float, BaseException | None]
"""A call that has not ended, when it began, and which exception was being handled then: if that one
still is when the call ends, the call did not raise it. A plain tuple is made twice as fast."""


class RecordingObserver:
    """Keeps one rank's record up to date."""

    def __init__(self, writer: RecordWriter):
        self.writer = writer
        self._open: list[_Open] = []
        self._links: dict[str, _Link] = {}
        self._groups: dict[int, tuple[weakref.ref, tuple[int, ...], str]] = {}
        self._group_indices: dict[str, int] = {}
        self._num_collectives: dict[int, int] = {}
        self._handles: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._num_messages: dict[tuple[str, str, str, int], int] = {}
        self._counts: dict[tuple[int, int, int], list[int]] = {}
        self._shapes: dict[tuple, tuple] = {}
        self._layers: dict[tuple[int, int], CallFields] = {}
        self._raising: int | None = None
        self._num_steps = 0
        self._count_work_anew()
        self._pipeline: Any = None
        self._describe: dict[str, Callable[[Call, CallFields], CallFields]] = {
            "forward-backward": self._step,
            **dict.fromkeys(KIND_OF_LINK, self._work),
            "collective-wait": self._wait_for_collective,
        }

    # -- As an observer --

    def start(self, call: Call) -> None:
        """A traced call begins."""
        self._raising = None
        link = self._links.get(call.symbol)
        if link is None or link.name != call.name:
            link = self._learn(call)
        fields = link.fields
        if link.describe is not None:
            fields = link.describe(call, fields)
        since = self.writer.push(fields)
        self._open.append((call, fields, since, sys.exception()))

    def _learn(self, call: Call) -> _Link:
        attributes = call.attributes
        describe = self._describe.get(call.name)
        if describe is None and "group_size" in attributes:
            describe = self._collective
        elif describe is None and "doing" in attributes:
            describe = self._message
        elif describe is None and "layer" in attributes:
            describe = self._layer
        elif describe is None and hasattr(call.arguments.get("self"), "pp_group"):
            describe = self._exchange
        fields = CallFields(self.writer.link(call.name, call.symbol))
        self._links[call.symbol] = _Link(call.name, describe, fields)
        return self._links[call.symbol]

    def stop(self, call: Call) -> None:
        """A traced call ends, with a result or an exception."""
        calls = self._open
        place = len(calls) - 1
        while place >= 0 and calls[place][0] is not call:
            place -= 1
        if place < 0:
            return
        _, fields, _, before = calls.pop(place)
        exception = sys.exception()
        if exception is not None and exception is not before:
            self._note_exception(exception, call, fields)
        elif fields.group != NONE and call.result is not None:
            # An asynchronous collective: whoever waits for its handle waits for this number.
            self._handles[call.result] = fields
        self.writer.pop()
        if len(calls) >= MAX_CALLS:
            _, fields, since, _ = calls[-1]
            self.writer.show_innermost(since, fields)

    def is_communicating(self) -> bool:
        """Whether the innermost open call is a message or a collective."""
        if not self._open:
            return False
        fields = self._open[-1][1]
        return fields.group != NONE or fields.doing != 0

    # -- A schedule, and its forwards and backwards --

    def _step(self, call: Call, fields: CallFields) -> CallFields:
        places = step_places(call.arguments)
        self._pipeline = places.get("pp")
        self.writer.tell(
            step=step_config(call),
            coordinates={axis: group.rank() for axis, group in places.items()},
            sizes={axis: group.size() for axis, group in places.items()},
        )
        if self._pipeline is not None:
            self._set_pipeline(self._pipeline)
        self._num_steps += 1
        self._count_work_anew()
        self._clear_messages()
        self._set_counts()
        return fields._replace(number=self._num_steps - 1)

    def _count_work_anew(self) -> None:
        """Work begun in this step: by its link, and by the payload that it gives."""
        self._num_work = dict.fromkeys(KIND_OF_LINK, 0)
        self._num_given: dict[str | None, int] = {ACTIVATION: 0, GRADIENT: 0, None: 0}

    def _clear_messages(self) -> None:
        self._num_messages.clear()
        self._counts.clear()
        self.writer.clear_messages()

    def _set_counts(self) -> None:
        given = self._num_given
        self.writer.set_counts(self._num_steps, given[ACTIVATION], given[GRADIENT])

    def _set_pipeline(self, group: Any) -> None:
        self._pipeline = group
        self.writer.tell(pipeline=list(self._ranks(group)))

    def _work(self, call: Call, fields: CallFields) -> CallFields:
        number = self._num_work[call.name]
        self._num_work[call.name] = number + 1
        self._num_given[KINDS[KIND_OF_LINK[call.name]].gives] += 1
        self._set_counts()
        microbatch, chunk = call.attributes.get("microbatch"), call.attributes.get("chunk")
        return fields._replace(
            number=number,
            microbatch=NONE if microbatch is None else microbatch,
            chunk=NONE if chunk is None else chunk,
        )

    def _layer(self, call: Call, fields: CallFields) -> CallFields:
        key = (fields.link, call.attributes["layer"])
        known = self._layers.get(key)
        if known is None:
            known = self._layers[key] = fields._replace(layer=key[1])
        return known

    # -- Messages --

    def _exchange(self, call: Call, fields: CallFields) -> CallFields:
        # A communicator that is used without a schedule; perhaps not that of the last pipeline.
        group = call.arguments["self"].pp_group
        if self._pipeline is not group:
            self._set_pipeline(group)
            self._clear_messages()
        return fields

    def _message(self, call: Call, fields: CallFields) -> CallFields:
        attributes, name = call.attributes, call.name
        doing, payload = attributes["doing"], attributes.get("payload", "")
        # What starts a message knows its group; what waits for it does not.
        group = _group_of_message(call.arguments, self._pipeline)
        peer = attributes["peer"]
        if group is not None and 0 <= peer < group.size():
            peer = self._ranks(group)[peer]
        if self._pipeline is None and name == "p2p-start" and group is not None:
            self._set_pipeline(group)
        # Messages of one kind to one peer are started in order, and awaited in order unless they say.
        kind = (name, doing, payload, peer)
        counted = self._num_messages.get(kind, 0)
        self._num_messages[kind] = counted + 1
        number = attributes.get("number", counted)
        doing, payload = self.writer.word(doing), self.writer.word(payload)
        key = (doing, payload, peer)
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [len(self._counts), 0, 0]
        counts[1] += name != "p2p-wait"
        counts[2] += name != "p2p-start"
        self.writer.set_message(*counts, *key)
        tensor = _tensor_of_message(call.arguments)
        return CallFields(
            fields.link,
            payload,
            doing,
            *((0, 0, 0) if tensor is None else (self._dtype(tensor), 0, tensor.dim())),
            NONE,
            NONE,
            NONE,
            NONE,
            peer,
            number,
            NONE if tensor is None else tensor.nbytes,
            *self._sizes(() if tensor is None else tensor.shape),
        )

    def _dtype(self, tensor: Any) -> int:
        return self.writer.word(DTYPES[tensor.dtype])

    def _sizes(self, shape: tuple) -> tuple[int, ...]:
        sizes = self._shapes.get(shape)
        if sizes is None:
            if len(self._shapes) > 1000:  # lengths that vary without end
                self._shapes.clear()
            sizes = self._shapes[shape] = pad_shape(tuple(shape))
        return sizes

    # -- Collectives --

    def _collective(self, call: Call, fields: CallFields) -> CallFields:
        attributes, arguments = call.attributes, call.arguments
        if attributes["group_size"] == 1:
            return fields
        group = arguments["group"]
        index = self._group(group)
        op = attributes.get("op", "")
        if "group_src" in arguments:
            op = f"from rank {self._ranks(group)[arguments['group_src']]}"
        elif "op" in arguments:
            op = getattr(arguments["op"], "name", "").lower()
        shape = attributes.get("shape")
        dtype = 0 if shape is None else self.writer.word(attributes["dtype"])
        sizes = self._sizes(shape or ())
        num_dims = len(shape or ())
        op = self.writer.word(op)
        number = self._num_collectives.get(index, 0)
        self._num_collectives[index] = number + 1
        if index != NONE:
            layer, work, work_number = self._surroundings()
            entry = (fields.link, dtype, op, num_dims, layer, work, number, work_number, *sizes)
            self.writer.set_collective(index, number, entry)
        num_bytes = attributes.get("bytes", NONE)
        places = (NONE, NONE, NONE, NONE)  # microbatch, chunk, layer, peer: see the calls around
        return CallFields(
            fields.link, 0, 0, dtype, op, num_dims, index, *places, number, num_bytes, *sizes
        )

    def _surroundings(self) -> tuple[int, int, int]:
        """(layer, link, number) of the layer and of the forward or backward around."""
        layer = NONE
        for call, fields, _, _ in reversed(self._open):
            if layer == NONE:
                layer = fields.layer
            if call.name in KIND_OF_LINK:
                return layer, fields.link, fields.number
        return layer, NONE, NONE

    def _wait_for_collective(self, call: Call, fields: CallFields) -> CallFields:
        begun = self._handles.get(call.arguments["handle"])
        return fields if begun is None else begun._replace(link=fields.link)

    # -- Groups --

    def _group(self, group: Any) -> int:
        _, ranks, name = self._known(group)
        index = self._group_indices.get(name)
        if index is None:
            title = _title(group)
            index = self._group_indices[name] = self.writer.add_group(name, title, list(ranks))
        return index

    def _ranks(self, group: Any) -> tuple[int, ...]:
        """The global ranks of a group, in its order."""
        return self._known(group)[1]

    def _known(self, group: Any) -> tuple[weakref.ref, tuple[int, ...], str]:
        # By identity: to ask a group for its name takes longer than all the rest.
        known = self._groups.get(id(group))
        if known is None or known[0]() is not group:
            if isinstance(group, dist.ProcessGroup):
                ranks, name = tuple(dist.get_process_group_ranks(group)), group.group_name
            else:
                ranks, name = tuple(range(group.size())), str(id(group))
            known = self._groups[id(group)] = (weakref.ref(group), ranks, name)
        return known

    # -- Exceptions --

    def _note_exception(self, exception: BaseException, call: Call, fields: CallFields) -> None:
        # On its way out it ends the calls around as well; the innermost is where it came from.
        if self._raising == id(exception):
            return
        self._raising = id(exception)
        # Of a forward or backward, whichever of its links it came from.
        for around, its_fields, _, _ in self._open:
            if around.name in KIND_OF_LINK:
                call, fields = around, its_fields
        text = f"{type(exception).__name__}: {exception}"
        self.writer.tell(
            caught={
                "text": text.splitlines()[0][:300],
                "name": call.name,
                "symbol": call.symbol,
                "number": None if fields.number == NONE else fields.number,
                "microbatch": None if fields.microbatch == NONE else fields.microbatch,
                "chunk": None if fields.chunk == NONE else fields.chunk,
                "at": time.monotonic(),
                "num_steps": self._num_steps,
            }
        )


def _group_of_message(arguments: Mapping[str, Any], otherwise: Any) -> Any:
    """The communicator's group, or the one that is given: None where peers are ranks of the job."""
    if "group" in arguments:
        return arguments["group"]
    return getattr(arguments.get("self"), "pp_group", otherwise)


def _tensor_of_message(arguments: Mapping[str, Any]) -> torch.Tensor | None:
    message = arguments.get("message") or getattr(arguments.get("handle"), "message", None)
    tensor = arguments.get("tensor") if message is None else message.tensor
    return tensor if isinstance(tensor, torch.Tensor) else None


def step_places(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of this rank along each axis, as far as a schedule's arguments tell."""
    collection, p2p = arguments.get("pg_collection"), arguments.get("p2p_communicator")
    places = {}
    for axis in ("pp", "tp", "dp", "cp"):
        if axis == "pp" and p2p is not None:
            places[axis] = p2p.pp_group
        elif hasattr(collection, axis):
            places[axis] = getattr(collection, axis)
        elif parallel_state.is_initialized():
            places[axis] = parallel_state.get_group(axis)
    return {axis: group for axis, group in places.items() if group is not None}


def step_config(call: Call) -> dict[str, Any]:
    """The `PlanConfig` of a schedule run, as JSON holds it. A student may have written the run."""
    arguments, attributes = call.arguments, call.attributes
    model = arguments.get("model")
    chunks = model if isinstance(model, list) else [model]
    options = _options(chunks[0])
    pipeline = step_places(arguments).get("pp")
    config = config_of_run(
        schedule_of_run(call.symbol, attributes),
        1 if pipeline is None else pipeline.size(),
        arguments.get("num_microbatches"),
        len(chunks),
        group_size=options.get("microbatch_group_size_per_vp_stage"),
        forward_only=bool(arguments.get("forward_only")),
        batch_p2p_comm=bool(options.get("batch_p2p_comm", True)),
        wire=attributes.get("wire"),
        message_sizes=messages_of_model(unwrap_model(chunks[0])),
    )
    data = plan_config_to_json(config)
    if config.pp_size * config.num_model_chunks > MAX_PLACED:
        data.pop("placement", None)  # the record has little room, and its reader knows schedules
    return data


def _options(model: Any) -> dict[str, Any]:
    """What the model's configuration says, if it has one."""
    try:
        return dict(vars(get_model_config(model)))
    except (AttributeError, RuntimeError, TypeError):
        return {}


def _title(group: Any) -> str:
    return title_of(group.group_desc) if isinstance(group, dist.ProcessGroup) else ""
