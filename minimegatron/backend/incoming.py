"""What one peer has announced: headers read from a socket, sorted by lane, not yet taken.

Each header says to which step its message belongs. Megatron has no counterpart.
"""

import struct
from collections import defaultdict, deque
from typing import NamedTuple

from minimegatron.backend.slots import TheirSlots

# -- Epochs: the number that says to which step a message belongs --
# Every rank of a group counts for itself, and all must count alike: who is in another epoch than the
# sender does not take its message. A program that begins no step stays in epoch 0.
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


# -- Headers --


FIRST_LANE_OF_NO_STEP = 1 << 31
"""From this lane on, messages belong to no step. Below, they belong to the epoch they were sent in."""

HEADER = struct.Struct("=BIQQQQQQQd")
MESSAGE, ABANDONED, BEGUN = 1, 2, 3
_HEADER_BYTES = HEADER.size
_new_tuple = tuple.__new__  # half the time of `Header._make`, which checks the length too


class WireError(ConnectionError, RuntimeError):
    """A message that does not come, or is not the one expected: the text names the rank.

    It is a RuntimeError too, because that is what gloo raises.
    """


class Header(NamedTuple):
    """A message that was announced and not yet taken; or news of the peer's steps."""

    kind: int
    lane: int
    epoch: int
    call: int
    """What the sender has called, a number that the receiver must expect."""
    num_bytes: int
    offset: int
    slot_bytes: int
    mark_place: int
    """Where the slot's mark is in the sender's file."""
    retired: int
    """Offset of a slot that exists no longer; 0: of none."""
    sent_at: float
    """On the host's clock, `time.monotonic`."""


class Incoming:
    """What the peer has announced, and the pieces of its memory that are mapped here."""

    def __init__(self, descriptor: int, peer: int):
        self.peer = peer
        self.slots = TheirSlots(descriptor)
        self._unread = b""
        self.messages: defaultdict[int, deque[Header]] = defaultdict(deque)
        self.num_dropped = 0
        # The largest epoch of any message in the lanes of the step.
        self.newest_epoch = 0
        # The peer will send nothing more, in any lane.
        self.has_ended = False
        # The last epoch that the peer has abandoned, and why.
        self._abandoned: tuple[int, str] = (-1, "")
        # The last epoch that it has begun after one that it had abandoned.
        self._begun = -1

    def take(self, part: bytes) -> set[int]:
        """Notes what was received, headers and news; returns the lanes of new messages."""
        lanes: set[int] = set()
        if not part:
            self.has_ended = True
        unread = self._unread + part if self._unread else part
        while len(unread) >= _HEADER_BYTES:
            header = _new_tuple(Header, HEADER.unpack_from(unread))
            lane, num_bytes = header.lane, _HEADER_BYTES
            if header.kind == MESSAGE:
                if header.retired:
                    self.slots.forget(header.retired)
                self.messages[lane].append(header)
                lanes.add(lane)
                if lane < FIRST_LANE_OF_NO_STEP:
                    self.newest_epoch = header.epoch
            elif header.kind == ABANDONED:
                num_bytes += header.num_bytes
                if len(unread) < num_bytes:  # the reason has not come whole
                    break
                text = unread[_HEADER_BYTES:num_bytes].decode(errors="replace")
                self._abandoned = (header.epoch, text)
            elif header.kind == BEGUN:
                self._begun = header.epoch
            unread = unread[num_bytes:]
        self._unread = unread
        return lanes

    def check(self, epoch: int) -> None:
        """Raises WireError if the peer will send nothing more of this epoch."""
        abandoned, reason = self._abandoned
        if abandoned >= epoch:
            raise WireError(f"rank {self.peer} of the group has given up this step: {reason}")
        if self._begun > epoch:
            raise WireError(
                f"rank {self.peer} of the group has gone on after a step that it had given up: {reason}"
            )
        if self.has_ended:
            raise WireError(f"rank {self.peer} of the group has ended, or has left the group")

    def drop_before(self, epoch: int, messages: "deque[Header]") -> None:
        """Gives back, unread, a lane's messages of earlier epochs. A peer's epochs come in order."""
        while messages and self._is_before(messages[0].epoch, epoch):
            self.num_dropped += 1
            old = messages.popleft()
            if old.slot_bytes:  # a barrier's has none
                self.slots.get(old.offset, old.slot_bytes, old.mark_place).free()

    @staticmethod
    def _is_before(theirs: int, mine: int) -> bool:
        return theirs < mine and not belong_together(theirs, mine)
