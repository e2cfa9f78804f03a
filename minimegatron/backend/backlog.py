"""Writes to a socket that never block: what the socket does not take at once is written later.

Megatron has no counterpart.

A socket holds some 250 headers that nobody has read. If a rank sends more than that before its peer
reads, a blocking write would wait, and two ranks that do so to each other would wait for ever. Here
the rest is kept in a list, which a thread writes as the peer reads. The thread exists while there is
something to write, and at the end of the process it is given a moment to finish.
"""

import atexit
import contextlib
import select
import socket
import threading
import time
from collections import deque

LAST_SECONDS = 5.0
"""How long the end of the process waits for what is still to be written."""


class Writer:
    """What one socket has not taken yet. Writes come out in the order in which they were made.

    Who finds `later` empty may send by itself, with `flags`, and gives the rest to `write`. While
    something waits, everything must go through `write`. One thread sends and writes, the other is the
    backlog's, which takes a piece off `later` once the socket has all of it.
    """

    def __init__(self, connection: socket.socket, flags: int):
        self._socket, self._flags = connection, flags
        self.later: deque[bytes] = deque()
        self._lock, self._is_closing = threading.Lock(), False

    def write(self, data: bytes) -> None:
        """Writes `data` later. Raises OSError if the other end is closed."""
        with self._lock:
            is_idle = not self.later
            rest = self._try(data) if is_idle else data
            if rest:
                self.later.append(rest)
        if is_idle and rest:
            _backlog.watch(self)

    def _try(self, data: bytes) -> bytes:
        """Writes what the socket takes; returns what is left."""
        try:
            return data[self._socket.send(data, self._flags) :]
        except BlockingIOError:
            return data

    def close(self) -> None:
        """Closes the socket once everything is written."""
        with self._lock:
            self._is_closing = True
            if not self.later:
                self._socket.close()

    def fileno(self) -> int:
        """For `poll`; -1 once the socket is closed."""
        return self._socket.fileno()

    def write_later_part(self) -> bool:
        """Writes one waiting piece, as far as the socket takes it; True when none is left."""
        with self._lock:
            if not self.later:
                return True
            try:
                rest = self._try(self.later[0])
                if rest:
                    self.later[0] = rest
                else:
                    self.later.popleft()
            except OSError:  # nobody will read it any more
                self.later.clear()
            if self._is_closing and not self.later:
                self._socket.close()
            return not self.later


class _Backlog:
    """All writers of this process that have something left to write."""

    def __init__(self):
        self._changed = threading.Condition()
        self._writers: set[Writer] = set()
        self._is_running = False

    def watch(self, writer: Writer) -> None:
        """Begins to write what `writer` could not."""
        with self._changed:
            self._writers.add(writer)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="local backlog", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writers = {writer for writer in self._writers if writer.fileno() >= 0}
                if not self._writers:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                writers = list(self._writers)
            waiting = select.poll()
            for writer in writers:
                with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                    waiting.register(writer, select.POLLOUT)
            ready = {number for number, _ in waiting.poll(100)}
            for writer in writers:
                if writer.fileno() in ready:
                    self._write(writer)

    def _write(self, writer: Writer) -> None:
        # Under the lock of `watch`: a writer that has just got something new stays in the set.
        with self._changed:
            if writer.write_later_part():
                self._writers.discard(writer)

    def finish(self) -> None:
        """Returns when everything is written, or after `LAST_SECONDS`."""
        deadline = time.monotonic() + LAST_SECONDS
        with self._changed:
            while self._is_running and time.monotonic() < deadline:
                self._changed.wait(0.1)


_backlog = _Backlog()
atexit.register(_backlog.finish)
