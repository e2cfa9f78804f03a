"""The thread that completes works whose futures somebody has asked for.

A future is completed while nobody calls a method of it, so somebody else must wait. The thread exists
while such a future is not done; it sleeps until one of their messages comes (`waiting`). While it runs
a future's callbacks, another thread waits for the futures that are left. At the end of the process the
threads are given a moment: one that Python's end meets inside torch would abort the process.

Megatron has no counterpart.
"""

import atexit
import os
import threading
import time
import weakref
from typing import NamedTuple, Protocol

import torch

from minimegatron.backend.waiting import reader

LAST_SECONDS = 5.0
"""How long the end of the process waits for a future's callbacks."""


class Completable(Protocol):
    """A work, as far as this module uses it."""

    @property
    def timeout(self) -> float:
        """Seconds that a wait may take."""

    def is_ready(self) -> bool:
        """Whether a wait would wait for nobody."""

    def complete_future(self, done: torch.futures.Future, deadline: float) -> None:
        """Completes the work, or says why it is not, and then the future."""


class _Promise(NamedTuple):
    work: Completable
    future: torch.futures.Future
    deadline: float

    def is_due(self) -> bool:
        return self.work.is_ready() or time.monotonic() >= self.deadline


class _Completer:
    """All promises of this process."""

    def __init__(self):
        self._promises: list[_Promise] = []
        # Whether a thread waits for the promises; whether there is one that it does not know.
        self._is_waiting = self._has_news = self._is_ending = False
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def add(self, promise: _Promise) -> None:
        """The thread will complete this one too."""
        with reader.lock:
            if self._is_ending:
                return
            self._promises.append(promise)
            self._has_news = True
            if self._is_waiting:
                reader.ring()
            else:
                self._start()

    def _start(self) -> None:
        self._is_waiting = True
        thread = threading.Thread(target=self._run, name="local futures", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        while (promise := self._next_due()) is not None:
            promise.work.complete_future(promise.future, promise.deadline)
            with reader.lock:
                if self._is_waiting:
                    return
                self._is_waiting = True

    def _next_due(self) -> _Promise | None:
        """Waits for the next work that is ready or late; None where none is left.

        Then this thread does not count as the one that waits: what the future's callbacks do may be to
        wait for another future.
        """
        while True:
            with reader.lock:
                self._has_news = False
                due = next((promise for promise in self._promises if promise.is_due()), None)
                if due is not None or not self._promises:
                    self._is_waiting = False
                    if due is not None:
                        self._promises.remove(due)
                        if self._promises:
                            self._start()
                    return due
                first = min(promise.deadline for promise in self._promises)
            reader.wait(self._has_work, first)

    def finish(self) -> None:
        """Returns when no thread is left, or after `LAST_SECONDS`. Drops what is not done yet."""
        deadline = time.monotonic() + LAST_SECONDS
        with reader.lock:
            self._promises.clear()
            self._has_news = self._is_ending = True
            threads = list(self._threads)
            reader.ring()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _has_work(self) -> bool:
        return self._has_news or any(promise.is_due() for promise in self._promises)


_completer = _Completer()
atexit.register(_completer.finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _completer.__init__())  # its thread is not there


def complete_later(work: Completable, future: torch.futures.Future) -> None:
    """Gives `future` the tensors of `work` once they are there, or when the work's time is over."""
    _completer.add(_Promise(work, future, time.monotonic() + work.timeout))
