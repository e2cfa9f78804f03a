"""What carries a message between two stages: `torch.distributed`, on any device and backend.

It is the lowest link of the chain. Megatron has no such module: its communicator calls
`torch.distributed` itself and relies on NCCL. Tests put a fake in this place.

A transport sends and receives whole tensors between ranks of one process group. Two kinds differ in
what order they forgive:

* NCCL pairs the n-th send with the n-th receive of two ranks, and either blocks its stream until the
  other is there. Both sides must agree on the order of everything between them.
* gloo pairs by tag, and a message waits for its receive without blocking anybody. So does shared
  memory (`local_transport`), which takes gloo's place between stages on one host.
"""

import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from minimegatron.core.collectives import needs_staging
from minimegatron.core.local_host import get_timeout
from minimegatron.core.pipeline_parallel.work import ACTIVATION, GRADIENT
from minimegatron.core.tracing import traced

LANES = {ACTIVATION: 1, GRADIENT: 2, f"{ACTIVATION} shape": 3, f"{GRADIENT} shape": 4}
"""What keeps the payloads between two ranks apart, on a tagged wire."""
PAYLOADS = {lane: payload for payload, lane in LANES.items()}
_TAGS_PER_STEP, _MAX_STEPS = 8, 1 << 24


class TensorMessage(NamedTuple):
    """One tensor to or from `peer` (a rank within the pipeline group)."""

    is_send: bool
    tensor: torch.Tensor | None
    """None for a receive, until there is memory for it."""
    peer: int
    payload: str
    """ACTIVATION or GRADIENT, or one of them followed by " shape"."""
    chunk: int = 0
    """Of a send: the sender's chunk that made the tensor. Each chunk's messages are counted apart."""
    shape: Sequence[int] | None = None
    """Of a receive: what will come, [s/c/t, b, h]."""


def describe_message(arguments: dict[str, Any]) -> dict[str, Any]:
    """What observers are told of a message that starts."""
    message = arguments["message"]
    return {
        "peer": message.peer,
        "payload": message.payload,
        "doing": "sending" if message.is_send else "receiving",
        "bytes": message.tensor.numel() * message.tensor.element_size(),
    }


class Handle(Protocol):
    """The handle of a message under way. Until `wait` returns, its tensor may still be read."""

    def wait(self) -> Any: ...


Message, Work = TensorMessage, Handle
"""The same under the names that students' files import."""


class Transport(Protocol):
    """What `P2PCommunicator` needs."""

    matches_by_tag: bool
    """True if activations and gradients cannot be taken for each other, and sends run on alone."""
    keeps_messages: bool
    """True if a message that was sent is safe without its sender: the step's end need not wait.
    This and the last three methods are asked of a transport that matches by tag alone."""

    def start(self, message: TensorMessage) -> Handle:
        """Starts one message. Where the transport does not match by tag, order is meaning."""

    def start_batch(self, messages: list[TensorMessage]) -> list[Handle]:
        """Starts all messages, at least one, together: none waits for another of its batch."""

    def begin_step(self) -> None:
        """All ranks of the group begin a step: what a failed one left behind is not taken for it."""

    def end_step(self) -> None:
        """The step has ended well on this rank."""

    def abandon(self, reason: str) -> None:
        """The step has failed on this rank; tells the neighbours, where that is possible."""


class Peers(dict):
    """By rank, the other end of each link of a transport that starts messages one by one."""

    def __init__(self, transport: Transport):
        super().__init__()
        self._transport = transport

    def __missing__(self, peer: int) -> "_Peer":
        self[peer] = _Peer(self._transport, peer)
        return self[peer]


class _Peer:
    """One of them, with the two methods of a `Connection` that carry messages."""

    def __init__(self, transport: Transport, peer: int):
        self._start, self._peer = transport.start, peer

    def send(self, tensor: torch.Tensor, channel: tuple[str, int], lane: int) -> Handle:
        return self._start(TensorMessage(True, tensor, self._peer, *channel))

    def expect(self, tensor: torch.Tensor, how: str, lane: int) -> Handle:
        return self._start(TensorMessage(False, tensor, self._peer, PAYLOADS[lane]))


class TorchTransport:
    """Messages over one `torch.distributed` process group.

    Where gloo carries them, each message's tag has the number of its step, so that a message that a
    failed step left behind meets no receive of the next one. gloo and NCCL cannot tell a neighbour
    that a rank has given up: it waits until the group's time-out, and then the group is lost.
    """

    keeps_messages = False

    def __init__(self, group: dist.ProcessGroup):
        # Weakly: there is one transport per group, as long as the group.
        self._group, self.step = weakref.ref(group), 0
        self.matches_by_tag = dist.get_backend(group) == "gloo"

    @property
    def group(self) -> dist.ProcessGroup:
        """The group that the messages travel in."""
        return self._group()

    def has_links(self, links: Iterable[tuple[int, int]]) -> bool:
        """True: every rank of the group can be reached."""
        return True

    def begin_step(self) -> None:
        """Counts."""
        self.step += 1

    def end_step(self) -> None:
        """Nothing: the number of a message is that of its step."""

    def abandon(self, reason: str) -> None:
        """Nobody can be told."""

    def start(self, message: TensorMessage) -> Handle:
        """Raises what `torch.distributed` raises, for example if the peer has gone."""
        if needs_staging(message.tensor, self.group):
            return _Staged(message, self.group, self.step)
        work = _start(message, message.tensor, self.group, self.step)
        return _Limited(work, get_timeout(self.group)) if self.matches_by_tag else work

    def start_batch(self, messages: list[TensorMessage]) -> list[Handle]:
        """gloo needs no batch; NCCL gets one, and one handle comes back for all of it.

        Raises ValueError for an empty batch: NCCL refuses it, so gloo does too.
        """
        if not messages:
            raise ValueError("a batch of 0 messages; do not start a batch without messages")
        if self.matches_by_tag:
            return [self.start(message) for message in messages]
        works = dist.batch_isend_irecv([_operation(message, self.group) for message in messages])
        return works * len(messages) if len(works) == 1 else works


@traced("p2p-start", describe_message)
def _start(
    message: TensorMessage, tensor: torch.Tensor, group: dist.ProcessGroup, step: int
) -> Handle:
    tag = LANES[message.payload] + (step % _MAX_STEPS) * _TAGS_PER_STEP
    if message.is_send:
        return dist.isend(tensor, group=group, group_dst=message.peer, tag=tag)
    return dist.irecv(tensor, group=group, group_src=message.peer, tag=tag)


@traced("p2p-start", describe_message)
def _operation(message: TensorMessage, group: dist.ProcessGroup) -> dist.P2POp:
    start = dist.isend if message.is_send else dist.irecv
    return dist.P2POp(start, message.tensor, group=group, group_peer=message.peer)


class _Limited:
    """A message over gloo. Unless told the group's limit, it waits as long as the default group may."""

    def __init__(self, work: dist.Work, seconds: float):
        self._work, self._limit = work, timedelta(seconds=seconds)

    def wait(self) -> bool:
        return self._work.wait(self._limit)


class _Staged:
    """A message of a device tensor over gloo: through a host copy that lives as long as this."""

    def __init__(self, message: TensorMessage, group: dist.ProcessGroup, step: int):
        self._message = message
        tensor = message.tensor.detach()
        self._host = tensor.cpu() if message.is_send else torch.empty_like(tensor, device="cpu")
        self._work = _Limited(_start(message, self._host, group, step), get_timeout(group))

    def wait(self) -> bool:
        self._work.wait()
        if not self._message.is_send:
            self._message.tensor.detach().copy_(self._host)
        return True
