"""Takes what ranks print, however much, and keeps a page of it.

Torch-free. Megatron has no counterpart.
"""

import os
import select
import threading
from pathlib import Path

HEAD_BYTES, TAIL_BYTES = 2000, 1000
"""Kept of what one rank prints; the rest is read, so that the rank goes on, and dropped."""


class Pipes:
    """One named pipe per rank, read by a thread for the length of a `with` block."""

    def __init__(self, folder: Path, num_ranks: int):
        self.folder, self._num_ranks = folder, num_ranks
        self._kept: dict[int, KeptText] = {}

    def __enter__(self) -> "Pipes":
        self.folder.mkdir(parents=True)
        self._files = {}
        for rank in range(self._num_ranks):
            os.mkfifo(self.folder / str(rank))
            # Open for both, so that it has no end while no rank has it open.
            self._files[os.open(self.folder / str(rank), os.O_RDWR | os.O_NONBLOCK)] = rank
            self._kept[rank] = KeptText()
        self._stop, self._stopping = os.pipe()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._stopping)
        self._thread.join()
        for file in [*self._files, self._stop]:
            os.close(file)

    def texts(self) -> dict[int, str]:
        """What each rank that printed has printed, shortened."""
        return {rank: kept.text() for rank, kept in self._kept.items() if kept.size}

    def _read(self) -> None:
        is_ending = False
        while True:
            wait = 0 if is_ending else None
            ready, _, _ = select.select([self._stop, *self._files], [], [], wait)
            is_ending = is_ending or self._stop in ready
            heard = [file for file in ready if file != self._stop]
            for file in heard:
                self._kept[self._files[file]].add(os.read(file, 1 << 16))
            if is_ending and not heard:
                return


class KeptText:
    """The beginning and the end of what was printed."""

    def __init__(self):
        self.size, self.head, self.tail = 0, b"", b""

    def add(self, data: bytes) -> None:
        """Takes more."""
        self.size += len(data)
        room = HEAD_BYTES - len(self.head)
        self.head += data[:room]
        self.tail = (self.tail + data[room:])[-TAIL_BYTES:]

    def text(self) -> str:
        """What is kept, and how much is not."""
        between = self.size - len(self.head) - len(self.tail)
        cut = f"\n... {between} bytes left out ...\n".encode() if between else b""
        return (self.head + cut + self.tail).decode(errors="replace").rstrip()
