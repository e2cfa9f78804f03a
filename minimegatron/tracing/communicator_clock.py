"""When each NCCL communicator did its work: events behind each piece of it, on a stream beside it.

Megatron has no counterpart.

NCCL does the work of a communicator on a stream of its own, one piece after the other, and torch shows
neither that stream nor its events. `wait` of a handle shows the end: whatever follows in the stream
that waits comes after the work. So there is a second stream per communicator, which computes nothing.
Once the program has waited for a handle, this stream waits for it too, and an event is put behind.

* The **end** is the event's time. The second stream waits after the program alone, for two reasons.
  torch keeps a message's memory until the first `wait`. And where a GPU takes its work from one queue
  (`CUDA_DEVICE_MAX_CONNECTIONS=1`), an early wait could hold up the work behind it; there the time may
  be as late as the compute stream's own wait. A program that is slower than its GPU comes to `wait`
  when the work is long done. So whenever a recorded call ends, the oldest open work of each
  communicator is asked whether it is done, and the time of the first yes is taken.
* The **beginning** is the later of two times: the compute stream came to the post, and the
  communicator ended what it did before. From then on nothing on this GPU keeps the work back. It is
  not when bytes began to move: a receive, a send and a collective include waiting for the others.

A collective that is waited for within its own call is done by the compute stream itself, and ends with
the call. What goes through gloo or shared memory has no such times: no stream of the GPU carries it.
Nor has work that was neither waited for nor seen to be done.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import Pending
from minimegatron.core.tracing import Call
from minimegatron.tracing.device_clock import DeviceClock

BESIDE_NCCL = -1
"""The priority of the second streams. torch hands out the streams of one priority in turn, and a few
communicators later the same ones again. It takes NCCL's from those of priority 0 unless told otherwise,
so ours are others."""

MessageKey = tuple[str, str, int, int]
"""(doing, payload, peer, how many such messages came before it in this step)."""
CommunicatorKey = tuple[str, tuple[int, int] | None]
"""(name of the process group, two ranks of it that have a communicator for themselves)."""


class _Posted:
    """One piece of a communicator's work: a collective, a message, or a batch of messages."""

    __slots__ = ("end", "handle", "indices", "key", "posts", "seen")

    def __init__(self, key: CommunicatorKey, record: Any, handle: Any = None):
        self.key, self.handle = key, handle
        self.indices, self.posts = [record.index], [record.marks[0]]
        self.end = self.seen = None


class CommunicatorClock:
    """Sees the recorded calls of one rank end; keeps what tells when communicators began and ended."""

    def __init__(self, clock: DeviceClock, read_clock: Callable[[], int]):
        self._clock, self._read_clock = clock, read_clock
        self._names: dict[CommunicatorKey, str] = {}
        self._streams: dict[CommunicatorKey, torch.cuda.Stream] = {}
        self._all: list[_Posted] = []
        self._open: dict[CommunicatorKey, deque[_Posted]] = defaultdict(deque)
        self._of_handle: dict[int, _Posted] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Messages are counted anew, as the communicator of the pipeline counts them."""
        self._of_message: dict[MessageKey, _Posted] = {}
        self._num_started: dict[tuple, int] = defaultdict(int)
        self._batch: tuple[_Posted, Any] | None = None

    def look(self, call: Call, record: Any) -> None:
        """A recorded call has ended; its record has both marks."""
        self._ask()
        look = self._LOOK.get(call.name)
        if look is not None:
            look(self, call, record)

    def spans(self, time_of: Callable[[tuple], int | None]) -> dict[int, tuple[str, int, int]]:
        """Index of a record -> (communicator, its beginning, its end), on the program's clock in ns.

        `time_of` is what `DeviceClock.times` gives. The messages of a batch have the same times.
        """
        spans: dict[int, tuple[str, int, int]] = {}
        last_end: dict[CommunicatorKey, int] = {}
        for posted in self._all:
            times = [time_of(mark) for mark in posted.posts]
            end = posted.seen
            if posted.end is not None:
                end = time_of(posted.end)
            if end is None or None in times:
                continue
            start = max(*times, last_end.get(posted.key, times[0]))
            last_end[posted.key] = end
            name = self._names[posted.key]
            spans |= dict.fromkeys(posted.indices, (name, min(start, end), end))
        return spans

    # -- What the calls tell --

    def _look_at_start(self, call: Call, record: Any) -> None:
        group, result = call.arguments["self"].pp_group, call.result
        message = record.attributes
        if result is None or not _is_nccl(group):
            return
        is_alone = isinstance(result, dist.Work)
        if is_alone and not _has_one_communicator(group):
            key = self._key(group, tuple(sorted((group.rank(), message["peer"]))))
        else:
            key = self._key(group, None)
        if is_alone:
            posted = self._post(_Posted(key, record, result))
        else:
            posted = self._in_batch(key, record)
        channel = (message["doing"], message["payload"], message["peer"])
        self._of_message[(*channel, self._num_started[channel])] = posted
        self._num_started[channel] += 1

    def _in_batch(self, key: CommunicatorKey, record: Any) -> _Posted:
        """The batch that a message belongs to: its messages are made in calls without a gap between."""
        if self._batch is not None:
            posted, last = self._batch
            goes_on = record.index == last.index + 1 and record.parent is last.parent
            is_of_sizes = [r.attributes["payload"].endswith("shape") for r in (record, last)]
            if posted.key == key and goes_on and is_of_sizes[0] == is_of_sizes[1]:
                posted.indices.append(record.index)
                posted.posts.append(record.marks[0])
                self._batch = posted, record
                return posted
        posted = self._post(_Posted(key, record))
        self._batch = posted, record
        return posted

    def _look_at_exchange(self, call: Call, record: Any) -> None:
        """Its results hold the handle of the batch that it has started, if it has started one."""
        if self._batch is None or self._batch[1].parent is not record:
            return
        for result in call.result or ():
            self._show(self._batch[0], result.work)

    def _look_at_wait(self, call: Call, record: Any) -> None:
        told = record.attributes
        key = (told["doing"], told["payload"], told["peer"], told.get("number", 0))
        posted = self._of_message.pop(key, None)
        if posted is not None and posted in self._open[posted.key]:
            self._show(posted, call.arguments["handle"].work)
            self._end(self._open[posted.key], posted)

    def _look_at_collective(self, call: Call, record: Any) -> None:
        group, result = call.arguments.get("group"), call.result
        if not _is_nccl(group):
            return
        posted = _Posted(self._key(group, None), record)
        if isinstance(result, Pending) and isinstance(result.work, dist.Work):
            posted.handle = result.work
            self._of_handle[id(result.work)] = posted
            self._post(posted)
        elif result is None:  # the compute stream itself does it; NCCL keeps a communicator's order
            posted.end = record.marks[1]
            self._post(posted)

    def _look_at_collective_wait(self, call: Call, record: Any) -> None:
        posted = self._of_handle.get(id(call.arguments["handle"].work))
        if posted is not None:
            self._end(self._open[posted.key], posted)

    _LOOK = {
        "p2p-start": _look_at_start,
        "p2p-wait": _look_at_wait,
        "exchange": _look_at_exchange,
        "all-reduce": _look_at_collective,
        "broadcast": _look_at_collective,
        "all-gather": _look_at_collective,
        "reduce-scatter": _look_at_collective,
        "all-to-all": _look_at_collective,
        "ring-hop": _look_at_collective,
        "collective-wait": _look_at_collective_wait,
    }

    # -- Ends --

    def _post(self, posted: _Posted) -> _Posted:
        self._all.append(posted)
        if posted.end is None:
            self._open[posted.key].append(posted)
        return posted

    def _show(self, posted: _Posted, handle: Any) -> None:
        """That of a batch is not shown to whoever sees its messages start."""
        is_new = posted.handle is None and posted in self._open[posted.key]
        if is_new and isinstance(handle, dist.Work):
            posted.handle = handle

    def _end(self, queue: deque[_Posted], last: _Posted) -> None:
        """Puts an event behind all that a communicator has open, up to `last`.

        The compute stream waits for the last of them, and so comes after each: the second stream may
        wait for all. A batch whose handle nobody has shown becomes one with what follows it.
        """
        unseen: _Posted | None = None
        while queue:
            posted = queue.popleft()
            if unseen is not None:
                posted.indices, posted.posts = unseen.indices + posted.indices, unseen.posts
            unseen = posted if posted.handle is None else None
            if posted.handle is not None:
                with torch.cuda.stream(self._stream(posted.key)):
                    posted.handle.wait()
                    posted.end = self._clock.mark()
                self._forget_handle(posted)
            if posted is last:
                break

    def _ask(self) -> None:
        """Of each communicator, takes what has ended by itself out of its queue."""
        for queue in self._open.values():
            while queue and queue[0].handle is not None and queue[0].handle.is_completed():
                ended = queue.popleft()
                ended.seen = self._read_clock()
                self._forget_handle(ended)

    def _forget_handle(self, posted: _Posted) -> None:
        self._of_handle.pop(id(posted.handle), None)
        posted.handle = None  # it keeps tensors alive

    def _stream(self, key: CommunicatorKey) -> torch.cuda.Stream:
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(priority=BESIDE_NCCL)
        return self._streams[key]

    # -- Names --

    def _key(self, group: dist.ProcessGroup, pair: tuple[int, int] | None) -> CommunicatorKey:
        key = (group.group_name, pair)
        if key not in self._names:
            name = _name(group, pair)
            number = list(self._names.values()).count(name)
            self._names[key] = f"{name} #{number + 1}" if number else name
        return key


def _is_nccl(group: Any) -> bool:
    return group is not None and dist.get_backend(group) == "nccl"


def _has_one_communicator(group: dist.ProcessGroup) -> bool:
    """Lone messages use the group's communicator where torch connected it at once, for one device.
    Otherwise each pair of ranks gets a communicator with its first lone message."""
    return getattr(group, "bound_device_id", None) is not None


def _name(group: dist.ProcessGroup, pair: tuple[int, int] | None) -> str:
    """`pp 0:1` is a pair's communicator, `pp 0-3` and `dp 0,4` are groups'. Numbers are global ranks.

    Groups of this package are described by all of their kinds ("pp+mp"), of which one is enough.
    """
    kinds = (group.group_desc or "group").split("+")
    kind = "pp" if pair is not None and "pp" in kinds else kinds[0]
    ranks = dist.get_process_group_ranks(group)
    if pair is not None:
        return f"{kind} {ranks[pair[0]]}:{ranks[pair[1]]}"
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{kind} {ranks[0]}-{ranks[-1]}"
    return f"{kind} {','.join(map(str, ranks))}"
