"""Messages as NCCL carries them, but over gloo: without names, and each end waits for the other.

Used by: checks of code that decides an order of messages. On gloo itself, and between stages of one
host, a wrong order often works: messages have tags, and a send does not wait. Here the n-th send from
one rank to another meets the n-th receive, or nobody goes on. Megatron has no counterpart.

Every transport counts time: a message takes 1 from when both ends are there, everything else takes
none. So "how long does an exchange take?" has an exact answer, on any machine.
"""

from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import Done
from minimegatron.core.pipeline_parallel.transport import (
    ACTIVATION,
    GRADIENT,
    Message,
    describe_message,
)
from minimegatron.core.tracing import traced
from minimegatron.exercises.feedback import Wrong

GET_TRANSPORT = "minimegatron.core.pipeline_parallel.local_transport.get_transport"
"""What `installed(RendezvousTransport, ...)` replaces."""
PAYLOADS = (ACTIVATION, GRADIENT)
_HEADER, _DATA, _ANSWER = 21, 22, 23


class RendezvousTransport:
    """One stage's end of all its links."""

    matches_by_tag = False

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.clock = 0
        self.num_messages = 0
        self._num_received: dict[int, int] = {}

    @traced("p2p-start", describe_message)
    def start(self, message: Message) -> Done:
        """Returns once the message is through."""
        self._finish([self._offer(message)])
        return Done()

    def start_batch(self, messages: list[Message]) -> list[Done]:
        """Returns once all are through; none of them waits for another of the batch."""
        self._start_all(messages)
        return [Done()] * len(messages)

    @traced("p2p-start", lambda a: describe_message({"message": _awaited(a["messages"])}))
    def _start_all(self, messages: list[Message]) -> None:
        self._finish([self._offer(message) for message in messages])

    # A send leaves its header and its data, and waits for an answer. A receive takes them, and
    # answers with the time at which both ends were there.

    def _offer(self, message: Message) -> tuple[Message, list[Any]]:
        self.num_messages += message.is_send
        if not message.is_send:
            return message, []
        header = torch.tensor([self.clock, PAYLOADS.index(message.payload)])
        parts = ((header, _HEADER), (message.tensor.detach().clone(), _DATA))
        return message, [(part, self._send(part, message.peer, tag)) for part, tag in parts]

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)

    def _finish(self, offers: list[tuple[Message, list[Any]]]) -> None:
        begin = self.clock
        answers = []
        for message, _ in offers:
            if not message.is_send:
                answers.append(self._receive(message, begin))
        for message, _ in offers:
            if message.is_send:
                answer = torch.zeros(1, dtype=torch.int64)
                self._wait(
                    dist.irecv(answer, group=self.group, group_src=message.peer, tag=_ANSWER)
                )
                self.clock = max(self.clock, int(answer))
        for _, sent in [*offers, (None, answers)]:
            for _, work in sent:
                work.wait()

    def _receive(self, message: Message, begin: int) -> Any:
        header = torch.zeros(2, dtype=torch.int64)
        peer = message.peer
        self._wait(dist.irecv(header, group=self.group, group_src=peer, tag=_HEADER))
        number = self._num_received.get(peer, 0)
        self._num_received[peer] = number + 1
        found = PAYLOADS[int(header[1])]
        if found != message.payload:
            ranks = dist.get_process_group_ranks(self.group)
            there, here = ranks[peer], ranks[self.group.rank()]
            raise Wrong(
                f"rank {here}: receives a {message.payload} from rank {there}, but what arrives is "
                f"an {found}\nOn NCCL, messages between two ranks have no names: send number n from "
                f"rank {there} to rank {here} meets receive number n, here number {number}. Both "
                "ranks must have the same order of what travels between them."
            )
        with torch.no_grad():
            self._wait(dist.irecv(message.tensor, group=self.group, group_src=peer, tag=_DATA))
        self.clock = max(self.clock, max(begin, int(header[0])) + 1)
        answer = torch.tensor([self.clock])
        return answer, self._send(answer, peer, _ANSWER)

    def _wait(self, work: Any) -> None:
        work.wait()


def _awaited(messages: list[Message]) -> Message:
    """The one to name when a batch waits: a receive, if there is one."""
    return min(messages, key=lambda message: message.is_send)
