"""Messages in NCCL's order, but over gloo: without tags, and each end waits for the other.

On gloo itself, and between stages of one host, a wrong order often works: messages have tags, and
`isend` does not wait. Here the n-th send from one rank to another meets the n-th receive, or nobody
goes on: the program waits where on NCCL the GPU's stream would. Megatron has no counterpart.

Every transport counts time: a message takes 1 from when both ends are there, everything else takes
none. So "how long does an exchange take?" has an exact answer, on any machine.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import Done
from minimegatron.core.orders.work import ACTIVATION, GRADIENT
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, TensorMessage
from minimegatron.exercises.bench.feedback import Wrong
from minimegatron.exercises.bench.replacing import installed

MODULE = "minimegatron.core.pipeline_parallel.p2p_communication."
PAYLOADS = (ACTIVATION, GRADIENT)
_HEADER, _DATA, _ANSWER = 21, 22, 23


@contextlib.contextmanager
def without_tags() -> "Iterator[list[RendezvousTransport]]":
    """Within it, each communicator sends over a `RendezvousTransport`; yields those that were made."""
    _made.clear()

    def start(self: P2PCommunicator, message: TensorMessage) -> Any:
        return transport_of(self).start(message)

    def operation(self: P2PCommunicator, message: TensorMessage) -> Any:
        return transport_of(self).start_in_batch(message)

    def start_batch(self: P2PCommunicator, messages: list[TensorMessage]) -> list[Any]:
        # Sends first: what is on its way tells the time before anything of the batch is over.
        in_order = sorted(messages, key=lambda message: not message.is_send)
        works = {id(message): self._operation(message) for message in in_order}
        return [works[id(message)] for message in messages]

    with (
        installed(lambda group: False, MODULE + "is_tagged"),
        installed(start, MODULE + "P2PCommunicator.start"),
        installed(operation, MODULE + "P2PCommunicator._operation"),
        installed(start_batch, MODULE + "P2PCommunicator.start_batch"),
    ):
        yield _made


_made: "list[RendezvousTransport]" = []


def transport_of(communicator: P2PCommunicator) -> "RendezvousTransport":
    """The one of this communicator, its attribute `transport`: made when it is first asked for."""
    if not hasattr(communicator, "transport"):
        communicator.transport = RendezvousTransport(communicator.pp_group)
        _made.append(communicator.transport)
    return communicator.transport


class RendezvousTransport:
    """One stage's end of all its links."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.clock = 0
        self.num_messages = 0
        self._num_received: dict[int, int] = {}

    def start(self, message: TensorMessage) -> Done:
        """Returns once the message is through."""
        self._offer(message).wait()
        return Done()

    def start_in_batch(self, message: TensorMessage) -> "_Sending | _Receiving":
        """Returns at once. The message waits for no other of the batch."""
        work = self._offer(message)
        if isinstance(work, _Receiving):
            work.run_aside()
        return work

    def _offer(self, message: TensorMessage) -> "_Sending | _Receiving":
        self.num_messages += message.is_send
        if message.is_send:
            return _Sending(self, message)
        number = self._num_received.get(message.peer, 0)
        self._num_received[message.peer] = number + 1
        return _Receiving(self, message, number)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Starts a message of gloo."""
        return dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Waits for a message of gloo."""
        dist.irecv(tensor, group=self.group, group_src=peer, tag=tag).wait()


class _Sending:
    """The sender's end: leaves a header and the data, and waits for an answer."""

    def __init__(self, transport: RendezvousTransport, message: TensorMessage):
        self._transport, self._peer = transport, message.peer
        header = torch.tensor([transport.clock, PAYLOADS.index(message.payload)])
        parts = ((header, _HEADER), (message.tensor.detach().clone(), _DATA))
        self._sent = [(part, transport.send(part, message.peer, tag)) for part, tag in parts]

    def wait(self) -> bool:
        """Returns once the receiver has answered with the time at which both were there."""
        if self._sent:
            answer = torch.zeros(1, dtype=torch.int64)
            self._transport.receive(answer, self._peer, _ANSWER)
            self._transport.clock = max(self._transport.clock, int(answer))
            for _, work in self._sent:
                work.wait()
            self._sent = []
        return True


class _Receiving:
    """The receiver's end: takes header and data, and answers."""

    def __init__(self, transport: RendezvousTransport, message: TensorMessage, number: int):
        self._transport, self._message, self._number = transport, message, number
        self._begin = transport.clock
        self._thread: threading.Thread | None = None
        self._failure: Wrong | None = None
        self._is_over = False

    def run_aside(self) -> None:
        """Lets the message come while this rank waits for others of the same batch."""
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Returns once the tensor is here. Raises Wrong if it is not the kind that was expected."""
        if not self._is_over:
            if self._thread is None:
                self._take()
            else:
                self._thread.join()
            self._is_over = True
            if self._failure is not None:
                raise self._failure
        return True

    def _take(self) -> None:
        transport, message = self._transport, self._message
        header = torch.zeros(2, dtype=torch.int64)
        transport.receive(header, message.peer, _HEADER)
        found = PAYLOADS[int(header[1])]
        if found != message.payload:
            self._failure = Wrong(self._words(found))
            return
        with torch.no_grad():
            transport.receive(message.tensor, message.peer, _DATA)
        now = max(self._begin, int(header[0])) + 1
        transport.clock = max(transport.clock, now)
        transport.send(torch.tensor([now]), message.peer, _ANSWER).wait()

    def _words(self, found: str) -> str:
        ranks = dist.get_process_group_ranks(self._transport.group)
        there, here = ranks[self._message.peer], ranks[self._transport.group.rank()]
        return (
            f"rank {here}: receives a {self._message.payload} from rank {there}, but what arrives "
            f"is of the other kind, the {found}\nOn NCCL, messages between two ranks have no names: "
            f"send number n from rank {there} to rank {here} meets receive number n, here number "
            f"{self._number}. Both ranks must have the same order of what travels between them."
        )
