"""Who waits for whom, as arrows, and where the arrows end.

Torch-free. Megatron has no counterpart.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from minimegatron.doctor.advice import ADVICE
from minimegatron.doctor.device_waits import has_other_side
from minimegatron.doctor.findings import Diagnosis, Missing
from minimegatron.doctor.records import (
    RECEIVING,
    SENDING,
    MessageCount,
    RankRecord,
    group_of,
)
from minimegatron.doctor.situation import COLLECTIVE, MESSAGE, WAITING, situations


class WaitGraph:
    """The records, who waits for whom, and where the arrows end."""

    def __init__(self, records: Mapping[int, RankRecord]):
        self.records = records
        self.situations = situations(records)
        self.waits = {
            rank: tuple(other for other in seen.waits_for if other != rank)
            for rank, seen in self.situations.items()
            if seen.kind in WAITING
        }
        if not any(self.waits.values()):
            self.waits = _behind(records)
        self.waited_for = {other for others in self.waits.values() for other in others}
        self.ends = sorted(rank for rank in self.waited_for if not self.waits.get(rank))
        self.circle = _circle(self.waits)

    def verdict(self, kind: str, cause: str, ranks: Iterable[int], **more: Any) -> Diagnosis:
        """The diagnosis, with what does not depend on its kind filled in."""
        quiet = [record.quiet() for record in self.records.values() if not record.is_over()]
        return Diagnosis(
            kind=kind,
            cause=cause,
            advice=ADVICE[kind],
            ranks=tuple(ranks),
            missing=self._missing(),
            situations=self.situations,
            stacks={rank: record.stack for rank, record in self.records.items() if record.stack},
            quiet=min(quiet, default=0.0),
            **more,
        )

    def waiting_for(self, ranks: Iterable[int]) -> list[int]:
        """Who waits, directly or not, for any of `ranks`."""
        found, wanted = set(), set(ranks)
        while True:
            more = {r for r, others in self.waits.items() if wanted.intersection(others)} - found
            if not more:
                return sorted(found)
            found |= more
            wanted |= more

    def _missing(self) -> tuple[Missing, ...]:
        return tuple(
            Missing(other, rank, self._lack(rank, other))
            for rank, others in sorted(self.waits.items())
            for other in others
        )

    def _lack(self, rank: int, other: int) -> str:
        """What `other` has not done, for `rank` to go on."""
        seen, theirs = self.situations[rank], self.records.get(other)
        if theirs is None:
            return f"nothing is known of rank {other}"
        if seen.call is not None and seen.call.on_device:
            return self._device_lack(rank, theirs)
        if seen.kind == COLLECTIVE:
            use = group_of(theirs, seen.group.name)
            count = 0 if use is None else use.num_started
            return f"has entered {count} collectives of this group, not yet #{seen.call.number}"
        if seen.kind != MESSAGE:
            return "is behind"
        doing = RECEIVING if seen.call.doing == SENDING else SENDING
        payload = seen.call.payload
        count = _count(self.records[rank], seen.call.doing, payload, other)
        # The call that starts a message may block already, before it is awaited.
        mine = count.num_started if seen.call.name == "p2p-start" else count.num_awaited
        done = _count(theirs, doing, payload, rank).num_started
        what = (payload or "message") + ("" if done == 1 else "s")
        if done >= mine:
            return "has begun its side of this message too"
        if doing == RECEIVING:
            return f"has asked for {done} {what} from rank {rank} so far, not for this one"
        return f"has sent {done} {what} to rank {rank} so far, not this one"

    def _device_lack(self, rank: int, theirs: RankRecord) -> str:
        """The same, for the GPU of `rank` to go on."""
        seen = self.situations[rank]
        if theirs.device_calls is None:
            return "does not say what its GPU was given"
        if seen.kind == MESSAGE:
            if has_other_side(seen.call, rank, theirs):
                return "has given its GPU the other side of this message, behind something else"
            return "has not given its GPU the other side of this message"
        use = group_of(theirs, seen.group.name)
        if use is None:
            return f"has given its GPU no collective of this group, so not #{seen.call.number}"
        if use.num_started > seen.call.number:
            return f"has given its GPU #{seen.call.number} of this group too, behind something else"
        return (
            f"has given its GPU {use.num_started} collectives of this group, "
            f"not yet #{seen.call.number}"
        )


def _count(record: RankRecord, doing: str, payload: str | None, peer: int) -> MessageCount:
    for count in record.messages:
        if (count.doing, count.payload, count.peer) == (doing, payload or "", peer):
            return count
    return MessageCount(doing, payload or "", peer)


def _circle(waits: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Some ranks that wait for each other in a ring; empty if there are none."""
    done: set[int] = set()
    for start in sorted(waits):
        path, trail = [start], [iter(waits[start])]
        while path:
            other = next(trail[-1], None)
            if other is None:
                done.add(path.pop())
                trail.pop()
            elif other in path:
                ring = path[path.index(other) :]
                first = ring.index(min(ring))
                return tuple(ring[first:] + ring[:first])
            elif other not in done:
                path.append(other)
                trail.append(iter(waits.get(other, ())))
    return ()


def _behind(records: Mapping[int, RankRecord]) -> dict[int, tuple[int, ...]]:
    """Where no program waits, whose device may: on NCCL a call returns before it is done.

    A rank that has begun a message or collective waits for those that have not begun their side.
    """
    waits: dict[int, tuple[int, ...]] = {}
    for rank, record in records.items():
        others = set()
        for group in record.groups:
            for other in group.ranks:
                theirs = group_of(records[other], group.name) if other in records else group
                if (0 if theirs is None else theirs.num_started) < group.num_started:
                    others.add(other)
        for count in record.messages:
            theirs = records.get(count.peer)
            if theirs is None or theirs.num_steps != record.num_steps:
                continue
            doing = RECEIVING if count.doing == SENDING else SENDING
            if _count(theirs, doing, count.payload, rank).num_started < count.num_started:
                others.add(count.peer)
        if others:
            waits[rank] = tuple(sorted(others))
    return waits
