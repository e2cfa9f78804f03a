"""Tensors between two processes of one host, through shared memory: no polling thread, no network.

Megatron needs no such module: NCCL does the same for GPUs of one host.

A gloo message between two processes of one host goes through the kernel's network code twice, and
wakes two threads in turn. Here a message is a *slot* of memory that both processes have mapped:

1. The sender copies the tensor into a free slot, and writes a header, where and how long, to a
   socket. That never blocks.
2. The receiver, asleep until that socket has something, wakes. It uses the slot itself as its tensor,
   if it uses no other slot of that channel, and copies it out otherwise. So the shared memory of a
   channel has one message in use, and those under way; what a stage keeps for its backward is its own.
   Of large messages, a few may be in use (`slots`).
3. The receiver marks the slot, as lent while it is in use, then as free. The sender sees that
   without a message.

One connection serves two ranks in both directions. What must not be taken for each other, such as
activations and gradients, has *lanes* of its own. In each lane the n-th message is taken for the n-th
one expected; the lanes know nothing of each other's order. Whoever waits for one message takes those
of all other lanes and connections too (`waiting`).

What a failed step leaves behind must not be taken for the next step's. So time is cut into *epochs*:
each step is one, and so is the time between two steps. Every header carries its epoch; a receiver
takes a message only for what it expected in the same epoch, and drops older ones. And a rank whose
step fails says so to everybody it is connected with (`abandon`), so that nobody waits for it until the
time-out. When it begins its next step it says that too, for those that had ended the failed one well,
and wait for this rank outside of any.

Some messages belong to no step: each rank will send them, be it one step later. Their lanes know no
epochs (`FIRST_LANE_OF_NO_STEP`): there, a message stays until it is taken, whatever fails in between.
"""

import contextlib
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial

import torch

from minimegatron.backend.backlog import Writer
from minimegatron.backend.calls import read_call
from minimegatron.backend.handshake import Met
from minimegatron.backend.incoming import (
    ABANDONED,
    BEGUN,
    FIRST_LANE_OF_NO_STEP,
    HEADER,
    MESSAGE,
    Header,
    Incoming,
    WireError,
    belong_together,
    describe,
    is_in_step,
    next_step,
)
from minimegatron.backend.slots import SENT, Arena, Slot, Slots, TheirSlot
from minimegatron.backend.waiting import BRIEFLY, reader

STEPS = 0
"""The lane of collectives."""
COPIED, LENT, IN_PLACE = "copied", "lent", "in place"
_FAILED_STEP = "this message belongs to a step that has failed"
_MAX_REASON = 400
_READ_BYTES = 4096
_MAX_LANES = 64
"""More lanes than these are forgotten while nothing is in them."""
_SHORTEST_SLEEP, _LONGEST_SLEEP = 20e-6, 2e-3


# -- One message on its way out --


class Sent:
    """The handle of a message that lies in a slot. `wait` returns once the receiver has taken it."""

    def __init__(self, connection: "Connection", slot: Slot):
        self._connection, self._slot, self._number = connection, slot, slot.number

    def is_taken(self) -> bool:
        slot = self._slot
        return slot.number != self._number or slot.marks[slot.mark_at] != SENT

    def wait(self) -> bool:
        """Raises WireError if the receiver has gone, gave up, or does not come in time."""
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
        self.peer, self.epoch, self._timeout = peer, 0, timeout
        self.ask_timeout: Callable[[], float] | None = None
        """Says how long a wait may take, for a group whose time-out may change."""
        self._socket = met.connection
        self._socket.settimeout(None)
        # In the kernel, not in Python: a socket with a Python time-out polls before each read.
        limit = struct.pack("ll", 0, int(BRIEFLY * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        # A number, because Python's own way to combine flags takes longer than the call.
        self._flags = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        self._writer = Writer(met.connection, self._flags)
        self._slots: defaultdict[object, Slots] = defaultdict(partial(Slots, arena))
        # Several threads may send; what comes in is guarded by `reader.lock`.
        self._sending = threading.RLock()
        self._incoming = Incoming(met.descriptor, peer)
        self._expected: defaultdict[int, deque[PendingReceive]] = defaultdict(deque)
        self._num_expected = 0
        self.failed_epoch = -1  # the last one in which a wait has failed
        self._has_abandoned = False  # the last step
        self.number, self.is_open = met.connection.fileno(), True
        self.reference = weakref.ref(self)

    @property
    def timeout(self) -> float:
        """Seconds that a wait may take."""
        return self._timeout if self.ask_timeout is None else self.ask_timeout()

    def set_timeout(self, seconds: float) -> None:
        """From now on, no wait takes longer."""
        self._timeout = seconds

    def close(self) -> None:
        """Ends the connection: the peer reads what it was sent, and then that nothing follows."""
        with reader.lock:
            self._incoming.has_ended, self.is_open = True, False
            reader.forget(self)
            reader.ring()
        self._writer.close()

    # -- Steps --

    def begin_step(self, epoch: int | None = None) -> None:
        """From here on messages belong to the next step, or to `epoch`. Both ends count alike."""
        self.epoch = next_step(self.epoch) if epoch is None else epoch
        if self._has_abandoned:
            self._has_abandoned = False
            with contextlib.suppress(OSError):
                self._tell(BEGUN)
        with reader.lock:  # what has not been read yet is dropped once its lane is read
            if any(self._incoming.messages.values()):
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
            self._tell(ABANDONED, text)
        self.epoch += 1
        self._has_abandoned = True

    def _give_up(self, from_epoch: int, to_epoch: int) -> None:
        """Expects nothing of these epochs any more, in the lanes that know them."""
        with reader.lock:
            for lane, expected in self._expected.items():
                if lane < FIRST_LANE_OF_NO_STEP:
                    for arrival in expected:
                        arrival.is_given_up = from_epoch <= arrival.epoch <= to_epoch
                    self._expected[lane] = deque(a for a in expected if not a.is_given_up)
            self._num_expected = sum(map(len, self._expected.values()))
            if not self._num_expected:
                reader.forget(self)

    def _drop_old(self) -> None:
        for lane, messages in self._incoming.messages.items():
            if lane < FIRST_LANE_OF_NO_STEP:
                expected = self._expected[lane]
                epoch = min(expected[0].epoch if expected else self.epoch, self.epoch)
                # Who evaluates less often may have sent what is for the time after this evaluation.
                self._incoming.drop_before(epoch - is_in_step(epoch), messages)

    # -- Out --

    def send(
        self, tensor: torch.Tensor, channel: object = None, lane: int = STEPS, call: int = 0
    ) -> Sent:
        """Copies `tensor` into a slot of `channel` and tells the peer; waits for nobody.

        A channel says whose slots are used, a lane what the message is taken for, `call` what the
        peer must expect. Raises WireError if the peer has gone.
        """
        num_bytes = tensor.nbytes
        with self._sending:
            slot, retired = self._slots[channel].take(num_bytes)
            slot.fill(tensor)
            place = (slot.offset, len(slot.piece), slot.mark_place, retired)
            now = time.monotonic()
            self._put(HEADER.pack(MESSAGE, lane, self.epoch, call, num_bytes, *place, now))
            return Sent(self, slot)

    def send_nothing(self, call: int) -> None:
        """Tells the peer that this rank has made a call which moves no data: it needs no slot."""
        place, now = (0, 0, 0, 0), time.monotonic()
        with self._sending:
            self._put(HEADER.pack(MESSAGE, STEPS, self.epoch, call, 0, *place, now))

    def _tell(self, kind: int, text: bytes = b"") -> None:
        """News of this rank's steps."""
        place, now = (0, 0, 0, 0), time.monotonic()
        with self._sending:
            self._put(HEADER.pack(kind, STEPS, self.epoch, 0, len(text), *place, now) + text)

    def _put(self, data: bytes) -> None:
        """Writes to the socket. Call it with `_sending` held."""
        try:
            # Unless something that was written earlier still waits for the socket.
            num_sent = 0 if self._writer.later else self._socket.send(data, self._flags)
        except BlockingIOError:
            num_sent = 0
        except OSError as error:
            raise WireError(f"rank {self.peer} of the group has gone: {error}") from error
        if num_sent < len(data):
            self._writer.write(data[num_sent:])

    def wait_until_taken(self, sent: Sent) -> None:
        """See `Sent.wait`. The receiver sends nothing when it takes a message, so this one looks."""
        deadline, pause = time.monotonic() + self.timeout, _SHORTEST_SLEEP
        while not sent.is_taken():
            reader.read_what_came(self)
            with reader.lock:
                self._incoming.check(self.epoch)
            if time.monotonic() > deadline:
                raise WireError(
                    f"rank {self.peer} of the group has not taken a message within "
                    f"{self.timeout:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP)

    # -- In --

    def expect(
        self, tensor: torch.Tensor, how: str = COPIED, lane: int = STEPS, call: int = 0
    ) -> "PendingReceive":
        """Notes that the lane's next message not yet spoken for becomes `tensor`."""
        with reader.lock:
            arrival = PendingReceive(self, tensor, how, lane, call)
            if lane < FIRST_LANE_OF_NO_STEP:
                arrival.is_given_up = self.epoch == self.failed_epoch
            if not arrival.is_given_up:
                self._expected[lane].append(arrival)
                if not self._num_expected:
                    reader.expecting[self.number] = self.reference
                self._num_expected += 1
                if self._incoming.messages.get(lane):
                    self._settle(lane)
        return arrival

    def read(self) -> bool:
        """Takes what has come, and waits for nothing. Call it with `reader.lock` held.

        Returns whether something has come: then whoever else waits must look again (`Reader.ring`).
        """
        has_come = False
        # What a thread has received without the lock must be taken before what follows it.
        while self.is_open and reader.reading is not self:
            part = self.receive(socket.MSG_DONTWAIT)
            if part is not None:
                has_come = True
                self.take(part)
            if part is None or len(part) < _READ_BYTES:
                break
        return has_come

    def receive(self, flags: int = 0) -> bytes | None:
        """Reads from the socket: None if nothing has come, b"" if nothing more will.

        Without `flags` it waits for `BRIEFLY`.
        """
        try:
            return self._socket.recv(_READ_BYTES, flags)
        except BlockingIOError:
            return None
        except OSError:  # the peer has gone and not read all; or this end is closed
            return b""

    def take(self, part: bytes) -> None:
        """Takes what `receive` has read. Call it with `reader.lock` held."""
        for lane in self._incoming.take(part):
            self._settle(lane)
        self.is_open = not self._incoming.has_ended

    def has_spare(self, lane: int) -> bool:
        """Whether a message of the lane has come that nobody expects yet."""
        return bool(self._incoming.messages.get(lane)) and not self._expected.get(lane)

    def _settle(self, lane: int) -> None:
        """Takes the lane's messages for what was expected, in order, as far as both go."""
        expected, messages = self._expected[lane], self._incoming.messages[lane]
        while expected and messages:
            epoch = expected[0].epoch
            if messages[0].epoch != epoch and lane < FIRST_LANE_OF_NO_STEP:
                self._incoming.drop_before(epoch, messages)
                if not messages or not belong_together(epoch, messages[0].epoch):
                    break
            self._num_expected -= 1
            if not self._num_expected and self.is_open:
                reader.expecting.pop(self.number, None)
            expected.popleft().take(messages.popleft(), self._incoming)
        if len(self._expected) > _MAX_LANES and not expected and not messages:
            del self._expected[lane], self._incoming.messages[lane]

    def complete(self, arrival: "PendingReceive", deadline: float | None = None) -> None:
        """Waits until a message was taken for `arrival`, the group's time-out long or to `deadline`."""
        try:
            with reader.lock:
                if self.read():
                    reader.ring()
            if arrival.is_done:  # it had come before
                return
            if deadline is None:
                deadline = time.monotonic() + self.timeout
            if not reader.wait(partial(self._has_come, arrival), deadline, self):
                raise WireError(self._nothing_came())
        except BaseException:
            # What comes later for those before it must not be taken for what is asked for next.
            self.fail(arrival)
            raise

    def fail(self, arrival: "PendingReceive") -> None:
        """A wait for `arrival` has failed: nothing more of its epoch is expected.

        A wait for a message of no step gives nothing up: it may be made again in a later step.
        """
        if arrival.lane < FIRST_LANE_OF_NO_STEP:
            self.failed_epoch = arrival.epoch
            self._give_up(0, arrival.epoch)

    def _has_come(self, arrival: "PendingReceive") -> bool:
        """Raises WireError if the message cannot come any more."""
        if arrival.is_done:
            return True
        if arrival.is_given_up:
            raise WireError(_FAILED_STEP)
        epoch, incoming = self.epoch, self._incoming
        if arrival.lane < FIRST_LANE_OF_NO_STEP:
            epoch = self._expected[arrival.lane][0].epoch
            messages = incoming.messages[arrival.lane]
            theirs = messages[0].epoch if messages else incoming.newest_epoch
            # What came in another lane may tell that nothing of this epoch will come any more.
            if messages or theirs > epoch:
                self._check_epoch(epoch, theirs)
        incoming.check(epoch)
        return False

    def _check_epoch(self, mine: int, theirs: int) -> None:
        if not belong_together(mine, theirs):
            self._incoming.check(mine)
            raise WireError(
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
      one: the slot itself, valid until `release`, or until nobody has this handle any more.
    """

    is_done, is_given_up = False, False
    sent_at: float | None = None
    other: Header | None = None
    """The message that came instead of the one expected."""
    _failure: Exception | None = None
    """Why the right one could not be taken."""
    then: Callable[[], None] | None = None
    """What follows once it is taken, in the thread that takes it, with `reader.lock` held."""
    _held: "_Held | None" = None

    def __init__(
        self, connection: Connection, tensor: torch.Tensor, how: str, lane: int, call: int
    ):
        self._connection, self.tensor, self._how = connection, tensor, how
        self.epoch, self.lane, self.call = connection.epoch, lane, call

    @property
    def peer(self) -> int:
        """The sender, within the group."""
        return self._connection.peer

    @property
    def timeout(self) -> float:
        """Seconds that `wait` may take."""
        return self._connection.timeout

    def wait(self, deadline: float | None = None) -> bool:
        """Raises WireError if the sender has gone, gave up, sent something else, or does not come.

        It waits for the connection's time-out, or until `deadline` on `time.monotonic`'s clock.
        """
        if not self.is_done:
            self._connection.complete(self, deadline)
        if self.epoch == self._connection.failed_epoch or self.other or self._failure:
            self._say_what_is_wrong()
        return True

    def give_up(self) -> None:
        """Nobody waits for it any more, nor for what follows it in its step."""
        self._connection.fail(self)

    def _say_what_is_wrong(self) -> None:
        is_of_step = is_in_step(self.epoch) and self.lane < FIRST_LANE_OF_NO_STEP
        if is_of_step and self.epoch == self._connection.failed_epoch:
            raise WireError(_FAILED_STEP)
        if self.is_wrong():
            if is_of_step:  # outside of steps, the messages after it are still in order
                self._connection.fail(self)
            raise WireError(self._say_other() if self.other else f"not taken: {self._failure}")

    def is_wrong(self) -> bool:
        """Whether something else has come, or it could not be taken."""
        return self.other is not None or self._failure is not None

    def has_failed(self) -> bool:
        """Whether `wait` would raise at once."""
        return self.is_wrong() or self.is_given_up or not self._connection.is_open

    def take(self, message: Header, incoming: Incoming) -> None:
        """Takes this message, in any thread; `wait` tells what is wrong with it."""
        tensor, num_bytes = self.tensor, message.num_bytes
        self.sent_at, self.is_done = message.sent_at, True
        try:
            wanted, slot = tensor.nbytes, None  # None: nothing was to come
            if message.slot_bytes:
                slot = incoming.slots.get(message.offset, message.slot_bytes, message.mark_place)
            if num_bytes != wanted or message.call != self.call:
                if slot is not None:
                    slot.free()
                self.other = message
            elif slot is None:
                pass
            elif self._how == IN_PLACE:
                self.tensor, self._held = slot.view(tensor), _Held(slot)
            elif self._how == LENT and slot.may_be_lent(wanted) and tensor.is_cpu and wanted > 0:
                tensor.data = slot.lend(wanted, tensor.dtype).view(tensor.shape)
            elif tensor.is_inference():  # the thread that takes it need not be in that mode
                with torch.inference_mode():
                    tensor.copy_(slot.view(tensor))
                slot.free()
            else:
                # Each call counts here: a rank that was asleep makes them some microseconds long.
                (tensor.detach() if tensor.requires_grad else tensor).copy_(slot.view(tensor))
                slot.free()
        except (OSError, RuntimeError) as error:
            self._failure = error
        if self.then is not None:
            self.then()

    def _say_other(self) -> str:
        tensor, other = self.tensor, self.other
        if self.call != other.call:
            return (
                f"rank {self.peer} of the group has called {read_call(other.call)}, and "
                f"this rank {read_call(self.call)}; all ranks of a group must make the same calls "
                "in one order"
            )
        wanted = tensor.numel() * tensor.element_size()
        return (
            f"rank {self.peer} of the group sends another size: a message of {other.num_bytes} bytes "
            f"came where {wanted} bytes were expected, for shape {tuple(tensor.shape)} of "
            f"{tensor.dtype}; both ranks must agree on it"
        )

    def release(self) -> None:
        """The sender may use the slot again."""
        self._held = None


class _Held:
    """A slot in use, until nobody has this any more."""

    def __init__(self, slot: TheirSlot):
        self._slot = slot

    def __del__(self):
        self._slot.free()
