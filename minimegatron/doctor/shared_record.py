"""A rank's record in memory that another process can read, even while the rank is stuck or stopped.

It is one small file per rank, mapped into memory (on Linux under /dev/shm, where it never reaches a
disk). Torch-free. Megatron has no counterpart.

Two kinds of content, because calls begin and end thousands of times a second, names do not change:

* fixed fields: the open calls, the counters. A call is written as one `struct` of numbers, without
  a loop or a pickle; names are numbers too.
* a text, as JSON: what the numbers stand for, the groups and their ranks, the step's configuration.
  It stands twice; a new one goes into the place not in use, and then that place is declared valid.

Nobody is locked out: the writer must never wait. A reader that sees the counter of events move while
it reads, reads again. In a rank that is stuck nothing moves, so what is read there is whole.
"""

import contextlib
import json
import mmap
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from minimegatron.doctor import records
from minimegatron.doctor.records import (
    CaughtException,
    Collective,
    GroupUse,
    MessageCount,
    OpenCall,
    RankRecord,
)

MAX_CALLS = 24
"""Open calls kept, nested in each other; below that depth, only the innermost."""
MAX_GROUPS = 16
MAX_MESSAGES = 24
NUM_RECENT = 8
"""Collectives remembered per group."""
MAX_DIMS = 5
TEXT_BYTES = 12288
NONE = -1

STATES = (records.STARTING, records.RUNNING, records.RETURNED, records.RAISED)

MAGIC, VERSION = b"mmrecord", 1
_IDENTITY = struct.Struct("<8s4I")  # magic, version, rank, world size, process
_STATE = struct.Struct("<I")
_PROGRESS = struct.Struct("<QdI")  # events, time of the last one, open calls
_COUNTS = struct.Struct("<3Q")  # steps, forwards, backwards
_TEXT = struct.Struct("<3I")  # place in use, length in either place
_CALL = struct.Struct("<d6Hh2x4i2q5q")
_COLLECTIVE = struct.Struct("<4H2i2q5q")
_STARTED = struct.Struct("<q")
_MESSAGE = struct.Struct("<2Hi2q")


def _lay_out() -> dict[str, int]:
    """Where each part begins, in bytes."""
    group = _STARTED.size + NUM_RECENT * _COLLECTIVE.size
    parts = {
        "identity": _IDENTITY.size,
        "state": _STATE.size,
        "progress": _PROGRESS.size,
        "counts": _COUNTS.size,
        "text": _TEXT.size,
        "calls": MAX_CALLS * _CALL.size,
        "groups": MAX_GROUPS * group,
        "messages": MAX_MESSAGES * _MESSAGE.size,
        "texts": 2 * TEXT_BYTES,
    }
    offsets, offset = {}, 0
    for name, size in parts.items():
        offsets[name] = offset
        offset += -(-size // 8) * 8
    return {**offsets, "end": offset, "group_size": group}


_AT = _lay_out()
RECORD_BYTES = _AT["end"]
ROOM_PER_RANK = 2 * RECORD_BYTES
"""For a rank's record, and for its answers when it is asked."""
# Looked up at every call, so by names of their own.
_PROGRESS_AT, _CALLS_AT, _CALL_BYTES = _AT["progress"], _AT["calls"], _CALL.size


class CallFields(NamedTuple):
    """A call as numbers, in the order of `_CALL`, where the time of its beginning comes first.

    Words and links are indices into the text.
    """

    link: int
    payload: int = 0
    doing: int = 0
    dtype: int = 0
    op: int = 0
    num_dims: int = 0
    group: int = NONE
    microbatch: int = NONE
    chunk: int = NONE
    layer: int = NONE
    peer: int = NONE
    number: int = NONE
    num_bytes: int = NONE
    size_0: int = 0
    size_1: int = 0
    size_2: int = 0
    size_3: int = 0
    size_4: int = 0


def pad_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The first sizes of a shape, in as many numbers as there is room for."""
    return (tuple(shape) + (0,) * MAX_DIMS)[:MAX_DIMS]


class RecordWriter:
    """One rank's side of its record.

    Where the folder has no room, it says so, and the rank goes on with a record that nobody sees.
    """

    def __init__(self, path: str | os.PathLike, rank: int, world_size: int):
        self._text: dict[str, Any] = {"words": [""], "links": [["", ""]], "groups": []}
        self._words: dict[str, int] = {"": 0}
        self._links: dict[tuple[str, str], int] = {("", ""): 0}
        self._depth = self._num_events = 0
        new = Path(f"{path}.new")
        self._memory = _map_file(new)
        _IDENTITY.pack_into(
            self._memory, _AT["identity"], MAGIC, VERSION, rank, world_size, os.getpid()
        )
        self._write_text()
        self._note_progress()
        # Under its own name only when it can be read.
        if new.exists():
            os.rename(new, path)

    # -- Calls --

    def push(self, fields: tuple) -> float:
        """A call begins, within those that are open; returns when."""
        now, depth = time.monotonic(), self._depth
        place = depth if depth < MAX_CALLS else MAX_CALLS - 1
        _CALL.pack_into(self._memory, _CALLS_AT + place * _CALL_BYTES, now, *fields)
        self._depth = depth = depth + 1
        self._num_events = num_events = self._num_events + 1
        _PROGRESS.pack_into(self._memory, _PROGRESS_AT, num_events, now, depth)
        return now

    def pop(self) -> None:
        """The innermost call ends."""
        self._depth = depth = self._depth - 1
        self._num_events = num_events = self._num_events + 1
        _PROGRESS.pack_into(self._memory, _PROGRESS_AT, num_events, time.monotonic(), depth)

    def show_innermost(self, since: float, fields: tuple) -> None:
        """After a `pop` that leaves more calls open than there are places: the one now innermost."""
        _CALL.pack_into(self._memory, _CALLS_AT + (MAX_CALLS - 1) * _CALL_BYTES, since, *fields)

    def _note_progress(self) -> None:
        self._num_events += 1
        now = time.monotonic()
        _PROGRESS.pack_into(self._memory, _PROGRESS_AT, self._num_events, now, self._depth)

    # -- Counters --

    def set_state(self, state: str) -> None:
        """`STARTING`, `RUNNING`, `RETURNED` or `RAISED`."""
        _STATE.pack_into(self._memory, _AT["state"], STATES.index(state))
        self._note_progress()

    def set_counts(self, num_steps: int, num_forwards: int, num_backwards: int) -> None:
        """Schedule runs begun; forwards and backwards begun in the latest."""
        _COUNTS.pack_into(self._memory, _AT["counts"], num_steps, num_forwards, num_backwards)

    def set_collective(self, group: int, number: int, fields: tuple) -> None:
        """Collective `number` of a group is entered. `fields` are `_COLLECTIVE`'s without it."""
        offset = _AT["groups"] + group * _AT["group_size"]
        entry = offset + _STARTED.size + number % NUM_RECENT * _COLLECTIVE.size
        _COLLECTIVE.pack_into(self._memory, entry, *fields)
        _STARTED.pack_into(self._memory, offset, number + 1)

    def set_message(
        self, index: int, num_started: int, num_awaited: int, doing: int, payload: int, peer: int
    ) -> None:
        """Messages of one kind with one peer: how many were started, how many awaited."""
        if index < MAX_MESSAGES:
            offset = _AT["messages"] + index * _MESSAGE.size
            _MESSAGE.pack_into(self._memory, offset, doing, payload, peer, num_started, num_awaited)

    def clear_messages(self) -> None:
        """A new step counts anew."""
        start = _AT["messages"]
        self._memory[start : _AT["texts"]] = bytes(_AT["texts"] - start)

    # -- The text --

    def word(self, word: str) -> int:
        """The number that stands for a word; 0 if there is no more room for new ones."""
        known = self._words.get(word)
        return self._add(self._words, "words", word, word) if known is None else known

    def link(self, name: str, symbol: str) -> int:
        """The number that stands for a traced function."""
        known = self._links.get((name, symbol))
        if known is None:
            return self._add(self._links, "links", (name, symbol), [name, symbol])
        return known

    def _add(self, known: dict, kind: str, key: Any, entry: Any) -> int:
        self._text[kind].append(entry)
        if not self._write_text():
            self._text[kind].pop()
            known[key] = 0
            return 0
        known[key] = len(self._text[kind]) - 1
        return known[key]

    def add_group(self, name: str, title: str, ranks: list[int]) -> int:
        """A place for a process group; `NONE` if all are taken."""
        groups = self._text["groups"]
        if len(groups) == MAX_GROUPS:
            return NONE
        groups.append({"name": name, "title": title, "ranks": _shorten(ranks)})
        if self._write_text():
            return len(groups) - 1
        groups.pop()
        return NONE

    def tell(self, **facts: Any) -> None:
        """Facts that seldom change: `step`, `pipeline`, `coordinates`, `sizes`, `caught`."""
        if all(self._text.get(name) == value for name, value in facts.items()):
            return
        before = dict(self._text)
        self._text.update(facts)
        if not self._write_text():
            self._text = before

    def _write_text(self) -> bool:
        text = json.dumps(self._text, separators=(",", ":")).encode()
        if len(text) > TEXT_BYTES:
            return False
        place, *lengths = _TEXT.unpack_from(self._memory, _AT["text"])
        free = 1 - place
        lengths[free] = len(text)
        start = _AT["texts"] + free * TEXT_BYTES
        self._memory[start : start + len(text)] = text
        _TEXT.pack_into(self._memory, _AT["text"], free, *lengths)
        return True

    def close(self) -> None:
        """Gives the memory back; the file stays for readers."""
        self._memory.close()


def _map_file(path: Path) -> mmap.mmap:
    """A new file of `RECORD_BYTES`, mapped; memory without a file where there is no room for one."""
    try:
        # Written, not only made so long: at its first use, a page that has no room would end the
        # process (SIGBUS).
        path.write_bytes(bytes(RECORD_BYTES))
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), RECORD_BYTES)
    except OSError as error:
        path.unlink(missing_ok=True)
        print(
            f"minimegatron: the hang doctor does not see this rank: its record of {RECORD_BYTES} bytes "
            f"cannot be written to {path.parent} ({error.strerror}); set TMPDIR to a folder with room",
            file=sys.stderr,
            flush=True,
        )
        return mmap.mmap(-1, RECORD_BYTES)


def _shorten(ranks: list[int]) -> list[int] | dict[str, int]:
    """Evenly spaced ranks as three numbers: a group may have thousands."""
    steps = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
    if len(ranks) > 4 and len(steps) == 1:
        return {"start": ranks[0], "step": steps.pop(), "count": len(ranks)}
    return list(ranks)


def _lengthen(ranks: list[int] | dict[str, int]) -> tuple[int, ...]:
    if isinstance(ranks, dict):
        return tuple(ranks["start"] + i * ranks["step"] for i in range(ranks["count"]))
    return tuple(ranks)


# -- Reading --


def read_record(path: str | os.PathLike) -> RankRecord | None:
    """A rank's record as it is now; None if the rank has not made one yet."""
    record = None
    for _ in range(5):
        memory = _read(path)
        if memory is None:
            return None
        before = memory[_AT["progress"] : _AT["progress"] + _PROGRESS.size]
        with contextlib.suppress(ValueError, IndexError, KeyError):
            record = _Reader(memory).record()
            again = _read(path)
            if again is not None and again[_AT["progress"] :].startswith(before):
                break
    return record


def read_progress(path: str | os.PathLike) -> tuple[str, int, float, int] | None:
    """(state, events, time of the last event, process) only: what a watcher looks at all the time."""
    try:
        with open(path, "rb") as file:
            memory = file.read(_AT["progress"] + _PROGRESS.size)
    except FileNotFoundError:
        return None
    (state,) = _STATE.unpack_from(memory, _AT["state"])
    events, last, _ = _PROGRESS.unpack_from(memory, _AT["progress"])
    *_, pid = _IDENTITY.unpack_from(memory, _AT["identity"])
    return STATES[state], events, last, pid


def _read(path: str | os.PathLike) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None


class _Reader:
    """Turns the bytes of one record into a `RankRecord`."""

    def __init__(self, memory: bytes):
        self.memory = memory
        place, *lengths = _TEXT.unpack_from(memory, _AT["text"])
        start = _AT["texts"] + place * TEXT_BYTES
        self.text = json.loads(memory[start : start + lengths[place]])

    def record(self) -> RankRecord:
        magic, version, rank, world_size, pid = _IDENTITY.unpack_from(self.memory, _AT["identity"])
        if (magic, version) != (MAGIC, VERSION):
            raise ValueError(f"no record of version {VERSION}: {magic!r}, version {version}")
        (state,) = _STATE.unpack_from(self.memory, _AT["state"])
        num_events, last_progress, depth = _PROGRESS.unpack_from(self.memory, _AT["progress"])
        counts = _COUNTS.unpack_from(self.memory, _AT["counts"])
        return RankRecord(
            rank=rank,
            world_size=world_size,
            pid=pid,
            state=STATES[state],
            num_events=num_events,
            last_progress=last_progress,
            calls=self._calls(depth),
            groups=tuple(self._group(i, entry) for i, entry in enumerate(self.text["groups"])),
            messages=self._messages(),
            num_steps=counts[0],
            num_forwards=counts[1],
            num_backwards=counts[2],
            step=self.text.get("step"),
            pipeline=_lengthen(self.text.get("pipeline", [])),
            coordinates=self.text.get("coordinates", {}),
            sizes=self.text.get("sizes", {}),
            caught=self._caught(),
            seen_at=time.monotonic(),
        )

    def _calls(self, depth: int) -> tuple[OpenCall, ...]:
        calls = [
            self._call(_AT["calls"] + place * _CALL.size) for place in range(min(depth, MAX_CALLS))
        ]
        return tuple(call for call in calls if call is not None)

    def _call(self, offset: int) -> OpenCall | None:
        since, *rest = _CALL.unpack_from(self.memory, offset)
        if since == 0:
            return None
        fields = CallFields(*rest)
        name, symbol = self.text["links"][fields.link]
        return OpenCall(
            name=name,
            symbol=symbol,
            since=since,
            number=_known(fields.number),
            microbatch=_known(fields.microbatch),
            chunk=_known(fields.chunk),
            layer=_known(fields.layer),
            doing=self._word(fields.doing),
            payload=self._word(fields.payload),
            peer=_known(fields.peer),
            group=_known(fields.group),
            op=self._word(fields.op),
            shape=_shape(fields.num_dims, fields[-MAX_DIMS:], fields.dtype),
            dtype=self._word(fields.dtype),
            num_bytes=_known(fields.num_bytes),
        )

    def _word(self, index: int) -> str | None:
        return self.text["words"][index] or None

    def _group(self, index: int, entry: dict[str, Any]) -> GroupUse:
        offset = _AT["groups"] + index * _AT["group_size"]
        (num_started,) = _STARTED.unpack_from(self.memory, offset)
        first = max(0, num_started - NUM_RECENT)
        return GroupUse(
            name=entry["name"],
            ranks=_lengthen(entry["ranks"]),
            title=entry["title"],
            num_started=num_started,
            recent=tuple(self._collective(offset, number) for number in range(first, num_started)),
        )

    def _collective(self, group: int, number: int) -> Collective:
        offset = group + _STARTED.size + number % NUM_RECENT * _COLLECTIVE.size
        link, dtype, op, num_dims, layer, work, _, work_number, *sizes = _COLLECTIVE.unpack_from(
            self.memory, offset
        )
        return Collective(
            number=number,
            name=self.text["links"][link][0],
            shape=_shape(num_dims, sizes, dtype),
            dtype=self._word(dtype),
            op=self._word(op),
            work=self.text["links"][work][0] if work > 0 else None,
            work_number=_known(work_number),
            layer=_known(layer),
        )

    def _messages(self) -> tuple[MessageCount, ...]:
        counts = []
        for index in range(MAX_MESSAGES):
            offset = _AT["messages"] + index * _MESSAGE.size
            doing, payload, *rest = _MESSAGE.unpack_from(self.memory, offset)
            if doing:
                counts.append(MessageCount(self._word(doing), self._word(payload) or "", *rest))
        return tuple(counts)

    def _caught(self) -> CaughtException | None:
        caught = self.text.get("caught")
        if caught is None:
            return None
        call = OpenCall(
            name=caught["name"],
            symbol=caught["symbol"],
            number=caught["number"],
            microbatch=caught["microbatch"],
            chunk=caught["chunk"],
        )
        return CaughtException(caught["text"], call, caught["at"], caught["num_steps"])


def _known(value: int) -> int | None:
    return None if value == NONE else value


def _shape(num_dims: int, sizes: Any, dtype: int) -> tuple[int, ...] | None:
    # A scalar has no sizes, but a dtype.
    return tuple(sizes[: min(num_dims, MAX_DIMS)]) if dtype else None
