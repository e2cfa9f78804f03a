"""Messages between stages on one host, through shared memory instead of gloo.

Called by: `P2PCommunicator`, in place of `TorchTransport`, where all stages of a pipeline share a
host and gloo would carry their messages. Calls: `core.local_channels`, which tells how and why.
Megatron has no counterpart.
"""

import weakref
from collections import defaultdict, deque

import torch.distributed as dist

from minimegatron.core.local_channels import LENT, Connection, connect, get_timeout
from minimegatron.core.pipeline_parallel.send_limits import Channel
from minimegatron.core.pipeline_parallel.transport import (
    ACTIVATION,
    GRADIENT,
    Message,
    TorchTransport,
    Transport,
    Work,
    describe_message,
)
from minimegatron.core.tracing import traced

_transports: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def get_transport(group: dist.ProcessGroup) -> Transport:
    """The transport of `group`, made on first use, by all its ranks together."""
    if group not in _transports:
        _transports[group] = _make_transport(group)
    transport = _transports[group]
    if isinstance(transport, LocalTransport):
        transport.set_timeout(get_timeout(group))
    return transport


def _make_transport(group: dist.ProcessGroup) -> Transport:
    rank, size = group.rank(), group.size()
    if size == 1 or dist.get_backend(group) != "gloo":
        return TorchTransport(group)
    next_rank, prev_rank = (rank + 1) % size, (rank - 1) % size
    connections = connect(group, callees=[next_rank], callers=[prev_rank])
    if connections is None:
        return TorchTransport(group)
    called, came = connections
    return LocalTransport(called[next_rank], came[prev_rank])


def fail_messages(group: dist.ProcessGroup, reason: str) -> None:
    """A step of `group` fails before it has begun here: begins it, and tells both neighbours."""
    transport = get_transport(group)
    if isinstance(transport, LocalTransport):
        transport.begin_step()
        transport.abandon(reason)


class LocalTransport:
    """One stage's connections: activations go to the next stage, gradients to the previous one."""

    matches_by_tag = True
    keeps_messages = True

    def __init__(self, to_next: Connection, to_prev: Connection):
        self._outgoing = {ACTIVATION: to_next, GRADIENT: to_prev}
        self._incoming = {ACTIVATION: to_prev, GRADIENT: to_next}
        # Per channel, what was sent and perhaps not taken yet; over the steps, as the memory is.
        self.unfinished_sends: dict[Channel, deque] = defaultdict(deque)

    @traced("p2p-start", describe_message)
    def start(self, message: Message) -> Work:
        """Sends at once, or notes a receive, which its `wait` completes."""
        payload = message.payload.split()[0]
        if message.is_send:
            channel = (message.payload, message.chunk)
            return self._outgoing[payload].send(message.tensor, channel)
        return self._incoming[payload].expect(message.tensor, LENT)

    def start_batch(self, messages: list[Message]) -> list[Work]:
        """No message waits for another, so a batch is nothing special."""
        return [self.start(message) for message in messages]

    def set_timeout(self, seconds: float) -> None:
        """From now on, no message waits longer."""
        for connection in self._outgoing.values():
            connection.set_timeout(seconds)

    def begin_step(self) -> None:
        """What the last step has left behind is not taken for this step's."""
        for connection in self._outgoing.values():
            connection.begin_step()

    def end_step(self) -> None:
        """The step has ended well on this stage."""
        for connection in self._outgoing.values():
            connection.end_step()

    def abandon(self, reason: str) -> None:
        """Ends a step that failed; tells both neighbours that nothing more will come."""
        self.unfinished_sends.clear()
        for connection in self._outgoing.values():
            connection.abandon(reason)
