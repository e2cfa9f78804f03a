"""How the threads of a process wait for messages: one of them reads for all.

1. Whoever waits and finds nobody reading becomes the reader. It sleeps in one `poll` on the sockets of
   all connections that expect something, and takes what comes on any of them. So a rank that waits for
   one message still empties the slots of all others, and no rank waits for a rank that waits for it.
2. Whoever else waits sleeps until the reader has read. When the reader has what it wanted, one of the
   others reads on.
3. Where one connection alone expects something, and no two threads have waited at once so far, the
   reader first sleeps in a read of that socket, for `BRIEFLY`: a `poll` and a read take longer.

Nobody reads while nobody waits: no thread polls. Megatron has no counterpart.
"""

import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

BRIEFLY = 0.02
"""Seconds. So long may a process's second thread wait before the first one hears of it, once."""


class Readable(Protocol):
    """A connection, as far as this module uses it."""

    number: int
    """Of its socket, as a file."""
    reference: weakref.ref
    """To itself."""

    is_open: bool
    """Whether something more may come."""

    def read(self) -> bool:
        """Takes what has come; returns whether something has."""

    def receive(self) -> bytes | None:
        """Reads from the socket; waits for `BRIEFLY`, and returns None if nothing comes."""

    def take(self, part: bytes) -> None:
        """Takes what was received."""


class Reader:
    """What the threads of one process share. `lock` guards what all connections have received."""

    def __init__(self):
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        # The connections that expect a message, by the number of their sockets.
        self.expecting: dict[int, weakref.ref[Readable]] = {}
        # Those that the reader looks at; None while no thread reads.
        self._watched: list[Readable] | None = None
        self._num_asleep = 0
        # The connection that the reader sleeps in a read of, if it is not in `poll`.
        self.reading: Readable | None = None
        self._is_shared = False  # two threads have waited at one time
        self._was_silent = False  # a connection, for as long as a read waits
        # A write to it ends the `poll`.
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if _HAS_EVENTS else -1

    def watch(self, connection: Readable) -> None:
        """From now on, whoever waits reads this connection too."""
        self.expecting[connection.number] = connection.reference

    def forget(self, connection: Readable) -> None:
        """The connection expects nothing more."""
        if self.expecting.get(connection.number) is connection.reference:
            del self.expecting[connection.number]

    def wait(
        self, is_done: Callable[[], bool], deadline: float, connection: Readable | None = None
    ) -> bool:
        """Returns True once `is_done()`, or False when `time.monotonic()` reaches `deadline`.

        `is_done` is called while this thread holds `lock`; it may raise. `connection` is read too,
        whether or not it expects something.
        """
        with self.lock:
            while not is_done():
                seconds = deadline - time.monotonic()
                if seconds <= 0:
                    return False
                if self._watched is None:
                    self._read(connection, seconds)
                else:
                    self._sleep(connection, seconds)
        return True

    def read_what_came(self, connection: Readable | None = None) -> None:
        """Takes what has come on all connections that expect something; waits for nobody."""
        with self.lock:
            for one in self._open(connection):
                one.read()
            self.ring()

    def ring(self) -> None:
        """Lets all threads that wait look again at what they wait for. Call it with `lock` held."""
        if self._watched is not None:
            self._wake_reader()
        if self._num_asleep:
            self._changed.notify_all()

    def _open(self, connection: Readable | None) -> list[Readable]:
        """The connections to read: `connection`, and those that expect something."""
        found = [] if connection is None else [connection]
        for number, reference in list(self.expecting.items()):
            if (one := reference()) is None:  # nobody has it any more
                del self.expecting[number]
            elif one is not connection:
                found.append(one)
        return [one for one in found if one.is_open]

    def _wake_reader(self) -> None:
        self._is_shared = True
        os.eventfd_write(self.bell, 1)

    def _read(self, connection: Readable | None, seconds: float) -> None:
        watched, part, ready = self._open(connection), None, {}
        is_alone = watched == [connection] and not self._is_shared
        if is_alone and not self._was_silent and seconds > BRIEFLY:
            self.reading = connection
        else:
            poller = select.poll()
            for number in (self.bell, *(one.number for one in watched)):
                poller.register(number, select.POLLIN)
        self._watched = watched
        self.lock.release()
        try:
            if self.reading is not None:
                part = connection.receive()
            else:
                ready = dict(poller.poll(1000 * min(seconds, _MAX_SECONDS)))
        finally:
            self.lock.acquire()
            self._was_silent = self.reading is not None and part is None
            self._watched = self.reading = None
            if self._num_asleep:
                self._changed.notify_all()
        if part is not None:
            connection.take(part)
        if self.bell in ready:
            os.eventfd_read(self.bell)
        for one in watched:
            if one.number in ready:
                one.read()

    def _sleep(self, connection: Readable | None, seconds: float) -> None:
        self._is_shared = True
        if connection is not None:
            self.watch(connection)
        if any(one not in self._watched for one in self._open(connection)):
            self._wake_reader()
        self._num_asleep += 1
        try:
            self._changed.wait(seconds)
        finally:
            self._num_asleep -= 1


_MAX_SECONDS = 1e6
"""What `poll` can count."""
_HAS_EVENTS = hasattr(os, "eventfd")
reader = Reader()
"""The process's own."""


def _after_fork() -> None:
    # The threads that waited are not in the child, and the bell's file is the parent's too.
    reader.__init__()


if _HAS_EVENTS:
    os.register_at_fork(after_in_child=_after_fork)
