"""What one peer has announced: headers read from a socket, sorted by lane, not yet taken.

Megatron has no counterpart.
"""

import struct
from collections import defaultdict, deque
from typing import NamedTuple

from minimegatron.backend.epochs import belong_together
from minimegatron.backend.slots import TheirSlots

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
