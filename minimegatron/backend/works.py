"""The handles of what a group does: torch's `Work`, completed by whoever waits for it.

Megatron has no counterpart.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from minimegatron.backend.channels import PendingReceive, Sent
from minimegatron.backend.incoming import WireError
from minimegatron.backend.waiting import reader

# -- The thread that completes works whose futures somebody has asked for --
# A future is completed while nobody calls a method of it, so somebody else must wait. The thread
# exists while such a future is not done; it sleeps until one of their messages comes (`waiting`). While
# it runs a future's callbacks, another thread waits for the futures that are left. At the end of the
# process the threads are given a moment: one that Python's end meets inside torch would abort the
# process.


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


# -- The handles --


Tensors = Sequence[torch.Tensor]


class SharedMemoryWork(dist.Work):
    """A collective or a message over shared memory.

    What comes is taken while any thread of this rank waits for anything; with the last message
    `finish` is called, also where nobody has the handle any more.

    Args:
        outputs: what the caller finds its result in; what `result` and the future give.
        arrivals: the messages that the operation needs.
        finish: makes the result of them.
        make_room: waits while the receivers are too far behind what this rank has sent.
        may_be_repeated: a `wait` that failed may be called again, and waits for the same messages.
        concludes: whether the result is there with the last message.
    """

    # Words, and no exception: that would keep what the functions it has passed have at hand.
    _error: str | None = None
    _future: torch.futures.Future | None = None
    _outputs: Tensors = ()
    _arrivals: Sequence[PendingReceive] = ()
    _finish: Callable[[], None] | None = None
    _is_finished, _may_be_repeated = True, False

    def __init__(
        self,
        outputs: Tensors,
        arrivals: Sequence[PendingReceive] = (),
        finish: Callable[[], None] | None = None,
        make_room: Callable[[], None] | None = None,
        may_be_repeated: bool = False,
        concludes: bool = True,
    ):
        super().__init__()
        self._outputs, self._arrivals, self._finish = list(outputs), arrivals, finish
        self._make_room, self._may_be_repeated = make_room, may_be_repeated
        self._is_finished = not arrivals and finish is None
        # Whoever ends the work need not be in that mode.
        self._is_inference = torch.is_inference_mode_enabled()
        if finish is not None and arrivals and concludes:  # else what comes is the result
            with reader.lock:
                self._num_missing = sum(not arrival.is_done for arrival in arrivals)
                for arrival in arrivals:
                    arrival.then = self._one_came
                if not self._num_missing:
                    self._try_to_conclude()

    def _one_came(self) -> None:
        self._num_missing -= 1
        if not self._num_missing:
            self._try_to_conclude()

    def _try_to_conclude(self) -> None:
        """Makes the result, unless something is wrong: then `wait` says what."""
        try:
            if not any(arrival.is_wrong() for arrival in self._arrivals):
                self._conclude()
        except (OSError, RuntimeError) as error:
            self._error = str(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns True once the result is there. Raises WireError, naming the rank that is in the way.

        Without `timeout`, or with one of 0, it waits for the group's time-out, and then the group's
        messages are lost. If `timeout` ends first, it may be called again.
        """
        if not self._is_finished:
            if timeout:
                self._wait_at_most(timeout.total_seconds())
            self._complete()
        if self._make_room is not None:
            self._make_room()
        return True

    def _wait_at_most(self, seconds: float) -> None:
        if not reader.wait(self.is_ready, time.monotonic() + seconds):
            peers = sorted(arrival.peer for arrival in self._arrivals if not arrival.is_done)
            raise WireError(f"ranks {peers} of the group sent nothing within {seconds:g} s")

    def _complete(self, deadline: float | None = None) -> None:
        if self._error is not None:
            raise WireError(self._error)
        try:
            self._wait_for_all(deadline)
            if self._finish is None:
                self._arrivals, self._is_finished = (), True
            else:
                with reader.lock:  # another thread may be here too
                    if not self._is_finished:
                        self._conclude()
        except (WireError, RuntimeError) as error:
            if not self._may_be_repeated:
                with reader.lock:  # gloo's thread may find an error at the same time
                    self._error, self._arrivals, self._finish = str(error), (), None
            raise

    def _wait_for_all(self, deadline: float | None) -> None:
        for arrival in self._arrivals:
            arrival.wait(deadline)

    def _conclude(self) -> None:
        if self._finish is not None and self._is_inference:
            with torch.inference_mode():
                self._finish()
        elif self._finish is not None:
            self._finish()
        for arrival in self._arrivals:
            arrival.release()
        self._arrivals, self._finish, self._is_finished = (), None, True

    @property
    def timeout(self) -> float:
        """Seconds that a wait may take."""
        arrivals = self._arrivals  # another thread may end the work meanwhile
        return arrivals[0].timeout if arrivals else 0.0

    def is_ready(self) -> bool:
        """Whether `wait` would wait for nobody. Call it with `reader.lock` held."""
        arrivals = self._arrivals
        return all(arrival.is_done for arrival in arrivals) or any(map(is_lost, arrivals))

    def is_completed(self) -> bool:
        """Whether the result is there, or will never be. Waits for nobody."""
        if self._is_finished or self._error is not None:
            return True
        reader.read_what_came()
        with reader.lock:
            is_ready = self.is_ready()
        if is_ready:
            self._try_to_complete()
        return is_ready

    def _try_to_complete(self, deadline: float | None = None) -> None:
        """Completes the work, or notes why it never will be. Does not wait, if it is ready."""
        try:
            for arrival in filter(is_lost, self._arrivals):
                arrival.wait()
            self._complete(deadline)
        except Exception as error:
            if not self._may_be_repeated:
                self._error = str(error)

    def get_future(self) -> torch.futures.Future:
        """A future of the list of result tensors. Raises WireError where the operation has failed.

        While somebody has a future that is not done, one thread of the process waits for it.
        """
        if self._future is None:
            done: torch.futures.Future = torch.futures.Future()
            # An exception that is set on a future ends DDP's process; one that `then` raises does not.
            self._future = done.then(self._result_or_raise)
            if self.is_completed():
                done.set_result(self._outputs)
            else:
                complete_later(self, done)
        return self._future

    def complete_future(self, done: torch.futures.Future, deadline: float) -> None:
        """For the thread that waits for futures: the work is ready, or `deadline` is over."""
        self._try_to_complete(deadline)
        done.set_result(self._outputs)

    def _result_or_raise(self, done: torch.futures.Future) -> list[torch.Tensor]:
        if not self._is_finished:
            raise WireError(self._error or "what the future stands for has not come")
        return self.result()

    def giving(self, outputs: Tensors) -> "SharedMemoryWork":
        """The same work, whose result is in these tensors."""
        self._outputs = list(outputs)
        return self

    def result(self) -> list[torch.Tensor]:
        """The result's tensors; none of what was sent."""
        return list(self._outputs)

    def is_success(self) -> bool:
        """Whether the result is there."""
        return self._is_finished

    def exception(self) -> Exception | None:
        """Why it has failed."""
        return None if self._error is None else WireError(self._error)

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()


class SentWork(SharedMemoryWork):
    """A message that this rank has sent. Its tensor may be changed at once, and is not kept here."""

    def __init__(self, sent: Sent, make_room: Callable[[], None]):
        # Nothing else is to be set, and each call here delays the next message.
        dist.Work.__init__(self)
        self._sent, self._make_room = sent, make_room

    def is_taken(self) -> bool:
        """Whether the receiver has it."""
        return self._sent.is_taken()

    def wait_until_taken(self) -> None:
        """Returns once the receiver has it. Raises WireError if that rank has gone or gave up."""
        self._sent.wait()


def is_lost(arrival: PendingReceive) -> bool:
    """Whether the message will not come."""
    return not arrival.is_done and arrival.has_failed()


class ReceivedFromAny(SharedMemoryWork):
    """A message from whichever rank sends one first. `find` expects the first that is there.

    `_source_rank` says who it was, after `wait`.
    """

    def __init__(self, outputs: Tensors, find: Callable[[], PendingReceive | None], timeout: float):
        super().__init__(outputs)
        self._is_finished = False
        self._find, self._timeout, self._peer = find, timeout, -1

    @property
    def timeout(self) -> float:
        """Seconds that a wait may take."""
        return self._timeout

    def _wait_at_most(self, seconds: float) -> None:
        if not reader.wait(self.is_ready, time.monotonic() + seconds):
            raise WireError(f"no rank of the group sent anything within {seconds:g} s")

    def _complete(self, deadline: float | None = None) -> None:
        if not self._arrivals:
            now = time.monotonic()
            self._wait_at_most(self._timeout if deadline is None else max(0.0, deadline - now))
        super()._complete(deadline)

    def is_ready(self) -> bool:
        """See `SharedMemoryWork.is_ready`."""
        try:
            if not self._arrivals and (arrival := self._find()) is not None:
                self._arrivals, self._peer = (arrival,), arrival.peer
        except WireError as error:  # nobody is left who could send
            self._error = str(error)
        return bool(self._arrivals) or self._error is not None

    def _source_rank(self) -> int:
        return self._peer

    source_rank = _source_rank


class Works(SharedMemoryWork):
    """Several works as one; `finish` is called once, when all are done."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        outputs: Tensors,
        finish: Callable[[], None] | None = None,
    ):
        super().__init__(outputs)
        self._works, self._finish, self._is_finished = works, finish, not works

    def _wait_at_most(self, seconds: float) -> None:
        for work in self._works:
            work.wait(timedelta(seconds=seconds))

    def _complete(self, deadline: float | None = None) -> None:
        for work in self._works:
            work.wait()
        with reader.lock:
            if not self._is_finished:
                self._conclude()

    def is_completed(self) -> bool:
        """Whether all are."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future:
        """A future of all their tensors."""
        if self._future is None:
            everyone = torch.futures.collect_all([work.get_future() for work in self._works])
            self._future = everyone.then(self._after_all)
        return self._future

    def _after_all(self, everyone: torch.futures.Future) -> list[torch.Tensor]:
        for one in everyone.value():
            one.value()
        self._complete()
        return self._outputs
