"""What each rank does, and whom it waits for: one record read with those of the others beside it.

Torch-free. Megatron has no counterpart.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from minimegatron.doctor.device_waits import device_wait
from minimegatron.doctor.flight_recorder import traced_entry
from minimegatron.doctor.processes import FRAME
from minimegatron.doctor.records import (
    SENDING,
    STARTING,
    GroupUse,
    OpenCall,
    RankRecord,
    Unit,
    group_of,
    ranks_in_words,
)
from minimegatron.doctor.units import UNKNOWN, StepUnits, unit_in_words
from minimegatron.planner.actions import KINDS
from minimegatron.planner.links import KIND_OF_LINK

MESSAGE = "waits for a message"
COLLECTIVE = "waits in a collective"
HIDDEN = "waits in a call that nobody traced"
COMPUTING = "computes"
SLEEPING = "sleeps"
STOPPED = "is stopped"
OVER = "is over"
BUSY = "runs"
"""Outside of any communication; whether it computes or sleeps is not known."""

WAITING = (MESSAGE, COLLECTIVE)

LIBRARY = re.compile(r"site-packages|/lib/python3|<frozen")

TORCH_MESSAGES = ("send", "recv")
TORCH_COLLECTIVES = (
    "barrier",
    "monitored_barrier",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)
"""Functions of `torch.distributed` that wait for other ranks."""


@dataclass(frozen=True)
class Situation:
    """One rank's place in a hang."""

    rank: int
    kind: str
    text: str
    """What it does, without its number: "waits for the activation of microbatch 2 from rank 0"."""
    waits_for: tuple[int, ...] = ()
    call: OpenCall | None = None
    """The innermost open call; or what its GPU was given and waits in, then with `on_device`."""
    group: GroupUse | None = None
    microbatch: int | None = None
    """Of the message, or of the work that it is in."""
    chunk: int | None = None
    work: str | None = None
    """The words for the work that it is in: "forward", "backward", ..."""
    path: tuple[str, ...] = ()
    """Names of its open calls, outermost first."""


def situations(records: Mapping[int, RankRecord]) -> dict[int, Situation]:
    """Every rank's situation."""
    return {rank: _situation(record, records) for rank, record in records.items()}


def _situation(record: RankRecord, records: Mapping[int, RankRecord]) -> Situation:
    units = StepUnits(record)
    call = record.calls[-1] if record.calls else None
    common = {
        "rank": record.rank,
        "call": call,
        "path": tuple(map(_path_entry, record.calls)),
    }
    work, unit = _work_of(record, units)
    in_work = {"work": work, "microbatch": unit[0], "chunk": unit[1]}
    if record.is_over():
        return Situation(kind=OVER, text=_how_over(record), **common)
    if record.process == "stopped":
        return Situation(kind=STOPPED, text=_how_stopped(record, work, unit), **common, **in_work)
    if call is not None and call.doing is not None:
        unit = units.of_message(call)
        return Situation(
            kind=MESSAGE,
            text=_message_text(record, call, unit),
            waits_for=() if call.peer is None else (call.peer,),
            microbatch=unit[0],
            chunk=unit[1],
            **common,
        )
    if call is not None and call.group is not None:
        group = record.groups[call.group]
        absent = absent_from(group, call.number or 0, records)
        text = f"waits in {collective_text(call, group)}"
        if absent:
            text += f", for {ranks_in_words(absent)}"
        text += _inside(work, unit, record)
        return Situation(
            kind=COLLECTIVE, text=text, waits_for=absent, group=group, **common, **in_work
        )
    waits = device_wait(record, records)
    if waits is not None:
        return _device_situation(record, units, waits, common)
    hidden = None if record.process == "computing" else _hidden_wait(record.stack)
    if hidden:
        text = f"waits in {hidden}, for which rank is not known"
        return Situation(kind=HIDDEN, text=text + _inside(work, unit, record), **common, **in_work)
    kind = {"computing": COMPUTING, "sleeping": SLEEPING}.get(record.process or "", BUSY)
    return Situation(kind=kind, text=_busy_text(record, kind, work, unit), **common, **in_work)


def _device_situation(
    record: RankRecord,
    units: StepUnits,
    waits: tuple[OpenCall, tuple[int, ...]],
    common: Mapping[str, Any],
) -> Situation:
    """Of a rank whose program may stand anywhere, because its GPU waits."""
    call, others = waits
    common = {**common, "call": call, "waits_for": others}
    stands = _innermost(record.stack).removeprefix(", ")
    stands = f"; its program stands {stands}" if stands else ""
    if call.doing is not None:
        unit = units.of_message(call)
        text = f"does not move: its GPU {_message_text(record, call, unit)}{stands}"
        return Situation(kind=MESSAGE, text=text, microbatch=unit[0], chunk=unit[1], **common)
    group = record.groups[call.group]
    text = f"does not move: its GPU waits in {collective_text(call, group)}"
    text += f", for {ranks_in_words(others)}"
    # The program is elsewhere by now; in which work it gave this to the GPU, only its record tells.
    entry = traced_entry(record, call)
    if entry is None or entry.work is None:
        return Situation(kind=COLLECTIVE, text=text + stands, group=group, **common)
    work = KINDS[KIND_OF_LINK[entry.work]].words
    unit = units.of_work(entry.work, entry.work_number)
    text += _work_text(work, unit, entry.layer, record)
    return Situation(
        kind=COLLECTIVE,
        text=text + stands,
        group=group,
        work=work,
        microbatch=unit[0],
        chunk=unit[1],
        **common,
    )


def absent_from(group: GroupUse, number: int, records: Mapping[int, RankRecord]) -> tuple[int, ...]:
    """The members of `group` that have not entered its collective `number`."""
    absent = []
    for rank in group.ranks:
        theirs = group_of(records[rank], group.name) if rank in records else None
        if theirs is None or theirs.num_started <= number:
            absent.append(rank)
    return tuple(absent)


def _work_of(record: RankRecord, units: StepUnits) -> tuple[str | None, Unit]:
    """The words for the work that a rank is in, and its unit, if it is in some."""
    for call in reversed(record.calls):
        if call.name in KIND_OF_LINK:
            return KINDS[KIND_OF_LINK[call.name]].words, units.of_call(call)
    return None, UNKNOWN


# -- In words --


def message_in_words(record: RankRecord, call: OpenCall, unit: Unit) -> str:
    """ "the activation of microbatch 2", or as much of it as is known."""
    if call.payload is None:
        return "a message"
    words = unit_in_words(unit, record)
    what = f"shape of the {call.payload[:-6]}" if call.payload.endswith(" shape") else call.payload
    if words:
        return f"the {what} of {words}"
    return f"{call.payload} #{call.number}"


def _message_text(record: RankRecord, call: OpenCall, unit: Unit) -> str:
    message = message_in_words(record, call, unit)
    peer = "some rank" if call.peer is None else f"rank {call.peer}"
    if call.doing == SENDING:
        return f"sends {message} to {peer}, and waits until {peer} takes it"
    return f"waits for {message} from {peer}"


def collective_text(call: OpenCall, group: GroupUse) -> str:
    """ "all-reduce #17 (sum of [4, 8] float32) of the tensor group (ranks 0 and 1)"."""
    name = call.name
    if name == "collective-wait":
        entry = next((entry for entry in group.recent if entry.number == call.number), None)
        name = "a collective" if entry is None else entry.name
    return f"{name} #{call.number}{tensor_text(call)} of {group_text(group)}"


def tensor_text(call: OpenCall) -> str:
    """ " (sum of [4, 8] float32)", or as much of it as is known."""
    parts = [call.op] if call.op else []
    if call.shape is not None:
        parts.append(f"{list(call.shape)} {call.dtype}")
    return f" ({', '.join(parts)})" if parts else ""


def group_text(group: GroupUse) -> str:
    """ "the tensor group (ranks 0 and 1)"."""
    if group.title == "world":
        return f"the group of all {len(group.ranks)} ranks"
    title = f"the {group.title} group" if group.title else "a group"
    many = len(group.ranks) > 8
    ranks = f"{len(group.ranks)} ranks" if many else ranks_in_words(group.ranks)
    return f"{title} ({ranks})"


def _inside(work: str | None, unit: Unit, record: RankRecord) -> str:
    layer = next((call.layer for call in reversed(record.calls) if call.layer), None)
    return "" if work is None else _work_text(work, unit, layer, record)


def _work_text(work: str, unit: Unit, layer: int | None, record: RankRecord) -> str:
    """ ", in the forward of microbatch 2, layer 3", or as much of it as is known."""
    words = unit_in_words(unit, record)
    return (
        f", in the {work}"
        + (f" of {words}" if words else "")
        + (f", layer {layer}" if layer is not None else "")
    )


def _how_over(record: RankRecord) -> str:
    if record.process == "gone":
        return "has ended: its process is gone"
    how = "has returned" if record.state == "returned" else "has raised an exception"
    return f"{how}, {record.quiet():.1f} s ago"


def _how_stopped(record: RankRecord, work: str | None, unit: Unit) -> str:
    call = f" in {record.calls[-1].name}" if record.calls else ""
    return f"is stopped by a signal (process {record.pid}){call}{_inside(work, unit, record)}"


def _busy_text(record: RankRecord, kind: str, work: str | None, unit: Unit) -> str:
    if record.state == STARTING:
        return "has not begun yet"
    doing = {COMPUTING: "been computing", SLEEPING: "been asleep", BUSY: "been busy"}[kind]
    text = f"has {doing} for {record.quiet():.1f} s"
    if work is not None:
        text += _inside(work, unit, record)
    elif record.calls:
        text += f", in {record.calls[-1].name}"
    else:
        text += ", outside of any call that is traced"
    return text + _innermost(record.stack) + _unfinished(record)


def _unfinished(record: RankRecord) -> str:
    """What its GPU has not completed, although nobody is known to be missing."""
    if not record.device_calls:
        return ""
    call = record.device_calls[0]
    if call.group is not None:
        what = collective_text(call, record.groups[call.group])
    else:
        what = "a message" if call.peer is None else f"a message with rank {call.peer}"
    return f"; its GPU has not completed {what}"


def _innermost(stack: str) -> str:
    """Where a stack stands: ", at line 7 of b.py: x = next(data)"."""
    lines = stack.splitlines()
    frames = [(place, FRAME.search(line)) for place, line in enumerate(lines)]
    frames = [(place, frame) for place, frame in frames if frame is not None]
    if not frames:
        return ""
    # Rather a line of the reader's own than one of a library that it calls.
    own = [(place, frame) for place, frame in frames if not LIBRARY.search(frame[1])]
    place, frame = (own or frames)[0]
    following = lines[place + 1 : place + 2]
    source = f": {following[0].strip()}" if following and not FRAME.search(following[0]) else ""
    return f", at line {frame[2]} of {PurePath(frame[1]).name}{source}"


def _path_entry(call: OpenCall) -> str:
    details = []
    if call.microbatch is not None:
        details.append(
            f"microbatch {call.microbatch}" + (f", chunk {call.chunk}" if call.chunk else "")
        )
    if call.layer is not None:
        details.append(f"layer {call.layer}")
    if call.name == "forward-backward" and call.number is not None:
        details.append(f"step {call.number}")
    return f"{call.name} ({', '.join(details)})" if details else call.name


def _hidden_wait(stack: str) -> str | None:
    """The function of `torch.distributed` that a stack stands in, if it waits in one."""
    lines = stack.splitlines()
    source = lines[1].strip() if len(lines) > 1 and FRAME.search(lines[1]) is None else ""
    if source.endswith(".wait()") and "torch/distributed/" not in lines[0]:
        return f"the wait() of a handle{_innermost(stack)}"
    inside = None
    for line in lines:
        frame = FRAME.search(line)
        if frame is None:
            continue
        if not frame[1].endswith("torch/distributed/distributed_c10d.py"):
            break
        if frame[3] in (*TORCH_MESSAGES, *TORCH_COLLECTIVES):
            inside = f"torch.distributed.{frame[3]}"
    return inside
