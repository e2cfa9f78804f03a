"""Messages between stages on one host, through shared memory instead of gloo.

Called by: `P2PCommunicator`, in place of `TorchTransport`, where all stages of a pipeline share a
host and gloo would carry their messages. Calls: `core.local_channels`, which tells how and why.
Megatron has no counterpart.
"""

import socket
import weakref

import torch.distributed as dist

from minimegatron.core.local_channels import Incoming, Outgoing, connect
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
    return _transports[group]


def _make_transport(group: dist.ProcessGroup) -> Transport:
    rank, size = group.rank(), group.size()
    if size == 1 or dist.get_backend(group) != "gloo":
        return TorchTransport(group)
    next_rank, prev_rank = (rank + 1) % size, (rank - 1) % size
    connections = connect(group, callees=[next_rank], num_callers=1)
    if connections is None:
        return TorchTransport(group)
    called, callers = connections
    return LocalTransport(called[next_rank], callers[prev_rank])


class LocalTransport:
    """One stage's connections: activations go to the next stage, gradients to the previous one."""

    matches_by_tag = True

    def __init__(self, to_next: socket.socket, to_prev: socket.socket):
        self._outgoing = {ACTIVATION: Outgoing(to_next), GRADIENT: Outgoing(to_prev)}
        self._incoming = {ACTIVATION: Incoming(to_prev), GRADIENT: Incoming(to_next)}

    @traced("p2p-start", describe_message)
    def start(self, message: Message) -> Work:
        """Sends at once, or notes a receive, which its `wait` completes."""
        payload = message.payload.split()[0]
        if message.is_send:
            self._outgoing[payload].send(message.tensor)
            return _Sent()
        return self._incoming[payload].expect(message.tensor)

    def start_batch(self, messages: list[Message]) -> list[Work]:
        """No message waits for another, so a batch is nothing special."""
        return [self.start(message) for message in messages]


class _Sent:
    """The handle of a message that has left already."""

    def wait(self) -> bool:
        return True
