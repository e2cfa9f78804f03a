"""Which microbatch and chunk a backward or a message belongs to: told by the tensors themselves.

Megatron has no counterpart.

Only `forward_step` is told its microbatch. The rest follows from which object is which:

* what a forward step returned is what is sent, and what its backward step is given;
* what was received is the input of a forward step, or the gradient given to a backward step;
* what a backward step returned is the gradient that is sent.

The step of the weight gradients takes no tensor and names its microbatch itself. What one stage hands
to the next on the same rank is not received, and so belongs to no message.

In which order a call's messages were started follows from the calls within it that start them.

No schedule has to say anything, so one that mixes up its tensors is seen to do so. Tensors are
remembered by weak reference: watching keeps none of them alive.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minimegatron.core.orders.p2p_methods import METHODS, CommunicatorCall
from minimegatron.core.tracing import Call
from minimegatron.planner.actions import (
    ACTIVATION,
    BACKWARD,
    FORWARD,
    GRADIENT,
    KINDS,
    RECEIVE,
    SEND,
)
from minimegatron.planner.links import COMBINED_STEP, KIND_OF_LINK

PAYLOADS = (ACTIVATION, GRADIENT)

Channel = tuple[str, str, int]
"""(direction, payload, peer): messages of one channel travel in order."""


class Unit(NamedTuple):
    """The work on one microbatch in one chunk."""

    microbatch: int | None
    chunk: int


@dataclass(slots=True)
class SeenMessage:
    """One tensor that a call of the communicator sent or received."""

    direction: str
    payload: str
    peer: int
    ordinal: int
    """How many of this direction, payload and peer came before it in this step."""
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    unit: Unit | None = None
    """What it was made by (send) or used for (receive); None until that is seen."""


BY_LINK = {call.link: call for call in METHODS.values()}
"""Megatron's nine methods of the communicator, by the names they are traced under."""

EXCHANGE = "exchange"
"""The communicator's own method: its messages name their peers themselves."""
CALLS = (*BY_LINK, EXCHANGE)


@dataclass(slots=True)
class Finding:
    """What is known of one traced call beyond its own attributes."""

    unit: Unit | None = None
    halves: tuple[tuple[str, Unit], ...] = ()
    """Of a combined turn: kind and unit of its forward, of its backward, or of both."""
    messages: Sequence[SeenMessage] = ()
    overlap: bool = False
    ordinal: int | None = None
    """Of the message that a call below the communicator starts or waits for."""
    started: list[Channel] = field(default_factory=list)
    """The channel of each message that was started, in that order."""

    def messages_as_started(self) -> list[SeenMessage]:
        """The messages in the order of `started`. Last come those that nobody started."""
        waiting = list(self.messages)
        in_order = []
        for key in self.started:
            for place, message in enumerate(waiting):
                if (message.direction, message.payload, message.peer) == key:
                    in_order.append(waiting.pop(place))
                    break
        return in_order + waiting


class _ByIdentity:
    """A dictionary whose keys are tensors, known by identity and not kept alive."""

    def __init__(self):
        self._entries: dict[int, tuple[weakref.ref, Any]] = {}

    def __setitem__(self, tensor: Any, value: Any) -> None:
        self._entries[id(tensor)] = (weakref.ref(tensor), value)

    def get(self, tensor: Any) -> Any:
        reference, value = self._entries.get(id(tensor), (None, None))
        # An address is used again once its tensor is gone; the reference is then dead.
        return value if reference is not None and reference() is tensor else None


class UnitFinder:
    """Watches one rank's calls in order, and names the unit of each."""

    def __init__(self):
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets all tensors and starts counting messages anew."""
        self._made_by = {payload: _ByIdentity() for payload in PAYLOADS}
        self._received = _ByIdentity()
        self._num_messages: dict[Channel, int] = defaultdict(int)
        self._num_started: dict[Channel, int] = defaultdict(int)
        self._num_awaited: dict[Channel, int] = defaultdict(int)
        self._exchange = Finding()
        self._being_made: dict[str, Unit] = {}

    def begin(self, call: Call) -> Finding | None:
        """What can be told when a call begins: sizes of sends must be read before they are freed."""
        kind = KIND_OF_LINK.get(call.name)
        if call.name == COMBINED_STEP:
            return self._begin_combined(call)
        if kind is not None:
            return self._BEGIN_WORK[KINDS[kind].takes](self, call)
        begin = self._BEGIN.get(call.name)
        return None if begin is None else begin(self, call)

    def end(self, call: Call, finding: Finding) -> None:
        """Adds what only the result tells. Nothing if the call raised."""
        if call.result is None:
            return
        if call.name in BY_LINK:
            self._end_method(call, BY_LINK[call.name], finding)
        elif call.name == EXCHANGE:
            self._end_exchange(call, finding)
        elif call.name == COMBINED_STEP:
            self._end_combined(call)
        elif (kind := KIND_OF_LINK.get(call.name)) is not None and KINDS[kind].gives:
            made = call.result[0] if KINDS[kind].gives == ACTIVATION else call.result
            for tensor in _tensors(made):
                self._made_by[KINDS[kind].gives][tensor] = finding.unit

    # -- Forwards and backwards --

    def _begin_forward(self, call: Call) -> Finding:
        unit = Unit(call.attributes.get("microbatch"), call.attributes.get("chunk", 0))
        self._use(call.arguments["input_tensor"], unit)
        return Finding(unit)

    def _begin_backward(self, call: Call) -> Finding:
        unit = None
        for tensor in _tensors(call.arguments["output_tensor"]):
            unit = self._made_by[ACTIVATION].get(tensor)
        self._use(call.arguments["output_tensor_grad"], unit)
        return Finding(unit)

    def _begin_weight(self, call: Call) -> Finding:
        return Finding(Unit(call.attributes.get("microbatch"), call.attributes.get("chunk", 0)))

    def _begin_combined(self, call: Call) -> Finding:
        """A step whose messages may leave before it ends: they are of its own halves."""
        halves = []
        for letter, kind, received in (
            ("f", FORWARD, "input_tensor"),
            ("b", BACKWARD, "b_output_tensor_grad"),
        ):
            if call.attributes.get(f"{letter}_chunk") is None:
                continue
            unit = Unit(call.attributes[f"{letter}_microbatch"], call.attributes[f"{letter}_chunk"])
            self._use(call.arguments[received], unit)
            self._being_made[KINDS[kind].gives] = unit
            halves.append((kind, unit))
        return Finding(halves[0][1] if halves else None, tuple(halves))

    def _end_combined(self, call: Call) -> None:
        output, _, input_grad = call.result
        for payload, made in ((ACTIVATION, output), (GRADIENT, input_grad)):
            if payload in self._being_made:
                for tensor in _tensors(made):
                    self._made_by[payload][tensor] = self._being_made[payload]
        self._being_made.clear()

    def _use(self, received: Any, unit: Unit | None) -> None:
        for tensor in _tensors(received):
            message = self._received.get(tensor)
            if message is not None:
                message.unit = unit

    # -- Messages --

    def _begin_method(self, call: Call) -> Finding:
        method, arguments = BY_LINK[call.name], call.arguments
        finding = Finding(messages=[], overlap=bool(arguments.get("overlap_p2p_comm")))
        if method.silent_if is None or not arguments[method.silent_if]:
            for argument, payload in method.sends:
                for tensor in _tensors(arguments[argument]):
                    peer = _neighbour(call, SEND, payload)
                    finding.messages.append(self._sent(payload, peer, tensor))
        self._exchange = finding
        return finding

    def _end_method(self, call: Call, method: CommunicatorCall, finding: Finding) -> None:
        result = call.result
        if finding.overlap:
            result = result[0]
        results = result if len(method.receives) > 1 else (result,)
        for payload, received in zip(method.receives, results, strict=False):
            for tensor in _tensors(received):
                peer = _neighbour(call, RECEIVE, payload)
                finding.messages.append(self._expected(payload, peer, tensor))

    def _begin_exchange(self, call: Call) -> Finding:
        finding = Finding(messages=[], overlap=True)
        for message in call.arguments["messages"]:
            if message.is_send and message.payload in PAYLOADS:
                finding.messages.append(self._sent(message.payload, message.peer, message.tensor))
        self._exchange = finding
        return finding

    def _end_exchange(self, call: Call, finding: Finding) -> None:
        for message, result in zip(call.arguments["messages"], call.result, strict=False):
            if not message.is_send and message.payload in PAYLOADS:
                seen = self._expected(message.payload, message.peer, result.tensor)
                finding.messages.append(seen)

    def _sent(self, payload: str, peer: int, tensor: Any) -> SeenMessage:
        message = self._message(SEND, payload, peer, tensor)
        message.unit = self._being_made.get(payload) or self._made_by[payload].get(tensor)
        return message

    def _expected(self, payload: str, peer: int, tensor: Any) -> SeenMessage:
        message = self._received[tensor] = self._message(RECEIVE, payload, peer, tensor)
        return message

    def _message(self, direction: str, payload: str, peer: int, tensor: Any) -> SeenMessage:
        ordinal = self._num_messages[direction, payload, peer]
        self._num_messages[direction, payload, peer] += 1
        return SeenMessage(
            direction,
            payload,
            peer,
            ordinal,
            tensor.numel() * tensor.element_size(),
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
        )

    def _begin_start(self, call: Call) -> Finding | None:
        channel = _channel(call)
        if channel is None:
            return None
        # The exchange that began last is the one that starts messages.
        self._exchange.started.append(channel)
        return Finding(ordinal=_count(self._num_started, channel))

    def _begin_wait(self, call: Call) -> Finding | None:
        channel = _channel(call)
        if channel is None:
            return None
        # Where messages are awaited in another order than they were started, a wait says which it is.
        counted = _count(self._num_awaited, channel)
        return Finding(ordinal=call.attributes.get("number", counted))

    _BEGIN_WORK = {ACTIVATION: _begin_forward, GRADIENT: _begin_backward, None: _begin_weight}
    """By the payload that a kind of work takes."""
    _BEGIN = {
        "p2p-start": _begin_start,
        "p2p-wait": _begin_wait,
        EXCHANGE: _begin_exchange,
        **dict.fromkeys(BY_LINK, _begin_method),
    }


def _neighbour(call: Call, direction: str, payload: str) -> int:
    """Whom Megatron's methods send a payload to, or receive it from."""
    communicator = call.arguments["self"]
    goes_on = (direction == SEND) == (payload == ACTIVATION)
    return communicator.next_rank if goes_on else communicator.prev_rank


def _channel(call: Call) -> Channel | None:
    """Of the message that a call starts or awaits; None for a message of sizes."""
    attributes = call.attributes
    if attributes["payload"] not in PAYLOADS:
        return None
    direction = SEND if attributes["doing"] == "sending" else RECEIVE
    return direction, attributes["payload"], attributes["peer"]


def _count(counts: dict[Channel, int], channel: Channel) -> int:
    """How many came before this one; counts it."""
    counts[channel] += 1
    return counts[channel] - 1


def _tensors(tensors: Any) -> list:
    """The tensors among one, several, or none."""
    if not isinstance(tensors, list | tuple):
        tensors = (tensors,)
    return [tensor for tensor in tensors if hasattr(tensor, "element_size")]
