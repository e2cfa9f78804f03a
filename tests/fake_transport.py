"""A transport without processes that forgives as little as NCCL on GPUs.

Two passes. First the program of each rank runs by itself, from beginning to end: nothing it calls
computes or sends; the transport only notes what would go into the rank's streams. That is possible
because a program on a GPU does not look at numbers. Then `Network.run` does the work of all streams,
with all their rules (`fake_streams`).

What a tensor would hold is known in the second pass only, so a program that reads a number fails.
"""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, TensorMessage
from tests.fake_streams import (
    NO_TIME,
    PAIRS,
    Deadlock,
    Free,
    Kernel,
    Leftover,
    Lengths,
    Machine,
    Part,
    Post,
    Race,
    Synchronize,
    Wait,
)

__all__ = [
    "Deadlock",
    "FakeCommunicator",
    "FakeGroup",
    "FakeTransport",
    "Leftover",
    "Network",
    "Race",
    "no_numbers",
]


@dataclass(frozen=True)
class FakeGroup:
    """A process group as far as schedules look at it."""

    my_rank: int = 0
    my_size: int = 1

    def rank(self) -> int:
        return self.my_rank

    def size(self) -> int:
        return self.my_size

    def name(self) -> str:
        return "nccl"


class Network:
    """The programs of `size` ranks, and what they did.

    `device`: where tensors of messages must be; the CPU stands for the GPU. `sizes`: what each message
    about shapes tells. These numbers programs do read: the first pass assumes them, the second checks.
    """

    def __init__(self, size: int, device: str = "cpu", sizes: tuple[int, ...] = (1, 1, 2)):
        self.size, self.device, self.sizes = size, device, list(sizes)
        self.programs: list[list] = [[] for _ in range(size)]
        self.log: list[list] = [[] for _ in range(size)]
        """Per rank, in the program's order: its posts, and what the test's model adds."""

    def run(self, lone: str = PAIRS, lengths: Lengths = NO_TIME) -> Machine:
        """The second pass. Raises what `Machine.run` raises."""
        machine = Machine(self.programs, lone, lengths)
        machine.run()
        return machine


def no_numbers() -> Any:
    """Within it, a program that reads a tensor's number fails: on a GPU it would stop and wait."""

    def refuse(tensor):
        raise AssertionError("the program reads a tensor's number, which stops it on a GPU")

    methods = ("item", "__bool__", "__int__", "__float__")
    return mock.patch.multiple(torch.Tensor, **dict.fromkeys(methods, refuse))


class _Memory:
    """Numbers for the storages of one rank's tensors; notes when nobody holds one any more."""

    def __init__(self):
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._num_buffers = 0

    def number_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        # A weak reference keeps the address from being used again, not the storage alive.
        if storage._cdata not in self._held:
            self._num_buffers += 1
            self._held[storage._cdata] = (StorageWeakRef(storage), self._num_buffers)
        return self._held[storage._cdata][1]

    def take_freed(self) -> list[int]:
        expired = torch.UntypedStorage._expired  # as `StorageWeakRef.expired`, in half the time
        gone = [address for address in self._held if expired(address)]
        return [self._held.pop(address)[1] for address in gone]


class Handle:
    """Of one message. It does not keep the memory that is sent; whoever sends must."""

    def __init__(self, transport: "FakeTransport", post: Post, message: TensorMessage):
        self._transport, self._post = transport, post
        self.message = message._replace(tensor=None) if message.is_send else message

    def wait(self) -> bool:
        self._transport.note(Wait(self._post.number))
        if self.message.payload.endswith("shape") and not self.message.is_send:
            self._transport.read_sizes(self.message.tensor)
        return True


class FakeTransport:
    """One rank's end of a `Network`: what carries its messages, and its compute stream."""

    def __init__(self, network: Network, rank: int, matches_by_tag: bool = False):
        self.network, self.rank, self.matches_by_tag = network, rank, matches_by_tag
        self._memory, self._num_posts = _Memory(), 0

    def start(self, message: TensorMessage) -> Handle:
        return self._post([message], is_batch=False)[0]

    def start_batch(self, messages: list[TensorMessage]) -> list[Handle]:
        """Raises IndexError for an empty batch, as torch does."""
        if not messages:
            raise IndexError(f"rank {self.rank} starts an empty batch")
        return self._post(messages, is_batch=True)

    def _post(self, messages: list[TensorMessage], is_batch: bool) -> list[Handle]:
        for message in messages:
            if message.tensor.device.type != self.network.device:
                raise ValueError(
                    f"rank {self.rank} gave NCCL a tensor on {message.tensor.device.type}, not on "
                    f"{self.network.device} ({message.payload})"
                )
            if message.payload.endswith("shape") and message.is_send:
                self.compute("sizes are written", writes={message.tensor: message.tensor.tolist()})
        post = Post(self._num_posts, is_batch, tuple(map(self._part, messages)))
        self._num_posts += 1
        self.note(post)
        self.network.log[self.rank].append(post)
        return [Handle(self, post, message) for message in messages]

    def _part(self, message: TensorMessage) -> Part:
        tensor = message.tensor
        return Part(
            message.is_send,
            message.peer,
            message.payload,
            self._memory.number_of(tensor),
            tuple(tensor.shape),
            tensor.numel() * tensor.element_size(),
        )

    def note(self, entry: Any) -> None:
        """Puts one entry into the program, after memory that was freed since the last one."""
        program = self.network.programs[self.rank]
        program.extend(map(Free, self._memory.take_freed()))
        program.append(entry)

    def compute(
        self,
        name: str,
        reads: dict[torch.Tensor, Any] | None = None,
        writes: dict[torch.Tensor, Any] | None = None,
    ) -> None:
        """A kernel: tensors it reads, with what they must hold then; tensors it writes."""
        entries = (
            tuple((self._memory.number_of(tensor), value) for tensor, value in (of or {}).items())
            for of in (reads, writes)
        )
        self.note(Kernel(name, *entries))

    def read_sizes(self, tensor: torch.Tensor) -> None:
        """The program reads the numbers of a message about shapes, and waits for them."""
        self.compute("sizes are read", reads={tensor: self.network.sizes})
        self.note(Synchronize())
        tensor.copy_(torch.tensor(self.network.sizes))


class FakeCommunicator(P2PCommunicator):
    """The real one, whose messages a `FakeTransport` notes."""

    def __init__(self, group: FakeGroup, config: Any, transport: FakeTransport):
        self.transport = transport
        super().__init__(group, config)

    def begin_step(self, *limit: int) -> None:
        super().begin_step(*limit)
        self.is_tagged = self.transport.matches_by_tag

    def start(self, message: TensorMessage) -> Handle:
        return self.transport.start(message)

    def start_batch(self, messages: list[TensorMessage]) -> list[Handle]:
        with mock.patch.object(dist, "batch_isend_irecv", self.transport.start_batch):
            return super().start_batch(messages)

    def _operation(self, message: TensorMessage) -> TensorMessage:
        return message
