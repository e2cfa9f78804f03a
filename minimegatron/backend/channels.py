"""Tensors between two processes of one host, through shared memory: no polling thread, no network.

Megatron needs no such module: NCCL does the same for GPUs of one host.

A gloo message between two processes of one host goes through the kernel's network code twice, and
wakes two threads in turn. Here a message is a *slot* of memory that both processes have mapped:

1. The sender copies the tensor into a free slot, and writes a header, where and how long, to a
   socket. That never blocks.
2. The receiver, asleep in a read of that socket, wakes. It uses the slot itself as its tensor, if it
   uses no other slot of that channel, and copies it out otherwise. So the shared memory of a channel
   has one message in use, and those under way; what a stage keeps for its backward is its own.
3. The receiver marks the slot, as lent while it is in use, then as free. The sender sees that
   without a message.

One connection serves two ranks in both directions. What must not be taken for each other, such as
activations and gradients, has *lanes* of its own. In each lane the n-th message is taken for the n-th
one expected; the lanes know nothing of each other's order.

What a failed step leaves behind must not be taken for the next step's. So time is cut into *epochs*:
each step is one, and so is the time between two steps. Every header carries its epoch; a receiver
takes a message only for what it expected in the same epoch, and drops older ones. And a rank whose
step fails says so to everybody it is connected with (`abandon`), so that nobody waits for it until the
time-out. When it begins its next step it says that too, for those that had ended the failed one well,
and wait for this rank outside of any.

Some messages belong to no step: each rank will send them, be it one step later. Their lanes know no
epochs (`NUM_STEP_LANES`): there, a message stays until it is taken, whatever fails in between.
"""

import contextlib
import resource
import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from minimegatron.backend.backlog import Writer
from minimegatron.backend.handshake import Met, is_supported, meet
from minimegatron.backend.shared_memory import Arena
from minimegatron.backend.slots import Slot, Slots, TheirSlot, TheirSlots

# kind, lane, epoch, bytes of the message; offset and bytes of its slot, place of the slot's mark,
# offset of a slot that exists no longer (0: none), when it was sent on the host's clock.
_HEADER = struct.Struct("=BIQQQQQQd")
_MESSAGE, _ABANDONED, _BEGUN, _COUNT = 1, 2, 3, 4
STEPS = 0
"""The lane of collectives; like all lanes below `NUM_STEP_LANES`, its messages belong to an epoch."""
NUM_STEP_LANES = 16
"""From this lane on, messages belong to no step."""
_READ_BYTES = 4096
_MAX_REASON = 400
COPIED, LENT, IN_PLACE = "copied", "lent", "in place"
_SHORTEST_SLEEP, _LONGEST_SLEEP = 20e-6, 2e-3


def get_timeout(group: dist.ProcessGroup) -> float:
    """Seconds after which a collective or a message of `group` gives up, as the group was told."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def connect(
    group: dist.ProcessGroup,
    callees: list[int],
    callers: list[int],
    kind: "Callable[[Met, Arena, int, float], Connection] | None" = None,
) -> tuple[dict[int, "Connection"], dict[int, "Connection"]] | None:
    """Connects ranks of `group` with each other, if all of them can share memory and sockets.

    Collective over `group`; ranks are those within it. This rank calls `callees`, and is called by
    `callers`; of two ranks that talk to each other, one calls. Returns both kinds of connections by
    rank, each made by `kind` (`Connection` if None); or None on every rank if the group spans hosts or
    containers, or if a rank has no memory to share, as on another system than Linux. Raises
    ConnectionError if a rank does not come within the group's time-out.
    """
    if not is_supported():
        return None
    timeout, arena = get_timeout(group), _new_arena()
    descriptor = None if arena is None else arena.descriptor
    found = meet(group, callees, callers, descriptor, timeout)
    if found is None:
        return None
    make = kind or Connection
    called, came = (
        {rank: make(met, arena, rank, timeout) for rank, met in those.items()} for those in found
    )
    return called, came


def _new_arena() -> Arena | None:
    """None where a container's rules, or its limits on files, leave no memory to share."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return None
    try:
        return Arena()
    except OSError:
        return None


# -- Epochs --
# The number that says to which step a message belongs. Every rank of a group counts for itself, and
# all must count alike: who is in another epoch than the sender does not take its message.
#
# A training step takes the ranks of all groups. A forward-only step takes those of one copy of the
# model; other copies may evaluate more often, or not at all. So in a group of several copies a
# forward-only step counts as a part of the last training step: the next one brings all ranks to the
# same number again, and the times around forward-only steps count as one.

PARTS = 1 << 32
"""Epochs from one training step to the next. An odd one is a step, an even one the time after it."""


def next_step(epoch: int) -> int:
    """The epoch of the next step, whatever came since the last one.

    >>> next_step(0) == next_step(6) == PARTS + 1
    True
    """
    return (epoch // PARTS + 1) * PARTS + 1


def next_part(epoch: int) -> int:
    """The epoch of a forward-only step in a group of several copies of the model."""
    return epoch + 1


def is_in_step(epoch: int) -> bool:
    """Whether the epoch is a step."""
    return epoch % 2 == 1


def belong_together(one: int, other: int) -> bool:
    """Whether a message sent in one epoch is for who waits in the other.

    >>> belong_together(PARTS + 2, PARTS + 4), belong_together(PARTS + 3, PARTS + 5)
    (True, False)
    """
    if one == other:
        return True
    between_steps = not is_in_step(one) and not is_in_step(other)
    return between_steps and one // PARTS == other // PARTS


def describe(epoch: int) -> str:
    """The epoch in words.

    >>> describe(2 * PARTS + 1), describe(2 * PARTS + 5), describe(0)
    ('step 2', 'forward-only step 2 after step 2', 'the time before its first step')
    """
    step, part = divmod(epoch, PARTS)
    if part == 1 and step:
        return f"step {step}"
    if is_in_step(epoch):
        # The step itself is part 1; without one, a forward-only step is.
        return f"forward-only step {(part - 1) // 2 if step else (part + 1) // 2} after step {step}"
    return f"the time after its step {step}" if step else "the time before its first step"


# -- One message on its way out --


class Sent:
    """The handle of a message that lies in a slot. `wait` returns once the receiver has taken it."""

    def __init__(self, connection: "Connection", slot: Slot):
        self._connection, self._slot, self._number = connection, slot, slot.number

    def is_taken(self) -> bool:
        return self._slot.number != self._number or self._slot.is_taken()

    def wait(self) -> bool:
        """Raises ConnectionError if the receiver has gone, gave up, or does not come in time."""
        if not self.is_taken():
            self._connection.wait_until_taken(self)
        return True


# -- Both directions --


class Connection:
    """One end of a connection between two ranks: what goes out is copied, what comes in is asked for.

    Several receives may be under way in several lanes, and waited for in any order. A wait that fails
    in a lane of the step fails the step: in all of them, nothing more of that epoch is expected.

    Args:
        met: the socket, and the descriptor of the peer's memory.
        arena: this rank's memory; one for all of its connections of a group.
        peer: the other rank, within the group; for messages.
        timeout: seconds that a wait may take.
    """

    def __init__(self, met: Met, arena: Arena, peer: int, timeout: float):
        self.peer, self.epoch = peer, 0
        self._socket, self._arena = met.connection, arena
        # A number, because Python's own way to combine flags takes longer than the call.
        self._flags = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        self._writer = Writer(met.connection, self._flags)
        self._slots: dict[object, Slots] = {}
        self._incoming = _Incoming(met.connection, met.descriptor)
        self._expected: defaultdict[int, deque[PendingReceive]] = defaultdict(deque)
        self._failed_epoch = -1  # the last one in which a wait has failed
        self._has_abandoned = False  # the last step
        self.timeout = 0.0
        self.set_timeout(timeout)

    def set_timeout(self, seconds: float) -> None:
        """From now on, no wait takes longer."""
        if seconds == self.timeout:
            return
        self.timeout = seconds
        # In the kernel, not in Python: a socket with a Python time-out polls before each read.
        self._socket.settimeout(None)
        whole = int(seconds)
        limit = struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def close(self) -> None:
        """Ends the connection: the peer reads what it was sent, and then that nothing follows."""
        self._socket.close()

    # -- Steps --

    def begin_step(self, epoch: int | None = None) -> None:
        """From here on messages belong to the next step, or to `epoch`. Both ends count alike."""
        self.epoch = next_step(self.epoch) if epoch is None else epoch
        if self._has_abandoned:
            self._has_abandoned = False
            with contextlib.suppress(OSError):
                self._write(_BEGUN)
        with contextlib.suppress(ConnectionError):  # whoever waits for a peer that has gone is told
            while self._incoming.read(wait=False):
                pass
        self._drop_old()

    def end_step(self) -> None:
        """From here on messages belong to no step. What the step expected may still be waited for."""
        self.epoch += 1

    def abandon(self, reason: str) -> None:
        """Ends a step that failed: expects nothing of it any more, and tells the peer. Never raises.

        Between two steps there is nothing to end.
        """
        if not is_in_step(self.epoch):
            return
        self._give_up(self.epoch, self.epoch)
        text = reason.encode(errors="replace")[:_MAX_REASON]
        with contextlib.suppress(OSError):
            self._write(_ABANDONED, len(text), text=text)
        self.epoch += 1
        self._has_abandoned = True

    def _give_up(self, from_epoch: int, to_epoch: int) -> None:
        """Expects nothing of these epochs any more, in the lanes that know them."""
        for lane, expected in self._expected.items():
            if lane < NUM_STEP_LANES:
                for arrival in expected:
                    arrival.is_given_up = from_epoch <= arrival.epoch <= to_epoch
                self._expected[lane] = deque(a for a in expected if not a.is_given_up)

    def _drop_old(self) -> None:
        for lane, messages in self._incoming.messages.items():
            if lane < NUM_STEP_LANES:
                expected = self._expected[lane]
                oldest = expected[0].epoch if expected else self.epoch
                self._incoming.drop_before(min(oldest, self.epoch), messages)
        self._incoming.drop_counts_before(self.epoch)

    def tell_count(self, count: int) -> None:
        """Tells the peer a number, for `read_count`; once in an epoch. Never raises."""
        # The ranks of another pipeline may be through with this group; whoever waits for them is told.
        with contextlib.suppress(OSError):
            self._write(_COUNT, count)

    def read_count(self) -> int:
        """What the peer has told in this epoch. Raises ConnectionError if it tells nothing in time."""
        counts, deadline = self._incoming.counts, time.monotonic() + self.timeout
        self._incoming.drop_counts_before(self.epoch)
        while not counts:
            self._read_more(self.epoch, deadline)
            self._incoming.drop_counts_before(self.epoch)
        epoch, count = counts[0]
        self._check_epoch(self.epoch, epoch)
        return count

    # -- Out --

    def send(self, tensor: torch.Tensor, channel: object = None, lane: int = STEPS) -> Sent:
        """Copies `tensor` into a slot of `channel` and tells the peer; waits for nobody.

        A channel says whose slots are used, a lane what the message is taken for. Raises
        ConnectionError if the peer has gone.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        slots = self._slots.get(channel)
        if slots is None:
            slots = self._slots[channel] = Slots(self._arena)
        slot, retired = slots.take(num_bytes)
        slot.fill(tensor)
        place = (slot.offset, len(slot.piece), slot.mark_place, retired)
        self._write(_MESSAGE, num_bytes, place, lane)
        return Sent(self, slot)

    def _write(
        self,
        kind: int,
        number: int = 0,
        place: tuple[int, int, int, int] = (0, 0, 0, 0),
        lane: int = STEPS,
        text: bytes = b"",
    ) -> None:
        data = _HEADER.pack(kind, lane, self.epoch, number, *place, time.monotonic()) + text
        try:
            # Unless something that was written earlier still waits for the socket.
            num_sent = 0 if self._writer.later else self._socket.send(data, self._flags)
        except BlockingIOError:
            num_sent = 0
        if num_sent < len(data):
            self._writer.write(data[num_sent:])

    def wait_until_taken(self, sent: Sent) -> None:
        """See `Sent.wait`. The receiver sends nothing when it takes a message, so this one looks."""
        deadline, pause = time.monotonic() + self.timeout, _SHORTEST_SLEEP
        while not sent.is_taken():
            self._incoming.read(wait=False)
            self._incoming.check(self.epoch)
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"rank {self.peer} of the group has not taken a message within "
                    f"{self.timeout:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP)

    # -- In --

    def expect(
        self, tensor: torch.Tensor, how: str = COPIED, lane: int = STEPS
    ) -> "PendingReceive":
        """Notes that the lane's next message not yet spoken for becomes `tensor`."""
        arrival = PendingReceive(self, tensor, how, lane)
        arrival.is_given_up = lane < NUM_STEP_LANES and self.epoch == self._failed_epoch
        if not arrival.is_given_up:
            self._expected[lane].append(arrival)
        return arrival

    def complete(self, arrival: "PendingReceive") -> None:
        """Takes messages of its lane, in the order in which they were asked for, up to `arrival`'s."""
        if arrival.is_given_up:
            raise ConnectionError("this message belongs to a step that has failed")
        if arrival.lane >= NUM_STEP_LANES:
            return self._take_of_no_step(arrival)
        try:
            self._take_up_to(arrival)
        except BaseException:
            # What comes later for those before it must not be taken for what is asked for next.
            self._failed_epoch = arrival.epoch
            self._give_up(0, arrival.epoch)
            raise

    def _take_up_to(self, arrival: "PendingReceive") -> None:
        incoming, deadline = self._incoming, time.monotonic() + self.timeout
        expected, messages = self._expected[arrival.lane], incoming.messages[arrival.lane]
        while not arrival.is_done:
            first = expected[0]
            incoming.drop_before(first.epoch, messages)
            while not messages:
                # What came in another lane may tell that nothing of this epoch will come any more.
                if incoming.newest_epoch > first.epoch:
                    self._check_epoch(first.epoch, incoming.newest_epoch)
                self._read_more(first.epoch, deadline)
                incoming.drop_before(first.epoch, messages)
            self._check_epoch(first.epoch, messages[0].epoch)
            first.take(messages.popleft(), incoming)
            expected.popleft()

    def _take_of_no_step(self, arrival: "PendingReceive") -> None:
        # A wait that fails gives nothing up: it may be made again in a later step.
        expected, messages = self._expected[arrival.lane], self._incoming.messages[arrival.lane]
        deadline = time.monotonic() + self.timeout
        while not arrival.is_done:
            while not messages:
                self._read_more(self.epoch, deadline)
            expected[0].take(messages[0], self._incoming)
            expected.popleft(), messages.popleft()

    def _read_more(self, epoch: int, deadline: float) -> None:
        self._incoming.check(epoch)
        try:
            # One read ends in time by itself; what came in other lanes must not begin it again.
            if time.monotonic() > deadline:
                raise BlockingIOError
            self._incoming.read(wait=True)
        except BlockingIOError as error:
            raise ConnectionError(self._nothing_came()) from error

    def _check_epoch(self, mine: int, theirs: int) -> None:
        if not belong_together(mine, theirs):
            self._incoming.check(mine)
            raise ConnectionError(
                f"rank {self.peer} of the group is in {describe(theirs)}, and this rank waits for a "
                f"message of {describe(mine)}; every rank must begin every step"
            )

    def _nothing_came(self) -> str:
        text = f"rank {self.peer} of the group sent nothing within {self.timeout:g} s"
        if self._incoming.num_dropped:
            text += (
                f" but {self._incoming.num_dropped} messages of earlier steps; has it left out a "
                "step that this rank has begun?"
            )
        elif unread := sum(map(len, self._incoming.messages.values())):
            text += f" in the lane that this rank waits for; messages in other lanes: {unread}"
        return text


class PendingReceive:
    """The handle of a message to come; `sent_at` is on `time.monotonic`'s clock, None before.

    `tensor` holds the message after `wait`. `how`:

    * `COPIED`: the message is copied into `tensor`'s memory.
    * `LENT`: it may be the sender's slot that becomes `tensor`'s memory, until nobody has it any more;
      such memory cannot be resized.
    * `IN_PLACE`: `tensor` says shape and dtype alone; after `wait`, `PendingReceive.tensor` is another
      one: the slot itself, valid until `release`.
    """

    def __init__(self, connection: Connection, tensor: torch.Tensor, how: str, lane: int):
        self._connection, self.tensor, self._how = connection, tensor, how
        self.epoch, self.lane = connection.epoch, lane
        self.is_done, self.is_given_up, self.sent_at = False, False, None
        self._slot: TheirSlot | None = None

    def wait(self) -> bool:
        """Raises ConnectionError if the sender has gone, gave up, or does not come in time."""
        if not self.is_done:
            self._connection.complete(self)
        return True

    def take(self, message: "_Header", incoming: "_Incoming") -> None:
        """Takes this message. Raises ConnectionError if it has another size."""
        slot, tensor = incoming.slot_of(message), self.tensor
        wanted = tensor.numel() * tensor.element_size()
        if message.num_bytes != wanted:
            slot.free()
            raise ConnectionError(
                f"a message of {message.num_bytes} bytes came where {wanted} were expected, for "
                f"shape {tuple(tensor.shape)} of {tensor.dtype}; both ranks must agree on it"
            )
        if self._how == IN_PLACE:
            self.tensor, self._slot = slot.view(tensor), slot
        elif self._how == LENT and slot.may_be_lent() and tensor.is_cpu and wanted > 0:
            tensor.data = slot.lend(wanted, tensor.dtype).view(tensor.shape)
        else:
            tensor.detach().copy_(slot.view(tensor))
            slot.free()
        self.sent_at, self.is_done = message.sent_at, True

    def release(self) -> None:
        """The sender may use the slot again."""
        if self._slot is not None:
            self._slot.free()
            self._slot = None


class _Header(NamedTuple):
    """A message that was announced and not yet taken; or news of the peer's steps."""

    kind: int
    lane: int
    epoch: int
    num_bytes: int
    offset: int
    slot_bytes: int
    mark_place: int
    retired: int
    sent_at: float


class _Incoming:
    """What the peer has announced, and the pieces of its memory that are mapped here."""

    def __init__(self, connection: socket.socket, descriptor: int):
        self._socket, self._slots = connection, TheirSlots(descriptor)
        self._unread = b""
        self.messages: defaultdict[int, deque[_Header]] = defaultdict(deque)
        self.num_dropped = 0
        # The largest epoch of any message in the lanes of the step.
        self.newest_epoch = 0
        # The last epoch that the peer has abandoned, and why.
        self._abandoned: tuple[int, str] = (-1, "")
        # The last epoch that it has begun after one that it had abandoned.
        self._begun = -1
        # Epochs, and the numbers that it has told in them.
        self.counts: deque[tuple[int, int]] = deque()

    def read(self, wait: bool) -> bool:
        """Reads headers; at least one byte, if `wait`. Returns whether it has read anything.

        Raises ConnectionError if the peer has gone, BlockingIOError if nothing came in time.
        """
        try:
            part = self._socket.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            if wait:
                raise
            return False
        except ConnectionResetError:  # it has gone, and has not read all that it was sent
            part = b""
        if not part:
            raise ConnectionError("the sender has closed the connection")
        self._unread += part
        while len(self._unread) >= _HEADER.size:
            header = _Header._make(_HEADER.unpack_from(self._unread))
            if header.kind == _MESSAGE:
                self._slots.forget(header.retired)
                self.messages[header.lane].append(header)
                if header.lane < NUM_STEP_LANES:
                    self.newest_epoch = header.epoch
            elif header.kind == _BEGUN:
                self._begun = header.epoch
            elif header.kind == _COUNT:
                self.counts.append((header.epoch, header.num_bytes))
            elif len(self._unread) < _HEADER.size + header.num_bytes:
                break  # the reason has not come whole
            else:
                text = self._unread[_HEADER.size :][: header.num_bytes]
                self._abandoned = (header.epoch, text.decode(errors="replace"))
                self._unread = self._unread[header.num_bytes :]
            self._unread = self._unread[_HEADER.size :]
        return True

    def check(self, epoch: int) -> None:
        """Raises ConnectionError if the peer will send nothing more of this epoch."""
        abandoned, reason = self._abandoned
        if abandoned >= epoch:
            raise ConnectionError(f"it has given up this step: {reason}")
        if self._begun > epoch:
            raise ConnectionError(f"it has gone on after a step that it had given up: {reason}")

    def drop_before(self, epoch: int, messages: "deque[_Header]") -> None:
        """Gives back, unread, a lane's messages of earlier epochs. A peer's epochs come in order."""
        while messages and self._is_before(messages[0].epoch, epoch):
            self.num_dropped += 1
            self.slot_of(messages.popleft()).free()

    @staticmethod
    def _is_before(theirs: int, mine: int) -> bool:
        return theirs < mine and not belong_together(theirs, mine)

    def drop_counts_before(self, epoch: int) -> None:
        """Forgets the numbers of earlier epochs, in which nobody has asked for them."""
        while self.counts and self.counts[0][0] < epoch:
            self.counts.popleft()

    def slot_of(self, header: _Header) -> TheirSlot:
        """The slot that the message lies in."""
        return self._slots.get(header.offset, header.slot_bytes, header.mark_place)
