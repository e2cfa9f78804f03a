"""Messages between stages on one host, through shared memory instead of gloo.

Megatron has no counterpart.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from minimegatron.core.local_host import LENT, Connection, connect
from minimegatron.core.pipeline_parallel.transport import (
    LANES,
    PAYLOADS,
    Handle,
    TensorMessage,
    TorchTransport,
    Transport,
)
from minimegatron.core.tracing import traced


def _describe(arguments: dict[str, Any]) -> dict[str, Any]:
    tensor, is_send = arguments["tensor"], "channel" in arguments
    return {
        "peer": arguments["self"].peer,
        "payload": PAYLOADS[arguments["lane"]],
        "doing": "sending" if is_send else "receiving",
        "bytes": tensor.numel() * tensor.element_size(),
    }


class StageConnection(Connection):
    """A connection between two stages. Each payload is a lane of its own; observers see each start."""

    send = traced("p2p-start", _describe)(Connection.send)
    expect = traced("p2p-start", _describe)(Connection.expect)


def make_transport(
    group: dist.ProcessGroup, known: Transport | None, links: Iterable[tuple[int, int]]
) -> Transport:
    """Connects the stages of `group` that are neighbours in the ring, or joined by one of `links`.

    Collective over `group`. `known` is the transport that the group has had, whose connections stay.
    """
    rank, size = group.rank(), group.size()
    if size == 1 or dist.get_backend(group) != "gloo" or isinstance(known, TorchTransport):
        return TorchTransport(group)
    ring = {(stage, (stage + 1) % size) for stage in range(size)}
    wanted = _once(ring | set(links))
    new = wanted - (known.links if isinstance(known, LocalTransport) else set())
    callees = sorted(b for a, b in new if a == rank)
    callers = sorted(a for a, b in new if b == rank)
    connections = connect(group, callees=callees, callers=callers, kind=StageConnection)
    if connections is None:
        return TorchTransport(group)
    transport = known or LocalTransport()
    transport.links |= new
    transport.connections |= connections[0] | connections[1]
    return transport


def _once(links: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Each link in one direction: the lower rank calls the higher one."""
    return {(min(link), max(link)) for link in links}


class LocalTransport:
    """One stage's connections, one for each stage that it exchanges messages with."""

    matches_by_tag = True
    keeps_messages = True

    def __init__(self):
        self.connections: dict[int, StageConnection] = {}
        self.links: set[tuple[int, int]] = set()
        # Per channel, what was sent and perhaps not taken yet; over the steps, as the memory is.
        self.unfinished_sends: dict[tuple, deque] = defaultdict(deque)

    def has_links(self, links: Iterable[tuple[int, int]]) -> bool:
        """Whether all these pairs of ranks are connected."""
        return _once(links) <= self.links

    def start(self, message: TensorMessage) -> Handle:
        """Sends at once, or notes a receive, which its `wait` completes."""
        connection, lane = self.connections[message.peer], LANES[message.payload]
        if message.is_send:
            return connection.send(message.tensor, (message.payload, message.chunk), lane)
        return connection.expect(message.tensor, LENT, lane)

    def start_batch(self, messages: list[TensorMessage]) -> list[Handle]:
        """No message waits for another, so a batch is nothing special."""
        return [self.start(message) for message in messages]

    def begin_step(self) -> None:
        """What the last step has left behind is not taken for this step's."""
        for connection in self.connections.values():
            connection.begin_step()

    def end_step(self) -> None:
        """The step has ended well on this stage."""
        for connection in self.connections.values():
            connection.end_step()

    def abandon(self, reason: str) -> None:
        """Ends a step that failed; tells the stages it is connected with that nothing more comes."""
        self.unfinished_sends.clear()
        for connection in self.connections.values():
            connection.abandon(reason)
