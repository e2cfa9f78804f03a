"""Which ranks a rank's GPU waits for. It follows from the calls that each rank's GPU was given.

Torch-free. Megatron has no counterpart.

A GPU may have been given several calls that are not over. A message that the program has not asked for
yet stops nobody. Of the others, the oldest one whose other side is missing is what the GPU waits for.

>>> records = {0: RankRecord(0, 2, device_calls=(OpenCall("recv", doing="receiving", peer=1),))}
>>> call, others = device_wait(records[0], records | {1: RankRecord(1, 2, device_calls=())})
>>> call.name, others
('recv', (1,))
"""

from collections.abc import Mapping, Sequence

from minimegatron.doctor.records import RECEIVING, SENDING, OpenCall, RankRecord, group_of


def device_wait(
    record: RankRecord, records: Mapping[int, RankRecord]
) -> tuple[OpenCall, tuple[int, ...]] | None:
    """(the call, the ranks it waits for); None where nobody is known to be missing.

    Then the GPU may only be slow: what it computes before a call is not over either.
    """
    for call in _awaited(record):
        others = _missing(call, record, records)
        if others:
            return call, others
    return None


def has_other_side(call: OpenCall, rank: int, peer: RankRecord) -> bool:
    """Whether the peer's GPU was given the other side of this message of `rank`."""
    return any(_is_other_side(theirs, call, rank) for theirs in peer.device_calls or ())


def _awaited(record: RankRecord) -> Sequence[OpenCall]:
    calls = record.device_calls or ()
    return [call for call in calls if call.is_awaited] or calls


def _missing(
    call: OpenCall, record: RankRecord, records: Mapping[int, RankRecord]
) -> tuple[int, ...]:
    if call.doing is not None:
        return _missing_peer(call, record, records)
    group = record.groups[call.group]
    absent, silent, behind = [], [], []
    for rank in group.ranks:
        theirs = records.get(rank)
        if theirs is None or theirs.device_calls is None:
            silent.append(rank)
            continue
        use = group_of(theirs, group.name)
        if use is None or use.num_started <= call.number:
            absent.append(rank)
        elif rank != record.rank and _is_behind(theirs, group.name, call.number):
            behind.append(rank)
    # Ranks that are certainly missing say more than those that do not answer.
    return tuple(absent or silent or behind)


def _is_behind(record: RankRecord, group: str, number: int) -> bool:
    """Whether a rank's GPU was given this collective, and has something older to complete."""
    return any(
        call.group is not None and (record.groups[call.group].name, call.number) == (group, number)
        for call in _awaited(record)[1:]
    )


def _missing_peer(
    call: OpenCall, record: RankRecord, records: Mapping[int, RankRecord]
) -> tuple[int, ...]:
    if call.peer is None:
        return ()
    theirs = _awaited(records[call.peer]) if call.peer in records else ()
    # Where both GPUs are at this message, neither waits for the other's program.
    is_there = bool(theirs) and _is_other_side(theirs[0], call, record.rank)
    return () if is_there else (call.peer,)


def _is_other_side(theirs: OpenCall, call: OpenCall, rank: int) -> bool:
    doing = RECEIVING if call.doing == SENDING else SENDING
    return theirs.doing == doing and theirs.peer == rank
