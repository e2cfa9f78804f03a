"""GPUs and NCCL without either: runs what each rank's program put into its streams.

Read by: `fake_transport`, which writes the programs. A program on a GPU does not compute. It puts
work into streams, and each stream does its work one after the other:

* The *compute stream* of a rank holds kernels, events (a note that everything before it is done) and
  waits for messages.
* Each *communicator* has a stream on each of its ranks. It holds posts: one lone message, or a batch.
  A post starts when all posts before it have ended and the event is past that the program put into
  the compute stream at that moment. A message moves when both of its posts have started: the n-th send
  from a to b meets the n-th receive at b from a, in the same communicator. A post ends when all of
  its messages have moved.

The program goes on at once after each of these, also after `wait`. It stops in two places: a
communicator is made when it is first used, by all its ranks together; and a program that reads a
tensor's numbers stops until its compute stream is empty.

The machine has a clock. A kernel takes `Lengths.kernel`, a message `Lengths.message` from when both of
its posts have started; nothing else takes time. A `Mark` notes when its stream comes to it. A program
may have further streams, which hold waits and marks alone.

A real run may copy a message at any time between the start and the end of its posts. This run does
not try these times out. Instead each stream knows what must have ended before (`seen`: a number per
stream, a "vector clock"). If two uses of the same memory may fall together, and one of them writes,
that is a `Race`, whichever of them happens to be first here.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PAIRS, TOGETHER, TAGS = "pairs", "together", "tags"
"""Lone messages: a communicator for each pair of ranks (what torch makes), or one for all of them. Or,
as on gloo, a way of its own for each payload in each direction, where nobody meets anybody."""


class Deadlock(Exception):
    """Somebody waits and nothing can go on."""


class Leftover(Exception):
    """All ranks have finished, but not all messages were sent, received and used."""


class Race(AssertionError):
    """Memory is written while it may still be in use, or read when it may not be written yet."""


# -- What a program puts into its streams --


class Kernel(NamedTuple):
    """Reads buffers, which must hold what it expects, and writes others. Buffers are numbers."""

    name: str
    reads: tuple[tuple[int, Any], ...] = ()
    writes: tuple[tuple[int, Any], ...] = ()


class Free(NamedTuple):
    """Nobody holds the buffer any more: the next kernel may get this memory, and write to it."""

    buffer: int


class Part(NamedTuple):
    """One end of a message."""

    is_send: bool
    peer: int
    payload: str
    buffer: int
    shape: tuple[int, ...]
    num_bytes: int

    def __str__(self) -> str:
        verb = "send to" if self.is_send else "receive from"
        return f"{verb} rank {self.peer} ({self.payload})"


class Post(NamedTuple):
    """What is started at once: a batch, or one lone message."""

    number: int
    is_batch: bool
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        parts = " + ".join(map(str, self.parts))
        return f"batch of {parts}" if self.is_batch else parts


class Event(NamedTuple):
    """The post with this number may start from here on."""

    post: int


class Wait(NamedTuple):
    """What follows in the stream comes after the end of the post with this number."""

    post: int
    stream: str = ""
    """The name of a further stream; empty for the compute stream. Likewise below."""


class Mark(NamedTuple):
    """Notes the time at which its stream comes here, under this number."""

    number: int
    stream: str = ""


class Synchronize(NamedTuple):
    """The program itself stops until its compute stream is empty."""


class Lengths(NamedTuple):
    """How long work takes, in any unit of time."""

    kernel: Callable[[Kernel], float] = lambda kernel: 0.0
    message: Callable[[Part], float] = lambda part: 0.0
    """Of the part that receives it."""


NO_TIME = Lengths()


# -- Streams and memory while they run --

Seen = dict[str, int]
"""How many entries of each stream have ended for certain."""


def _merge(seen: Seen, other: Seen) -> None:
    for stream, number in other.items():
        if number > seen.get(stream, 0):
            seen[stream] = number


@dataclass
class _Stream:
    name: str
    queue: deque = field(default_factory=deque)
    num_done: int = 0
    seen: Seen = field(default_factory=dict)
    time: float = 0.0
    """When its latest entry ended."""

    def end_entry(self) -> None:
        self.queue.popleft()
        self.num_done += 1
        self.seen[self.name] = self.num_done


@dataclass
class _Running:
    """A post in its stream."""

    rank: int
    post: Post
    communicator: tuple[int, ...]
    released: Seen | None = None
    """What the compute stream had seen at the event; None before it."""
    released_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    has_started: bool = False
    num_moved: int = 0
    seen: Seen = field(default_factory=dict)
    has_ended: bool = False
    missing: list[Part] = field(default_factory=list)


class _Use(NamedTuple):
    """The `number`-th entry of a stream reads or writes a buffer."""

    stream: str
    number: int
    what: str


@dataclass
class _Buffer:
    value: Any = "memory that nobody wrote"
    written: _Use | None = None
    reads: list[_Use] = field(default_factory=list)


class _Memory:
    """One rank's buffers."""

    def __init__(self, rank: int):
        self.rank = rank
        self.buffers: dict[int, _Buffer] = defaultdict(_Buffer)
        self.was_read: set[int] = set()

    def read(self, buffer: int, use: _Use, seen: Seen) -> Any:
        found = self.buffers[buffer]
        self._demand_order(found.written, use, seen)
        found.reads.append(use)
        self.was_read.add(buffer)
        return found.value

    def write(self, buffer: int, value: Any, use: _Use, seen: Seen) -> None:
        found = self.buffers[buffer]
        for earlier in (found.written, *found.reads):
            self._demand_order(earlier, use, seen)
        found.value, found.written, found.reads = value, use, []

    def _demand_order(self, earlier: _Use | None, use: _Use, seen: Seen) -> None:
        if earlier is not None and seen.get(earlier.stream, 0) < earlier.number:
            raise Race(
                f"rank {self.rank}: nothing says which comes first: {earlier.what}, or {use.what}; "
                "both use the same memory"
            )


class _Rank:
    def __init__(self, rank: int, program: list):
        self.rank, self.program, self.next = rank, program, 0
        self.compute = _Stream(f"compute stream of rank {rank}")
        self.links: dict[tuple, _Stream] = {}
        self.further: dict[str, _Stream] = {}
        self.posts: dict[int, _Running] = {}
        self.memory = _Memory(rank)


class Machine:
    """Runs the programs of all ranks. `lone`: which communicators lone messages use."""

    def __init__(self, programs: list[list], lone: str = PAIRS, lengths: Lengths = NO_TIME):
        self.lone, self.lengths = lone, lengths
        self.ranks = [_Rank(rank, program) for rank, program in enumerate(programs)]
        self.arrived: dict[tuple, set[int]] = defaultdict(set)
        self.open: dict[tuple, deque] = defaultdict(deque)
        self.values: dict[tuple[int, int], list] = {}
        """(rank, number of a post) -> what each of its messages carried."""
        self.kernels: list[list[tuple[str, float, float]]] = [[] for _ in programs]
        """By rank: the name of each kernel, and when it started and ended."""
        self.marks: dict[tuple[int, int], float] = {}
        """(rank, number of a mark) -> its time."""

    def run(self) -> None:
        """To the end. Raises Deadlock, Leftover, Race, or AssertionError for a wrong message."""
        while any(self._advance(rank) for rank in self.ranks):
            pass
        if any(rank.next < len(rank.program) or rank.compute.queue for rank in self.ranks):
            raise Deadlock("; ".join(self._waits()))
        left = [
            f"rank {rank.rank} has left: {running.post}"
            for rank in self.ranks
            for running in rank.posts.values()
            if not running.has_ended
        ]
        left += [unread for rank in self.ranks for unread in self._unread(rank)]
        if left:
            raise Leftover("; ".join(left))

    def posts(self, rank: int) -> dict[tuple, list[tuple[Post, float, float]]]:
        """By communicator of this rank: each post, and when it started and ended."""
        found = defaultdict(list)
        for running in self.ranks[rank].posts.values():
            times = (running.started_at, running.ended_at)
            found[running.communicator].append((running.post, *times))
        return dict(found)

    def _advance(self, rank: _Rank) -> bool:
        has_moved = False
        while self._step_host(rank) or self._step_streams(rank) or self._step_links(rank):
            has_moved = True
        return has_moved

    # -- The program --

    def _step_host(self, rank: _Rank) -> bool:
        if rank.next == len(rank.program):
            return False
        entry = rank.program[rank.next]
        if isinstance(entry, Synchronize):
            if rank.compute.queue:
                return False
        elif isinstance(entry, Post):
            if not self._post(rank, entry):
                return False
        elif isinstance(entry, Wait | Mark) and entry.stream:
            stream = rank.further.setdefault(entry.stream, _Stream(entry.stream))
            stream.queue.append(entry)
        else:
            rank.compute.queue.append(entry)
        rank.next += 1
        return True

    def _post(self, rank: _Rank, post: Post) -> bool:
        communicator = self._communicator(rank.rank, post)
        arrived = self.arrived[communicator]
        arrived.add(rank.rank)
        if len(arrived) < len(communicator[1]):
            return False
        running = _Running(rank.rank, post, communicator)
        rank.posts[post.number] = running
        if communicator not in rank.links:
            name = f"{communicator[0]} stream {communicator[1]} of rank {rank.rank}"
            rank.links[communicator] = _Stream(name)
        rank.links[communicator].queue.append(running)
        rank.compute.queue.append(Event(post.number))
        return True

    def _communicator(self, rank: int, post: Post) -> tuple[str, tuple[int, ...]]:
        if self.lone == TAGS:
            (part,) = post.parts
            ends = (rank, part.peer) if part.is_send else (part.peer, rank)
            return f"{part.payload} from {ends[0]} to {ends[1]}", ()
        if post.is_batch or self.lone == TOGETHER:
            return "batch" if post.is_batch else "lone", tuple(range(len(self.ranks)))
        return "lone", tuple(sorted((rank, post.parts[0].peer)))

    # -- The compute stream, and further ones --

    def _step_streams(self, rank: _Rank) -> bool:
        return any(self._step_stream(rank, s) for s in (rank.compute, *rank.further.values()))

    def _step_stream(self, rank: _Rank, stream: _Stream) -> bool:
        if not stream.queue:
            return False
        entry = stream.queue[0]
        if isinstance(entry, Wait):
            running = rank.posts[entry.post]
            if not running.has_ended:
                return False
            _merge(stream.seen, running.seen)
            stream.time = max(stream.time, running.ended_at)
        elif isinstance(entry, Mark):
            self.marks[rank.rank, entry.number] = stream.time
        elif isinstance(entry, Event):
            rank.posts[entry.post].released = dict(stream.seen)
            rank.posts[entry.post].released_at = stream.time
        elif isinstance(entry, Free):
            use = _Use(stream.name, stream.num_done + 1, "its memory is freed")
            rank.memory.write(entry.buffer, "freed memory", use, stream.seen)
        else:
            self._compute(rank, entry)
        stream.end_entry()
        return True

    def _compute(self, rank: _Rank, kernel: Kernel) -> None:
        stream = rank.compute
        use = _Use(stream.name, stream.num_done + 1, kernel.name)
        for buffer, expected in kernel.reads:
            value = rank.memory.read(buffer, use, stream.seen)
            if value != expected:
                raise AssertionError(
                    f"rank {rank.rank}: {kernel.name} expected {expected}, got {value}"
                )
        for buffer, value in kernel.writes:
            rank.memory.write(buffer, value, use, stream.seen)
        start, stream.time = stream.time, stream.time + self.lengths.kernel(kernel)
        self.kernels[rank.rank].append((kernel.name, start, stream.time))

    # -- The communicators' streams --

    def _step_links(self, rank: _Rank) -> bool:
        has_moved = False
        for stream in rank.links.values():
            running = stream.queue[0] if stream.queue else None
            if running is None or running.has_started or running.released is None:
                continue
            self._start(rank, stream, running)
            has_moved = True
        return has_moved

    def _start(self, rank: _Rank, stream: _Stream, running: _Running) -> None:
        running.has_started = True
        running.started_at = max(stream.time, running.released_at)
        _merge(running.seen, stream.seen)
        _merge(running.seen, running.released)
        values: list[Any] = [None] * len(running.post.parts)
        self.values[rank.rank, running.post.number] = values
        running.missing = list(running.post.parts)
        begun = dict(running.seen)
        for place, part in enumerate(running.post.parts):
            use = _Use(stream.name, stream.num_done + 1, str(part))
            if part.is_send:
                values[place] = rank.memory.read(part.buffer, use, begun)
            else:
                rank.memory.write(part.buffer, "a message on its way", use, begun)
        for place, part in enumerate(running.post.parts):
            self._offer(running, place, part, begun)

    def _offer(self, running: _Running, place: int, part: Part, begun: Seen) -> None:
        ends = (running.rank, part.peer) if part.is_send else (part.peer, running.rank)
        others = self.open[running.communicator, ends, not part.is_send]
        mine = (running, place, part, begun)
        if not others:
            self.open[running.communicator, ends, part.is_send].append(mine)
            return
        self._move(*((mine, others.popleft()) if part.is_send else (others.popleft(), mine)))

    def _move(self, sender: tuple, receiver: tuple) -> None:
        (source, from_place, sent, sent_begun), (target, to_place, part, begun) = sender, receiver
        if sent.shape != part.shape:
            raise AssertionError(
                f"rank {source.rank} sent shape {sent.shape}, rank {target.rank} expected "
                f"{part.shape}"
            )
        value = self.values[source.rank, source.post.number][from_place]
        self.values[target.rank, target.post.number][to_place] = value
        self.ranks[target.rank].memory.buffers[part.buffer].value = value
        ended_at = max(source.started_at, target.started_at) + self.lengths.message(part)
        for running, done, other in ((source, sent, begun), (target, part, sent_begun)):
            running.missing.remove(done)
            running.ended_at = max(running.ended_at, ended_at)
            _merge(running.seen, other)
            if not running.missing:
                stream = self.ranks[running.rank].links[running.communicator]
                stream.seen, stream.time = running.seen, running.ended_at
                stream.end_entry()
                running.has_ended = True

    # -- When nothing goes on --

    def _waits(self) -> Iterable[str]:
        for rank in self.ranks:
            if rank.compute.queue:
                yield f"rank {rank.rank} waits: {self._blocked(rank, rank.compute.queue[0])}"
            elif rank.next < len(rank.program):
                post = rank.program[rank.next]
                communicator = self._communicator(rank.rank, post)
                absent = set(communicator[1]) - self.arrived[communicator]
                yield (
                    f"rank {rank.rank} waits: {post} is the first use of a communicator, and ranks "
                    f"{sorted(absent)} have not come to theirs"
                )

    def _blocked(self, rank: _Rank, wait: Wait) -> str:
        running = rank.posts[wait.post]
        if running.has_started:
            return ", ".join(map(str, running.missing))
        first = rank.links[running.communicator].queue[0]
        return f"{running.post}, behind {', '.join(map(str, first.missing))}"

    def _unread(self, rank: _Rank) -> Iterable[str]:
        for running in rank.posts.values():
            for part in running.post.parts:
                if not part.is_send and part.buffer not in rank.memory.was_read:
                    yield f"rank {rank.rank} never used what it got: {part}"
