"""Memory that the processes of one host share, in pieces: a file without a name, mapped where needed.

It asks the operating system (Linux) through `ctypes`, because Python's own `mmap` keeps a file
descriptor open for every piece. Megatron needs no such module: NCCL does the same for GPUs of one
host.

A sender owns one `Arena`: a file in memory. It cuts pieces from it, one per message that is under
way, and the receiver, who was given the file's descriptor once, maps the same pieces. The file is
gone when both processes are, however they end, since it has no name that could stay behind.
"""

import ctypes
import mmap
import os
import weakref

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
