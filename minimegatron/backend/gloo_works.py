"""The handles of what gloo carries inside a group.

Megatron has no counterpart.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from minimegatron.backend.channels import PendingReceive
from minimegatron.backend.incoming import WireError
from minimegatron.backend.waiting import reader
from minimegatron.backend.works import SharedMemoryWork, Tensors, is_lost

SECONDS_AFTER_A_LOSS = 5.0
"""A rank that leaves may have done its part of what gloo still does: so long the others wait for it."""
_GLOO = "gloo, inside the group, "


class Losses(Protocol):
    """What a group's connections know of ranks that have gone."""

    def watch(self) -> None:
        """Whoever waits reads all connections."""

    def describe(self) -> str:
        """Who has gone, as the beginning of a sentence; "" if nobody has."""


def wait_unless_lost(is_done: Callable[[], bool], losses: Losses | None, deadline: float) -> bool:
    """As `reader.wait`; but once a rank has gone, no longer than `SECONDS_AFTER_A_LOSS`."""
    if losses is not None:
        losses.watch()
        reader.wait(lambda: is_done() or bool(losses.describe()), deadline)
        if losses.describe():
            deadline = min(deadline, time.monotonic() + SECONDS_AFTER_A_LOSS)
    return reader.wait(is_done, deadline)


def hear(heard: Sequence[PendingReceive], losses: Losses | None, deadline: float) -> None:
    """Waits until all ranks have said what they call. Raises WireError, naming who is in the way.

    Where a rank has gone, others may have given up what this rank still calls, and say nothing.
    """

    def is_ready() -> bool:
        return all(arrival.is_done for arrival in heard) or any(map(_is_in_the_way, heard))

    has_come = is_ready() or wait_unless_lost(is_ready, losses, deadline)
    if not has_come and losses is not None and (who := losses.describe()):
        late = next(arrival for arrival in heard if not arrival.is_done)
        late.give_up()
        raise WireError(f"{who}rank {late.peer} has not made this call since")
    for arrival in sorted(heard, key=_is_in_the_way, reverse=True):
        arrival.wait(deadline)


def _is_in_the_way(arrival: PendingReceive) -> bool:
    return arrival.is_wrong() or is_lost(arrival)


class GlooWork(SharedMemoryWork):
    """A collective that gloo carries. It ends when gloo has, and all ranks have said what they called.

    Args:
        outputs: as for `SharedMemoryWork`.
        arrivals: what the others have called, where shared memory tells it.
        work: gloo's own handle.
        finish: copies the result to where the caller wants it, if it is not there.
        compare: raises WireError where the others are at another collective of gloo's.
        seconds: how long gloo may take.
        losses: None where the ranks share no memory.
    """

    last_call = 0.0
    """When gloo's thread last called Python, on `time.monotonic`'s clock."""

    def __init__(
        self,
        outputs: Tensors,
        arrivals: Sequence[PendingReceive],
        work: dist.Work,
        finish: Callable[[], None] | None,
        compare: Callable[[], None],
        seconds: Callable[[], float],
        losses: Losses | None,
    ):
        super().__init__(outputs, arrivals, finish, concludes=False)
        self._work, self._compare, self._seconds, self._losses = work, compare, seconds, losses
        self._is_finished = self.gloo_is_done = False
        with reader.lock:
            self._num_missing = 1 + sum(not arrival.is_done for arrival in arrivals)
            for arrival in arrivals:
                arrival.then = self._one_came
        work.get_future().add_done_callback(self._gloo_came)

    def _gloo_came(self, future: torch.futures.Future) -> None:
        """In gloo's thread."""
        with reader.lock:
            try:
                future.value()
            except Exception as error:
                if self._error is None:  # whoever waited knows more: which rank has not come
                    self._error = f"{self._who() or self._who_is_late()}{_GLOO}has failed: {error}"
            self.gloo_is_done = True
            GlooWork.last_call = time.monotonic()
            self._one_came()
            reader.ring()

    def _try_to_conclude(self) -> None:
        if self._error is None and not any(arrival.is_wrong() for arrival in self._arrivals):
            try:
                self._compare()
            except WireError as error:
                self._error = str(error)
            else:
                super()._try_to_conclude()

    def _wait_for_all(self, deadline: float | None) -> None:
        # First what the others say: gloo waits for ranks that will never come, and names none.
        last = time.monotonic() + self._seconds() if deadline is None else deadline
        hear(self._arrivals, self._losses, last)
        self._compare()
        if not self.gloo_is_done:
            self._wait_for_gloo(last)
        if self._error is not None:
            raise WireError(self._error)

    def _wait_for_gloo(self, deadline: float) -> None:
        """Gloo waits for its time-out where a rank has gone that it does not talk to; this does not."""
        if not wait_unless_lost(lambda: self.gloo_is_done, self._losses, deadline):
            who = self._who() or f"ranks have not come within {self._seconds():g} s; "
            raise WireError(f"{who}{_GLOO}still waits")

    def _who(self) -> str:
        return self._losses.describe() if self._losses is not None else ""

    def _who_is_late(self) -> str:
        late = [f"rank {arrival.peer}" for arrival in self._arrivals if not arrival.is_done]
        return f"{', '.join(late)} of the group sent nothing; " if late else ""

    def _wait_at_most(self, seconds: float) -> None:
        if not reader.wait(self.is_ready, time.monotonic() + seconds):
            raise WireError(f"{_GLOO}has not ended within {seconds:g} s")

    @property
    def timeout(self) -> float:
        """Seconds that a wait may take."""
        return self._seconds()

    def is_ready(self) -> bool:
        """See `SharedMemoryWork.is_ready`."""
        if self._error is not None or any(map(_is_in_the_way, self._arrivals)):
            return True
        return self.gloo_is_done and all(arrival.is_done for arrival in self._arrivals)


class GlooMessage(SharedMemoryWork):
    """A message that gloo carries, between ranks that share no memory."""

    def __init__(
        self,
        tensor: torch.Tensor,
        work: Any,
        finish: Callable[[], None] | None,
        seconds: Callable[[], float],
    ):
        super().__init__([tensor], (), finish)
        self._work, self._seconds, self._is_finished = work, seconds, False

    def _wait_at_most(self, seconds: float) -> None:
        self._wait_for_gloo(seconds)

    def _wait_for_all(self, deadline: float | None) -> None:
        # Told its own limit: gloo would wait as long as the default group may.
        self._wait_for_gloo(self._seconds())

    def _wait_for_gloo(self, seconds: float) -> None:
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise WireError(f"{_GLOO}has failed: {error}") from error

    def is_taken(self) -> bool:
        """As `is_completed`: gloo says no more than that a message has left."""
        return self.is_completed()

    def wait_until_taken(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the message has arrived, or has left."""
        return self._is_finished or self._work.is_completed()

    def get_future(self) -> torch.futures.Future:
        """Raises RuntimeError: gloo gives none for a message."""
        return self._work.get_future()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    source_rank = _source_rank
