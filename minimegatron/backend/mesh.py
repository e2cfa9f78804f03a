"""The ranks of a group are connected, and each collective is one exchange of messages in shared memory.

Every rank sends its part to each rank that needs it, and combines what it gets in the order of the
ranks, so that all ranks get the same bits. In an all-reduce over t ranks that is (t - 1) n bytes sent
per rank, where a ring sends 2 (t - 1) n / t: equal for t = 2, twice as much for t = 4. What counts for
a small tensor is that each rank is woken once, where gloo's threads wake each other several times.

All tensors here are on the CPU or on a device that ranks share; shared memory has them in between.
Megatron has no counterpart.
"""

import json
import resource
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from minimegatron.backend.channels import (
    COPIED,
    IN_PLACE,
    STEPS,
    Connection,
    PendingReceive,
    Sent,
)
from minimegatron.backend.handshake import is_supported, meet
from minimegatron.backend.incoming import FIRST_LANE_OF_NO_STEP, WireError
from minimegatron.backend.slots import Arena
from minimegatron.backend.waiting import reader
from minimegatron.backend.works import ReceivedFromAny, SentWork, SharedMemoryWork

MOST_BYTES_AHEAD, MOST_MESSAGES_AHEAD = 4 << 20, 16
"""So much may a rank have sent to another in one direction before the other takes any of it; a single
message may be larger. Then `wait` waits: over gloo it does so for each message. In other collectives a
rank takes as much from each peer as it sends there."""
_COMBINE: dict[str, Callable] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_NUM_CHANNELS = 8
"""Of messages between two ranks: one of each channel may be lent at a time."""
Tensors = Sequence[torch.Tensor]


def check_op(op: str, dtype: torch.dtype) -> None:
    """Raises ValueError where `op` has no meaning for `dtype`."""
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    if op == "AVG" and is_whole:
        raise ValueError(f"op AVG of {dtype}: a mean of whole numbers; reduce with SUM and divide")
    if op in ("BAND", "BOR", "BXOR") and not is_whole:
        raise ValueError(f"op {op} of {dtype}: bits of numbers that are not whole; convert them")


class Mesh:
    """This rank's connections to every other rank of a group.

    Args:
        rank: of this process, within the group.
        connections: by rank.
    """

    def __init__(self, rank: int, connections: dict[int, Connection]):
        self.rank = rank
        self.peers, self.to = sorted(connections), connections
        self._ahead = {peer: _Ahead() for peer in connections}

    # -- Collectives --

    def all_reduce(self, tensor: torch.Tensor, op: str, call: int) -> SharedMemoryWork:
        """Reduces `tensor` in place, on all ranks."""
        own = tensor.detach()
        for connection in self.to.values():
            connection.send(own, None, STEPS, call)
        return self._reduced([tensor], own, own, op, call)

    def reduce(self, tensor: torch.Tensor, op: str, root: int, call: int) -> SharedMemoryWork:
        """Reduces `tensor` in place, on rank `root`."""
        own = tensor.detach()
        if self.rank != root:
            return self._sent([tensor], {root: own}, call)
        return self._reduced([tensor], own, own, op, call)

    def broadcast(self, tensor: torch.Tensor, root: int, call: int) -> SharedMemoryWork:
        """Copies `tensor` of rank `root` to all ranks, in place."""
        if self.rank == root:
            return self._sent([tensor], dict.fromkeys(self.peers, tensor.detach()), call)
        return SharedMemoryWork([tensor], [self.to[root].expect(tensor, call=call)])

    def all_gather(
        self,
        outputs: Tensors,
        input: torch.Tensor,
        call: int,
        finish: Callable[[], None] | None = None,
    ) -> SharedMemoryWork:
        """Copies `input` of rank i to `outputs[i]`, on all ranks."""
        for peer in self.peers:
            self.to[peer].send(input, call=call)
        outputs[self.rank].detach().copy_(input.detach().view_as(outputs[self.rank]))
        arrivals = [self.to[peer].expect(outputs[peer], call=call) for peer in self.peers]
        return SharedMemoryWork(outputs, arrivals, finish)

    def all_gather_of_no_step(
        self, outputs: Tensors, input: torch.Tensor, number: int, call: int
    ) -> SharedMemoryWork:
        """As `all_gather`; the messages travel in a lane of no step, number `number` from 0."""
        lane = FIRST_LANE_OF_NO_STEP + number
        for peer in self.peers:
            self.to[peer].send(input, "lanes", lane, call)
        outputs[self.rank].copy_(input.detach())
        arrivals = [self.to[peer].expect(outputs[peer], COPIED, lane, call) for peer in self.peers]
        return SharedMemoryWork(outputs, arrivals, may_be_repeated=True)

    def gather(
        self, outputs: Tensors, input: torch.Tensor, root: int, call: int
    ) -> SharedMemoryWork:
        """Copies `input` of rank i to `outputs[i]` of rank `root`; elsewhere `outputs` is empty."""
        if self.rank != root:
            return self._sent([], {root: input}, call)
        outputs[root].detach().copy_(input.detach())
        arrivals = [self.to[peer].expect(outputs[peer], call=call) for peer in self.peers]
        return SharedMemoryWork(outputs, arrivals)

    def scatter(
        self, output: torch.Tensor, inputs: Tensors, root: int, call: int
    ) -> SharedMemoryWork:
        """Copies `inputs[i]` of rank `root` to `output` of rank i; elsewhere `inputs` is empty."""
        if self.rank != root:
            return SharedMemoryWork([output], [self.to[root].expect(output, call=call)])
        output.detach().copy_(inputs[root].detach())
        return self._sent([output], {peer: inputs[peer] for peer in self.peers}, call)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Tensors, op: str, call: int
    ) -> SharedMemoryWork:
        """Reduces `inputs[i]` of all ranks into `output` of rank i."""
        for peer in self.peers:
            self.to[peer].send(inputs[peer], call=call)
        return self._reduced([output], output.detach(), inputs[self.rank].detach(), op, call)

    def all_to_all(
        self,
        outputs: Tensors,
        inputs: Tensors,
        call: int,
        finish: Callable[[], None] | None = None,
    ) -> SharedMemoryWork:
        """Copies `inputs[j]` of rank i to `outputs[i]` of rank j. Each pair agrees on its size."""
        for peer in self.peers:
            self.to[peer].send(inputs[peer], call=call)
        # Before anything comes, for an output that is its own input.
        outputs[self.rank].detach().copy_(inputs[self.rank].detach())
        arrivals = [self.to[peer].expect(outputs[peer], call=call) for peer in self.peers]
        return SharedMemoryWork(outputs, arrivals, finish)

    def barrier(self, call: int) -> SharedMemoryWork:
        """Is done once all ranks have called it."""
        nothing = torch.empty(0)
        for peer in self.peers:
            self.to[peer].send_nothing(call)
        return SharedMemoryWork(
            [], [self.to[peer].expect(nothing, call=call) for peer in self.peers]
        )

    def compare(self, value: int, call: int) -> list[PendingReceive]:
        """Tells all ranks a number, in the order of the collectives; what they tell in the same way."""
        for peer in self.peers:
            self.to[peer].send(torch.tensor([value]), call=call)
        like = torch.empty(1, dtype=torch.int64)
        return [self.to[peer].expect(torch.empty_like(like), call=call) for peer in self.peers]

    def _reduced(
        self, outputs: Tensors, target: torch.Tensor, own: torch.Tensor, op: str, call: int
    ) -> SharedMemoryWork:
        """Combines this rank's part and those that the others send, by rank, in `target`."""
        arrivals = [self.to[peer].expect(own, IN_PLACE, STEPS, call) for peer in self.peers]
        finish = partial(_combine, target, op, own, self.rank, arrivals)
        return SharedMemoryWork(outputs, arrivals, finish)

    def _sent(
        self, outputs: Tensors, tensors: dict[int, torch.Tensor], call: int
    ) -> SharedMemoryWork:
        """Sends a tensor to each of these ranks, and takes nothing of them."""
        for peer, tensor in tensors.items():
            self._ahead[peer].note(self.to[peer].send(tensor, call=call), tensor)
        return SharedMemoryWork(outputs, make_room=partial(self._make_room, list(tensors)))

    def _make_room(self, peers: list[int]) -> None:
        for peer in peers:
            self._ahead[peer].make_room()

    # -- Messages --

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> SharedMemoryWork:
        """Sends `tensor` to one rank; the n-th message with a tag is for the n-th receive with it."""
        sent = self.to[peer].send(tensor, tag % _NUM_CHANNELS, lane_of(tag))
        ahead = self._ahead[peer]
        ahead.note(sent, tensor)
        return SentWork(sent, ahead.make_room)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> SharedMemoryWork:
        """Receives from one rank."""
        return SharedMemoryWork([tensor], [self.to[peer].expect(tensor, COPIED, lane_of(tag))])

    def receive_from_any(self, tensor: torch.Tensor, tag: int, timeout: float) -> ReceivedFromAny:
        """Receives from whichever rank's message is there first."""
        lane = lane_of(tag)

        def find() -> PendingReceive | None:
            for connection in self.to.values():
                if connection.has_spare(lane):
                    return connection.expect(tensor, lane=lane)
                reader.watch(connection)
            if not any(connection.is_open for connection in self.to.values()):
                raise WireError(f"{self.describe()}nobody can send what this rank waits for")
            return None

        return ReceivedFromAny([tensor], find, timeout)

    # -- Ranks that have gone --

    def watch(self) -> None:
        """Whoever waits reads all connections."""
        for connection in self.to.values():
            reader.watch(connection)

    def describe(self) -> str:
        """Who has gone, as the beginning of a sentence; "" if nobody has."""
        gone = [peer for peer in self.peers if not self.to[peer].is_open]
        return f"ranks {gone} of the group have ended, or have left the group; " if gone else ""


class _Ahead:
    """What was sent to one peer that need not send anything back, and perhaps not taken yet."""

    def __init__(self):
        self._sents: deque[tuple[Sent, int]] = deque()

    def note(self, sent: Sent, tensor: torch.Tensor) -> None:
        self._sents.append((sent, tensor.nbytes))  # in one go: several threads may send
        if len(self._sents) > MOST_MESSAGES_AHEAD:  # whoever sends need not wait for what was sent
            with reader.lock:
                self._drop_taken(2)

    def _drop_taken(self, most: int | None = None) -> None:
        """The oldest ones that are; `most` of them, so that no message waits for a long list."""
        for _ in range(len(self._sents) if most is None else most):
            if not (self._sents and self._sents[0][0].is_taken()):
                break
            self._sents.popleft()

    def make_room(self) -> None:
        """Waits while more than that is not taken. Raises WireError, as `Sent.wait`."""
        while True:
            with reader.lock:
                self._drop_taken()
                oldest = self._sents[0][0] if len(self._sents) > 1 and self._is_full() else None
            if oldest is None:
                return
            oldest.wait()

    def _is_full(self) -> bool:
        num_bytes = sum(num for _, num in tuple(self._sents))
        return num_bytes > MOST_BYTES_AHEAD or len(self._sents) > MOST_MESSAGES_AHEAD


def lane_of(tag: int) -> int:
    """The lane of messages with this tag."""
    return STEPS + 1 + tag % (1 << 30)


def _combine(
    target: torch.Tensor, op: str, own: torch.Tensor, rank: int, arrivals: list[PendingReceive]
) -> None:
    """Combines the parts in the order of the ranks into `target`, which may be this rank's own."""
    parts = [arrival.tensor for arrival in arrivals]
    parts.insert(rank, own)
    first, *middle, last = parts
    combine = _COMBINE[op]
    for part in middle:
        first = combine(first.to(target.device), part.to(target.device))
    if target.is_cpu:
        combine(first, last, out=target)
    else:
        target.copy_(combine(first.to(target.device), last.to(target.device)))
    if op == "AVG":
        target.div_(len(parts))


# -- The connections --

Connections = dict[int, Connection]


def get_timeout(group: dist.ProcessGroup) -> float:
    """Seconds after which a collective or a message of `group` gives up, as the group was told."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def connect(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Connections | None:
    """Connects this rank with all others of a group that has a store and nothing else yet.

    Collective. Returns the connections by rank; or None on every rank if the group spans hosts or
    containers, or if a rank has no memory to share, as on another system than Linux. Raises
    ConnectionError, naming the rank, if one does not come in time.
    """

    def gather(mine: list) -> list[list]:
        store.set(f"address of {rank}", json.dumps(mine))
        return [json.loads(_read(store, other, timeout)) for other in range(size)]

    # A rank without memory says so to the others: all of them must come to the same answer.
    arena, seconds = _new_arena() if is_supported() else None, timeout.total_seconds()
    descriptor = None if arena is None else arena.descriptor
    lower, higher = list(range(rank)), list(range(rank + 1, size))
    found = meet(rank, gather, lower, higher, descriptor, seconds)
    if found is None:
        return None
    met = found[0] | found[1]
    return {peer: Connection(met[peer], arena, peer, seconds) for peer in met}


def _read(store: dist.Store, rank: int, timeout: timedelta) -> bytes:
    key = f"address of {rank}"
    try:
        store.wait([key], timeout)
    except RuntimeError as error:  # DistStoreError is one
        raise ConnectionError(
            f"rank {rank} of the group has not come within {timeout.total_seconds():g} s: {error}"
        ) from error
    return store.get(key)


def _new_arena() -> Arena | None:
    """None where a container's rules, or its limits on files, leave no memory to share."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return None
    try:
        return Arena()
    except OSError:
        return None
