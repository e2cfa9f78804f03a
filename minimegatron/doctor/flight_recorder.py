"""What a rank's GPU was given and has not completed, as torch's flight recorder tells it.

On NCCL a call returns as soon as the GPU has been given its work. The GPU waits for other ranks then,
and the program only where it next needs a result: `.item()`, say, outside of any communication. torch
remembers in each process the last collectives and messages it gave to the GPU, and which of them are
over. Torch-free. Megatron has no counterpart.

torch also writes that into a file when a collective has timed out. Such a file is a pickle, which runs
code when it is read, so nobody here reads one: the living process is asked for JSON.

The collectives of a group are numbered, the same on all of its ranks. Its messages are numbered too,
by each rank for itself. The messages of one batch (`batch_isend_irecv`) have an entry each, and the
batch has one more. torch notes the end of the batch there, and of its messages nowhere.
"""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from minimegatron.core.json_text import parse_json
from minimegatron.doctor.records import (
    RECEIVING,
    SENDING,
    Collective,
    GroupUse,
    OpenCall,
    RankRecord,
    group_of,
    title_of,
)

NUM_ENTRIES = "2000"
"""How many calls torch shall remember, of all groups together."""

DEVICE = " on the GPU"
"""Added to a group's name where its numbers are those of what the GPU was given."""

SCHEMA = re.compile(r"2\.\d+")
"""The versions of torch's JSON that are understood: torch 2.13 writes 2.10."""
MAX_CALLS = 256
"""Calls of one rank that are looked at."""
NUM_RECENT = 8
"""Collectives remembered per group."""

MESSAGE = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")
"""A message's name: its direction, this rank and its peer, as places within the group."""
BATCH = "coalesced"
"""How the name of the entry ends that stands for a batch."""
DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
}
"""torch's own names of types, where they are not the public ones in capital letters."""
NAMES = {
    "all-gather": ("all-gather-base", "all-gather-into-tensor", "all-gather-single"),
    "reduce-scatter": ("reduce-scatter-base", "reduce-scatter-tensor", "reduce-scatter-single"),
    "all-to-all": ("all-to-all-single", "all-to-all-v-single", "ring-hop"),
    "barrier": ("all-reduce-barrier",),
}
"""A collective -> further names that it has in torch; and a ring's hop, which is one."""
EQUAL_SIZES = ("all-reduce", "broadcast", "all-gather", "reduce-scatter", "barrier")
"""Collectives whose inputs have the same size on all ranks."""


def turn_on_recorder(environment: MutableMapping[str, str]) -> None:
    """Lets torch remember, unless the user says otherwise. Before a process group is made.

    And lets it write a file after a time-out, for people: into the folder for temporary files.
    """
    place = os.path.join(tempfile.gettempdir(), f"minimegatron-nccl-{os.getuid()}-rank-")
    # A variable's older name, second here, counts for less than its new one.
    for value, *names in (
        (NUM_ENTRIES, "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        ("1", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
        (place, "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ):
        if not any(name in environment for name in names):
            environment[names[0]] = value


def with_device_calls(record: RankRecord, answer: bytes) -> RankRecord:
    """The record, with what the rank's GPU has not completed; unchanged if the answer is unclear."""
    try:
        calls, groups = _RecorderReader(record, parse_json(answer, "the flight recorder")).read()
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return record
    return replace(record, device_calls=calls, groups=record.groups + groups)


@dataclass(frozen=True)
class _Entry:
    """One call that torch remembers."""

    group: str
    group_id: int
    """Of no other group in this process, also of none that had the same name before."""
    title: str
    name: str
    """Such as "all-reduce", "recv 0<-1", "coalesced"."""
    is_message: bool
    collective: int
    """How many collectives the group had begun by then, with this one."""
    batch: tuple[str, bool, int]
    """The same for all entries of a batch, and for no other."""
    is_over: bool
    shape: tuple[int, ...] | None
    dtype: str | None


class _RecorderReader:
    """Turns one rank's JSON into calls and groups. Raises what it finds wrong, of several types."""

    def __init__(self, record: RankRecord, data: Any):
        if not SCHEMA.fullmatch(data["version"]):
            raise ValueError(f"version {data['version']} of the flight recorder is not known")
        self._record, self._config = record, data["pg_config"]
        # Without an entry, torch writes no list at all.
        entries = [_entry(one) for one in data.get("entries", [])]
        # torch remembers groups that were destroyed, and gives a new one the name of an old one.
        newest: dict[str, int] = {}
        for one in entries:
            newest[one.group] = max(one.group_id, newest.get(one.group, 0))
        self._entries = [one for one in entries if one.group_id == newest[one.group]]
        # A part of a batch is over when the batch is, whose own entry comes last.
        self._batches = {one.batch: one for one in self._entries if one.name.endswith(BATCH)}
        names = dict.fromkeys(one.group for one in self._entries)
        self._places = {name: place for place, name in enumerate(filter(self._ranks, names))}

    def read(self) -> tuple[tuple[OpenCall, ...], tuple[GroupUse, ...]]:
        """(what is not over, oldest first; the groups that torch has used)"""
        calls = tuple(_numbered(list(self._calls()), self._record))
        return calls[:MAX_CALLS], tuple(map(self._group, self._places))

    def _calls(self) -> Iterator[OpenCall]:
        seen = set()
        for entry in self._entries:
            batch = self._batches.get(entry.batch)
            if entry.group not in self._places or (entry if batch is None else batch).is_over:
                continue
            if entry.is_message:
                # Of a batch, its messages say more than its own entry.
                if entry is not batch or entry.batch not in seen:
                    yield self._message(entry)
            elif entry.batch not in seen:
                yield self._collective(entry)
            seen.add(entry.batch)

    def _message(self, entry: _Entry) -> OpenCall:
        found = MESSAGE.fullmatch(entry.name)
        ranks = self._ranks(entry.group)
        place = int(found[2]) if found else len(ranks)
        return OpenCall(
            entry.name.partition(" ")[0],
            doing=SENDING if found and found[1] == "send" else RECEIVING,
            peer=ranks[place] if place < len(ranks) else None,
            shape=entry.shape,
            dtype=entry.dtype,
            on_device=True,
        )

    def _collective(self, entry: _Entry) -> OpenCall:
        return OpenCall(
            entry.name,
            group=len(self._record.groups) + self._places[entry.group],
            number=entry.collective - 1,
            shape=None if entry.batch in self._batches else entry.shape,
            dtype=entry.dtype,
            on_device=True,
        )

    def _group(self, name: str) -> GroupUse:
        entries = [one for one in self._entries if one.group == name]
        # Of a batch of collectives, the first one stands for all.
        first = {one.batch: one for one in reversed(entries) if not one.is_message}
        recent = [
            Collective(
                one.collective - 1,
                one.name,
                one.shape if one.name in EQUAL_SIZES and one.batch not in self._batches else None,
                one.dtype,
            )
            for one in reversed(first.values())
        ]
        traced = group_of(self._record, name)
        return GroupUse(
            name + DEVICE,
            self._ranks(name),
            entries[0].title if traced is None else traced.title,
            max(one.collective for one in entries),
            tuple(recent[-NUM_RECENT:]),
        )

    def _ranks(self, name: str) -> tuple[int, ...]:
        """The global ranks of a group, in its order; empty if nobody knows them."""
        if name in self._config:
            return tuple(map(int, re.findall(r"\d+", self._config[name]["ranks"])))
        traced = group_of(self._record, name)
        return () if traced is None else traced.ranks


def _entry(data: Any) -> _Entry:
    """Raises TypeError, ValueError or LookupError if it is not as torch writes it."""
    group, description = map(_text, data["process_group"])
    name = _text(data["profiling_name"]).rpartition(":")[2]
    collective, message = _whole(data["collective_seq_id"]), _whole(data["p2p_seq_id"])
    is_message = data["is_p2p"] is True
    shape = [tuple(map(_whole, sizes)) for sizes in data["input_sizes"]]
    dtypes = [_text(dtype) for dtype in data["input_dtypes"]]
    return _Entry(
        group,
        _whole(data["pg_id"]),
        title_of(description),
        name if is_message or name == BATCH else plain_name(name),
        is_message,
        collective,
        (group, is_message, message if is_message else collective),
        # One that has timed out is retired too; torch ends the process then.
        _text(data["state"]) == "completed" or data["retired"] is True,
        shape[0] if len(shape) == 1 else None,
        DTYPES.get(dtypes[0], dtypes[0].lower()) if len(shape) == len(dtypes) == 1 else None,
    )


def plain_name(name: str) -> str:
    """A collective's name, whichever of torch's functions and kernels it was.

    >>> plain_name("_all_gather_base"), plain_name("torch.distributed.all_reduce")
    ('all-gather', 'all-reduce')
    """
    name = name.removeprefix("torch.distributed.").replace("_", "-").strip("-").lower()
    return next((plain for plain, others in NAMES.items() if name in others), name)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a whole number of 0 or more")
    return value


# -- What the rank's own record adds --


def _numbered(calls: list[OpenCall], record: RankRecord) -> Iterator[OpenCall]:
    """Messages with their numbers in the step, and whether the program has asked for them.

    The record counts the messages that the program has started with a peer; those that are not over
    are the last of them. Where messages of several payloads travel, nobody knows which these are.
    """
    kinds = Counter((call.doing, call.peer) for call in calls if call.doing is not None)
    for call in calls:
        counts = [
            one for one in record.messages if (one.doing, one.peer) == (call.doing, call.peer)
        ]
        number = sum(count.num_started for count in counts) - kinds[call.doing, call.peer]
        kinds[call.doing, call.peer] -= 1
        if call.doing is None or not counts or number < 0:
            yield call
            continue
        is_awaited = number < sum(count.num_awaited for count in counts)
        if len(counts) == 1:
            call = replace(call, payload=counts[0].payload or None, number=number)
        yield replace(call, is_awaited=is_awaited)


def traced_entry(record: RankRecord, call: OpenCall) -> Collective | None:
    """The traced call that gave the GPU this collective; None if that is not certain.

    torch counts from when the group was made, the record from when recording began. So both are
    counted from their ends, and all from this one on must have the same names and sizes.
    """
    group = record.groups[call.group]
    traced = group_of(record, group.name.removesuffix(DEVICE))
    if traced is None:
        return None
    shift = traced.num_started - group.num_started
    entries = {entry.number: entry for entry in traced.recent}
    for entry in group.recent:
        if entry.number >= call.number and not _agree(entry, entries.get(entry.number + shift)):
            return None
    is_recent = any(entry.number == call.number for entry in group.recent)
    return entries.get(call.number + shift) if is_recent else None


def _agree(entry: Collective, traced: Collective | None) -> bool:
    if traced is None or plain_name(traced.name) != entry.name:
        return False
    if entry.shape is None or traced.shape is None:
        return True
    return (prod(entry.shape), entry.dtype) == (prod(traced.shape), traced.dtype)
