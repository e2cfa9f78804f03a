"""Which microbatch and chunk a backward or a message belongs to: told by the tensors themselves.

Called by: `recorder`, at the beginning and end of each traced call. Calls nothing. Megatron has no
counterpart.

Only `forward_step` is told its microbatch. The rest follows from which object is which:

* what a forward step returned is what is sent, and what its backward step is given;
* what was received is the input of a forward step, or the gradient given to a backward step;
* what a backward step returned is the gradient that is sent.

In which order a call's messages were started follows from the calls of the transport within it.

No schedule has to say anything, so one that mixes up its tensors is seen to do so. Tensors are
remembered by weak reference: watching keeps none of them alive.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minimegatron.core.tracing import Call
from minimegatron.planner.actions import ACTIVATION, GRADIENT, RECEIVE, SEND

PAYLOADS = (ACTIVATION, GRADIENT)


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
    """How many of this direction and payload came before it in this step."""
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    unit: Unit | None = None
    """What it was made by (send) or used for (receive); None until that is seen."""


class _Method(NamedTuple):
    """How to read one method of `P2PCommunicator`."""

    sends: tuple[tuple[str, str], ...]
    """(argument, payload)"""
    receives: tuple[str, ...]
    """The payloads of what it returns."""
    silent_if: str | None = None
    """The argument that, when true, makes it send and receive nothing."""


METHODS = {
    "forward-recv": _Method((), (ACTIVATION,), "is_first_stage"),
    "backward-recv": _Method((), (GRADIENT,), "is_last_stage"),
    "forward-send": _Method((("output_tensors", ACTIVATION),), (), "is_last_stage"),
    "backward-send": _Method((("input_tensor_grads", GRADIENT),), (), "is_first_stage"),
    "forward-send-backward-recv": _Method(
        (("output_tensors", ACTIVATION),), (GRADIENT,), "is_last_stage"
    ),
    "backward-send-forward-recv": _Method(
        (("input_tensor_grads", GRADIENT),), (ACTIVATION,), "is_first_stage"
    ),
    "forward-send-forward-recv": _Method((("output_tensor", ACTIVATION),), (ACTIVATION,)),
    "backward-send-backward-recv": _Method((("input_tensor_grad", GRADIENT),), (GRADIENT,)),
    "forward-backward-send-forward-backward-recv": _Method(
        (("output_tensor", ACTIVATION), ("input_tensor_grad", GRADIENT)), (ACTIVATION, GRADIENT)
    ),
}
"""The communicator's nine methods, by the names they are traced under."""


@dataclass(slots=True)
class Finding:
    """What is known of one traced call beyond its own attributes."""

    unit: Unit | None = None
    messages: Sequence[SeenMessage] = ()
    overlap: bool = False
    ordinal: int | None = None
    """Of the message that a call below the communicator starts or waits for."""
    started: list[tuple[str, str]] = field(default_factory=list)
    """(direction, payload) of each message that the transport was given, in that order."""

    def messages_as_started(self) -> list[SeenMessage]:
        """The messages in the order of `started`. Last come those that no transport was given."""
        waiting = list(self.messages)
        in_order = []
        for key in self.started:
            for place, message in enumerate(waiting):
                if (message.direction, message.payload) == key:
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
        self._unit_of_output, self._unit_of_grad = _ByIdentity(), _ByIdentity()
        self._received = _ByIdentity()
        self._num_messages: dict[tuple[str, str], int] = defaultdict(int)
        self._num_started: dict[tuple[str, str], int] = defaultdict(int)
        self._num_awaited: dict[tuple[str, str], int] = defaultdict(int)
        self._exchange = Finding()

    def begin(self, call: Call) -> Finding | None:
        """What can be told when a call begins: sizes of sends must be read before they are freed."""
        begin = self._BEGIN.get(call.name)
        return None if begin is None else begin(self, call)

    def end(self, call: Call, finding: Finding) -> None:
        """Adds what only the result tells. Nothing if the call raised."""
        if call.result is None:
            return
        if call.name == "forward-compute":
            for tensor in _tensors(call.result[0]):
                self._unit_of_output[tensor] = finding.unit
        elif call.name == "backward-compute":
            for tensor in _tensors(call.result):
                self._unit_of_grad[tensor] = finding.unit
        elif call.name in METHODS:
            self._end_exchange(call, METHODS[call.name], finding)

    # -- Forwards and backwards --

    def _begin_forward(self, call: Call) -> Finding:
        unit = Unit(call.attributes.get("microbatch"), call.attributes.get("chunk", 0))
        self._use(call.arguments["input_tensor"], unit)
        return Finding(unit)

    def _begin_backward(self, call: Call) -> Finding:
        unit = None
        for tensor in _tensors(call.arguments["output_tensor"]):
            unit = self._unit_of_output.get(tensor)
        self._use(call.arguments["output_tensor_grad"], unit)
        return Finding(unit)

    def _use(self, received: Any, unit: Unit | None) -> None:
        for tensor in _tensors(received):
            message = self._received.get(tensor)
            if message is not None:
                message.unit = unit

    # -- Messages --

    def _begin_exchange(self, call: Call) -> Finding:
        method, arguments = METHODS[call.name], call.arguments
        finding = Finding(messages=[], overlap=bool(arguments.get("overlap_p2p_comm")))
        if method.silent_if is None or not arguments[method.silent_if]:
            for argument, payload in method.sends:
                units = self._unit_of_output if payload == ACTIVATION else self._unit_of_grad
                for tensor in _tensors(arguments[argument]):
                    message = self._message(call, SEND, payload, tensor)
                    message.unit = units.get(tensor)
                    finding.messages.append(message)
        self._exchange = finding
        return finding

    def _end_exchange(self, call: Call, method: _Method, finding: Finding) -> None:
        result = call.result
        if finding.overlap:
            result = result[0]
        results = result if len(method.receives) > 1 else (result,)
        for payload, received in zip(method.receives, results, strict=False):
            for tensor in _tensors(received):
                message = self._message(call, RECEIVE, payload, tensor)
                self._received[tensor] = message
                finding.messages.append(message)

    def _message(self, call: Call, direction: str, payload: str, tensor: Any) -> SeenMessage:
        communicator = call.arguments["self"]
        goes_on = (direction == SEND) == (payload == ACTIVATION)
        ordinal = self._num_messages[direction, payload]
        self._num_messages[direction, payload] += 1
        return SeenMessage(
            direction,
            payload,
            communicator.next_rank if goes_on else communicator.prev_rank,
            ordinal,
            tensor.numel() * tensor.element_size(),
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
        )

    def _begin_start(self, call: Call) -> Finding | None:
        finding = self._count(call, self._num_started)
        if finding is not None:  # the exchange that began last is the one that starts messages
            direction = SEND if call.attributes["doing"] == "sending" else RECEIVE
            self._exchange.started.append((direction, call.attributes["payload"]))
        return finding

    def _begin_wait(self, call: Call) -> Finding | None:
        return self._count(call, self._num_awaited)

    def _count(self, call: Call, counts: dict[tuple[str, str], int]) -> Finding | None:
        # Messages of one kind travel between two stages in order, so counting is enough here.
        payload = call.attributes["payload"]
        if payload not in PAYLOADS:
            return None
        key = (SEND if call.attributes["doing"] == "sending" else RECEIVE, payload)
        counts[key] += 1
        return Finding(ordinal=counts[key] - 1)

    _BEGIN = {
        "forward-compute": _begin_forward,
        "backward-compute": _begin_backward,
        "p2p-start": _begin_start,
        "p2p-wait": _begin_wait,
        **dict.fromkeys(METHODS, _begin_exchange),
    }


def _tensors(tensors: Any) -> list:
    """The tensors among one, several, or none."""
    if not isinstance(tensors, list | tuple):
        tensors = (tensors,)
    return [tensor for tensor in tensors if hasattr(tensor, "element_size")]
