"""Slots: the places in shared memory that messages lie in, as the sender and the receiver see them.

The memory is a file without a name, mapped where it is needed: see `Arena`. A byte beside each slot,
its mark, tells the sender what the receiver does with it:

    free -- the sender writes a message --> sent -- the receiver copies it out ------> free
                                            sent -- the receiver uses it --> lent ---> free

Megatron has no counterpart: NCCL does the same for GPUs of one host.
"""

import ctypes
import mmap
import os
import weakref
from collections import deque
from dataclasses import dataclass

import torch

# -- Memory that the processes of one host share, in pieces --
# It asks the operating system (Linux) through `ctypes`, because Python's own `mmap` keeps a file
# descriptor open for every piece. A sender owns one `Arena`: a file in memory. It cuts pieces from it,
# one per message that is under way, and the receiver, who was given the file's descriptor once, maps
# the same pieces. The file is gone when both processes are, however they end, since it has no name
# that could stay behind.


PAGE_BYTES = mmap.PAGESIZE

Piece = mmap.mmap
"""Bytes of the file that this process has mapped; unmapped when nobody uses them any more.

Not by a finalizer: where a piece is part of a cycle that the garbage collector takes, finalizers run
in any order, and one of them may free a slot, which writes into a piece. Python unmaps an `mmap` when
it frees the object itself, and that is after all of them.
"""

_MAP_FIXED, _MAP_POPULATE = 0x10, 0x8000
_MADV_REMOVE = 9
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = getattr(_libc, "mmap64", getattr(_libc, "mmap", None))
if _mmap is not None:
    _mmap.restype = ctypes.c_void_p
    _mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    )


def round_to_pages(num_bytes: int) -> int:
    """`num_bytes`, or the next larger whole number of pages; one page at least."""
    return max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES


def map_piece(descriptor: int, offset: int, num_bytes: int) -> Piece:
    """Maps bytes [offset, offset + num_bytes) of the file; `offset` is a whole number of pages.

    Raises OSError, for example where the process may map no more.
    """
    # Room first, which Python owns, and then the file in its place.
    room = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    access = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
    if _mmap(address, num_bytes, access, flags, descriptor, offset) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: mapping {num_bytes} bytes of shared memory")
    return room


class Arena:
    """One sender's file. `descriptor` is what a receiver needs to map its pieces."""

    def __init__(self):
        self.descriptor = os.memfd_create("minimegatron-messages", os.MFD_CLOEXEC)
        self._end = 0
        weakref.finalize(self, os.close, self.descriptor)

    def cut(self, num_bytes: int) -> tuple[int, Piece]:
        """A new piece: its offset in the file, and its memory, of whole pages, all zero."""
        offset, num_bytes = self._end, round_to_pages(num_bytes)
        os.ftruncate(self.descriptor, offset + num_bytes)
        self._end = offset + num_bytes
        return offset, map_piece(self.descriptor, offset, num_bytes)

    @staticmethod
    def give_back(piece: Piece) -> None:
        """Returns a piece's memory to the system. Nobody may read or write it from now on."""
        piece.madvise(_MADV_REMOVE)


LARGE, MOST_LARGE_LENT = 1 << 20, 16
"""One message of a channel may be lent at a time, and so many of this size in bytes, which take long to
copy. What else a receiver keeps is its own memory."""
_MAX_LOOKS = 2 * MOST_LARGE_LENT
_FREE, SENT, _LENT = 0, 1, 2


# -- The sender's side --


@dataclass(eq=False)
class Slot:
    """Room for one message, and the byte that says whether the receiver still needs it."""

    offset: int
    piece: Piece
    marks: Piece
    mark_at: int
    mark_place: int
    """Where the mark is in the file; `mark_at`: where it is in `marks`."""
    number: int = 0
    """How many messages this slot has carried: tells a later one from an earlier one."""
    shaped: torch.Tensor | None = None
    """The slot as the tensor it carried last: most messages have the shape of the one before."""

    def fill(self, tensor: torch.Tensor) -> None:
        """Copies a message into the slot."""
        self.view(tensor).copy_(tensor.detach() if tensor.requires_grad else tensor)
        self.marks[self.mark_at] = SENT
        self.number += 1

    def view(self, like: torch.Tensor) -> torch.Tensor:
        """The slot as a tensor of this shape and dtype."""
        shaped = self.shaped
        if shaped is None or shaped.shape != like.shape or shaped.dtype != like.dtype:
            shaped = self.shaped = _view(self.piece, like)
        return shaped


class Slots:
    """The slots of one channel: about as many as were ever in use at a time, none larger than needed.

    Messages are taken in about the order in which they were sent. So the slot whose message is the
    oldest is looked at first, and after `_MAX_LOOKS` others that are not free a new one is made.
    """

    def __init__(self, arena: Arena):
        self._arena = arena
        # In the order in which they were used, the oldest first.
        self.slots: deque[Slot] = deque()
        self._marks: tuple[int, Piece] | None = None
        self._num_marks = 0

    def take(self, num_bytes: int) -> tuple[Slot, int]:
        """A free slot that is large enough, and the offset of the slot that it replaces (0: none)."""
        old = None
        for _ in range(min(len(self.slots), _MAX_LOOKS)):
            slot = self.slots[0]
            self.slots.rotate(-1)
            if slot.marks[slot.mark_at] == _FREE:
                if len(slot.piece) >= num_bytes:
                    return slot, 0
                old = slot
        if old is None:
            return self._make(num_bytes), 0
        # The free ones are too small. One of them makes room, so that their number does not grow.
        retired, (old.offset, piece) = old.offset, self._arena.cut(num_bytes)
        self._arena.give_back(old.piece)
        old.piece, old.shaped = piece, None
        return old, retired

    def _make(self, num_bytes: int) -> Slot:
        if self._marks is None or self._num_marks == PAGE_BYTES:
            self._marks, self._num_marks = self._arena.cut(PAGE_BYTES), 0
        marks_offset, marks = self._marks
        offset, piece = self._arena.cut(num_bytes)
        at = self._num_marks
        self._num_marks += 1
        self.slots.append(Slot(offset, piece, marks, at, marks_offset + at))
        return self.slots[-1]


# -- The receiver's side --


class TheirSlot:
    """A slot of the peer's, mapped here. `lent` has those of its channel that are lent, by mark."""

    def __init__(self, piece: Piece, marks: Piece, mark_at: int, lent: dict[int, weakref.ref]):
        self.piece, self._marks, self._mark_at, self._lent = piece, marks, mark_at, lent
        self.shaped: torch.Tensor | None = None

    view = Slot.view

    def free(self) -> None:
        """The sender may use the slot again."""
        self._marks[self._mark_at] = _FREE

    def may_be_lent(self, num_bytes: int) -> bool:
        """Whether the channel has not lent enough already: a page of marks belongs to one channel."""
        return len(self._lent) < (MOST_LARGE_LENT if num_bytes >= LARGE else 1)

    def lend(self, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """The slot as a tensor that owns it: the slot is free once nobody has the tensor any more."""
        memory, lent, at = memoryview(self.piece)[:num_bytes], self._lent, self._mark_at
        owner = os.getpid()

        def give_back(_: weakref.ref) -> None:
            if os.getpid() == owner:  # a process that was forked meanwhile has a tensor too
                lent.pop(at, None)
                self.free()

        self._marks[at] = _LENT
        lent[at] = weakref.ref(memory, give_back)  # the tensor's storage keeps `memory` alive
        return torch.frombuffer(memory, dtype=dtype)


class TheirSlots:
    """The slots of all channels of one peer, mapped here when they are first used."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._slots: dict[int, TheirSlot] = {}
        # By page: the marks, and what is lent of that channel.
        self._pages: dict[int, tuple[Piece, dict[int, weakref.ref]]] = {}
        weakref.finalize(self, os.close, descriptor)

    def get(self, offset: int, num_bytes: int, mark_place: int) -> TheirSlot:
        """The slot at `offset` of the peer's file."""
        slot = self._slots.get(offset)
        if slot is None:
            at = mark_place % PAGE_BYTES
            page = mark_place - at
            if page not in self._pages:
                self._pages[page] = map_piece(self._descriptor, page, PAGE_BYTES), {}
            marks, lent = self._pages[page]
            piece = map_piece(self._descriptor, offset, num_bytes)
            slot = self._slots[offset] = TheirSlot(piece, marks, at, lent)
        return slot

    def forget(self, offset: int) -> None:
        """The peer uses this slot no longer."""
        self._slots.pop(offset, None)


# -- Both sides --


def _view(piece: Piece, like: torch.Tensor) -> torch.Tensor:
    num_bytes = like.nbytes
    # The view is used for later messages too, so it must not be one of `torch.inference_mode`.
    with torch.inference_mode(False):
        if num_bytes == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        flat = torch.frombuffer(piece, dtype=torch.uint8, count=num_bytes)
        return flat.view(like.dtype).view(like.shape)
