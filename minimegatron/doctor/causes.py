"""The causes a hang can have, each with how to tell it from the others.

Torch-free. Megatron has no counterpart.

Each finder returns a diagnosis, or None if the hang is not of its kind. They start from
`graph.ends`, the ranks that others wait for and that wait for nobody, and from `graph.circle`.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from minimegatron.core.orders.placement import LOOP
from minimegatron.doctor.findings import (
    CYCLE,
    LEFT,
    MISMATCH,
    MISSING,
    NOBODY,
    ORDER,
    STOPPED_RANK,
    STUCK,
    SWALLOWED,
    UNEQUAL,
    UNKNOWN,
    WRONG_PEER,
    Diagnosis,
)
from minimegatron.doctor.records import (
    SENDING,
    Collective,
    GroupUse,
    RankRecord,
    group_of,
    ranks_in_words,
)
from minimegatron.doctor.situation import (
    COLLECTIVE,
    HIDDEN,
    MESSAGE,
    OVER,
    STOPPED,
    WAITING,
    Situation,
    collective_text,
    group_text,
)
from minimegatron.doctor.units import StepUnits, placement_of, unit_in_words
from minimegatron.doctor.wait_graph import WaitGraph

MUST_AGREE = {
    "num_microbatches": "microbatches",
    "num_model_chunks": "chunks per stage",
    "microbatch_group_size_per_vp_stage": "microbatches per group",
    "forward_only": "forward_only",
    "schedule": "schedule",
    "wire": "wire",
}
"""What the steps of one pipeline's stages must have in common -> in words."""

UNEQUAL_SIZES = (
    "all-to-all",
    "torch.distributed.all_to_all",
    "torch.distributed.all_to_all_single",
)
"""Collectives to which each rank gives as much as it likes."""


# -- Faults that explain more than where the arrows end --


def find_mismatch(graph: WaitGraph) -> Diagnosis | None:
    """A collective that its ranks entered with different operations, sizes or types."""
    for record in graph.records.values():
        for group in record.groups:
            found = _differing(group, graph.records)
            if found is None or not _matters(found, group, graph):
                continue
            number = next(iter(found.values())).number
            versions: dict[tuple, list[int]] = {}
            for member, entry in found.items():
                versions.setdefault(_signature(entry), []).append(member)
            fewest = min(versions.values(), key=len)
            odd = fewest if len(fewest) * 2 < len(found) else sorted(found)
            sides = [
                f"{ranks_in_words(members)} with {_entry_text(found[members[0]])}"
                for members in versions.values()
            ]
            return graph.verdict(
                MISMATCH,
                f"Collective #{number} of {group_text(group)} was entered by {', by '.join(sides)}.",
                odd,
                details=tuple(_skipped(found, group, graph)),
            )
    return None


def _differing(group: GroupUse, records: Mapping[int, RankRecord]) -> dict[int, Collective] | None:
    """The first collective that the group's members entered in ways that do not fit together."""
    entered: dict[int, dict[int, Collective]] = {}
    for rank in group.ranks:
        theirs = group_of(records[rank], group.name) if rank in records else None
        for entry in () if theirs is None else theirs.recent:
            entered.setdefault(entry.number, {})[rank] = entry
    for number in sorted(entered):
        if len(set(map(_signature, entered[number].values()))) > 1:
            return entered[number]
    return None


def _signature(entry: Collective) -> tuple:
    """What must be the same on all ranks: operation, size if it must, type, kind of reduction."""
    is_of_one_size = entry.shape is not None and entry.name not in UNEQUAL_SIZES
    size = prod(entry.shape) if is_of_one_size else None
    return entry.name, size, entry.dtype, entry.op


def _matters(found: Mapping[int, Collective], group: GroupUse, graph: WaitGraph) -> bool:
    """Whether a rank is stuck in this collective or a later one, or has failed since."""
    for rank in found:
        record, seen = graph.records[rank], graph.situations[rank]
        in_it = seen.group is not None and seen.group.name == group.name
        in_it = in_it or any(
            call.group is not None and record.groups[call.group].name == group.name
            for call in record.device_calls or ()
        )
        if in_it or record.state == "raised" or record.caught is not None:
            return True
    return False


def _entry_text(entry: Collective) -> str:
    shape = "" if entry.shape is None else f" of {list(entry.shape)} {entry.dtype}"
    return f"{entry.name}{shape}" + (f" ({entry.op})" if entry.op else "")


def _skipped(found: Mapping[int, Collective], group: GroupUse, graph: WaitGraph) -> Iterable[str]:
    """Whether one rank's collective is the one that others enter next: then it left one out."""
    number = next(iter(found.values())).number
    for rank, entry in found.items():
        for other in found:
            theirs = group_of(graph.records[other], group.name)
            for later in theirs.recent:
                if later.number > number and _signature(later) == _signature(entry):
                    yield (
                        f"What rank {rank} entered as #{number} looks like #{later.number} of "
                        f"rank {other}: rank {rank} may have left one out."
                    )
                    return


def find_swallowed(graph: WaitGraph) -> Diagnosis | None:
    """A rank that others wait for left something out because of an exception."""
    for rank in [*graph.ends, *graph.circle]:
        record = graph.records.get(rank)
        if record is None or record.caught is None or record.state == "raised":
            continue
        waiting = [other for other in graph.waiting_for([rank]) if other != rank]
        if record.caught.num_steps < min(graph.records[r].num_steps for r in waiting):
            continue
        call = record.caught.call
        unit = unit_in_words(StepUnits(record).of_call(call), record)
        of = f" of {unit}" if unit else ""
        return graph.verdict(
            SWALLOWED,
            f"On rank {rank} an exception ended {call.name}{of}, somebody caught it, and the rank "
            f"went on without the rest: {record.caught.text}",
            [rank],
            details=(f"{_subject(waiting)} for what rank {rank} has left out.",),
        )
    return None


def find_unequal(graph: WaitGraph) -> Diagnosis | None:
    """Ranks that should run the same step, and do not."""
    for rank, others in sorted(graph.waits.items()):
        for other in others:
            mine, theirs = graph.records[rank], graph.records.get(other)
            if theirs is None or mine.step is None or theirs.step is None:
                continue
            if mine.num_steps != theirs.num_steps or not _must_agree(mine, theirs):
                continue
            for key, what in MUST_AGREE.items():
                if mine.step.get(key) != theirs.step.get(key):
                    return _unequal(graph, key, what, {*mine.pipeline, rank, other})
    return None


def _must_agree(mine: RankRecord, theirs: RankRecord) -> bool:
    """Whether two ranks work on the same samples; copies of the model may do as they like."""
    same_copy = mine.coordinates and mine.coordinates.get("dp") == theirs.coordinates.get("dp")
    return bool(same_copy) or mine.pipeline == theirs.pipeline


def _unequal(graph: WaitGraph, key: str, what: str, ranks: Iterable[int]) -> Diagnosis:
    values: dict[Any, list[int]] = {}
    for rank in sorted(ranks):
        if rank in graph.records and graph.records[rank].step is not None:
            values.setdefault(graph.records[rank].step.get(key), []).append(rank)
    fewest = min(values.values(), key=len)
    everyone = [rank for members in values.values() for rank in members]
    odd = fewest if len(fewest) * 2 < len(everyone) else sorted(everyone)
    said = "; ".join(f"{ranks_in_words(members)}: {value}" for value, members in values.items())
    return graph.verdict(
        UNEQUAL,
        f"Ranks that work on the same samples run different steps. Their {what}: {said}.",
        odd,
    )


def find_wrong_peer(graph: WaitGraph) -> Diagnosis | None:
    """A stage that exchanges messages with another than its neighbours."""
    for rank, record in graph.records.items():
        if rank not in record.pipeline or not graph.waits:
            continue
        for count in record.messages:
            if not count.payload:
                continue
            onwards = (count.doing == SENDING) == count.payload.startswith("activation")
            right = _neighbours(record, onwards)
            if count.peer in right:
                continue
            verb, preposition = ("sends", "to") if count.doing == SENDING else ("expects", "from")
            side = "next" if onwards else "previous"
            stage = f"{side} stage is" if len(right) == 1 else f"{side} stages are on"
            return graph.verdict(
                WRONG_PEER,
                f"Rank {rank} (stage {record.pipeline.index(rank)}) {verb} {count.payload}s "
                f"{preposition} rank {count.peer}, but its {stage} {ranks_in_words(right)}.",
                [rank],
                cycle=graph.circle,
            )
    return None


def _neighbours(record: RankRecord, onwards: bool) -> list[int]:
    """The ranks that hold a next (or previous) stage of one of this rank's chunks."""
    ranks = record.pipeline
    place, size = ranks.index(record.rank), len(ranks)
    # Without a plan, ranks are a ring: the last one's next is the first.
    placement = placement_of(record) or LOOP(size, 2)
    neighbour = placement.next_of if onwards else placement.previous_of
    found = [neighbour(place, chunk) for chunk in range(placement.num_model_chunks)]
    places = {one.rank for one in found if one is not None} - {place}
    return [ranks[one] for one in sorted(places or {(place + (1 if onwards else -1)) % size})]


# -- Where the arrows end --


def find_over_or_stopped(graph: WaitGraph) -> Diagnosis | None:
    """Ranks that others wait for, and that will not come."""
    for kind, found in ((STOPPED_RANK, STOPPED), (LEFT, OVER)):
        ranks = [r for r in graph.ends if r in graph.records and graph.situations[r].kind == found]
        if ranks:
            who = "; ".join(f"Rank {r} {graph.situations[r].text}" for r in ranks)
            waiting = _subject(graph.waiting_for(ranks))
            details = _first_difference(graph, ranks) if kind == LEFT else ()
            return graph.verdict(
                kind, f"{who}. {waiting} for {_them(ranks)}.", ranks, details=tuple(details)
            )
    return None


def _first_difference(graph: WaitGraph, ranks: Iterable[int]) -> Iterable[str]:
    """Where a rank that entered fewer collectives than the others did something else than they."""
    for rank in ranks:
        for group in graph.records[rank].groups:
            for entry in group.recent:
                theirs = {
                    other: later
                    for other in group.ranks
                    if other in graph.records and other != rank
                    for later in _recent(graph.records[other], group.name)
                    if later.number == entry.number
                }
                odd = [r for r, their in theirs.items() if _place(their) != _place(entry)]
                if odd:
                    yield (
                        f"It left one out before: as #{entry.number} of {group_text(group)} it "
                        f"entered {_entry_text(entry)}{_place_text(entry)}, rank {odd[0]} "
                        f"{_entry_text(theirs[odd[0]])}{_place_text(theirs[odd[0]])}."
                    )
                    return


def _recent(record: RankRecord, name: str) -> tuple[Collective, ...]:
    use = group_of(record, name)
    return () if use is None else use.recent


def _place(entry: Collective) -> tuple:
    return _signature(entry), entry.work, entry.work_number, entry.layer


def _place_text(entry: Collective) -> str:
    if entry.work is None:
        return ""
    work = entry.work.removesuffix("-compute")
    layer = "" if entry.layer is None else f", layer {entry.layer}"
    return f" in {work} #{entry.work_number}{layer}"


def find_circle(graph: WaitGraph) -> Diagnosis | None:
    """Ranks that wait for each other."""
    if not graph.circle:
        return None
    kinds = {graph.situations[rank].kind for rank in graph.circle}
    who = ranks_in_words(graph.circle)
    circle = f"R{who[1:]} wait for each other in a circle, so none of them can go on."
    if kinds == {MESSAGE}:
        return graph.verdict(CYCLE, circle, graph.circle, cycle=graph.circle)
    if kinds == {COLLECTIVE}:
        return _absent_one(graph) or _other_order(graph, circle)
    # One of them waits for a message, and the other has gone on to something else.
    gone_on = [
        (rank, graph.circle[(place + 1) % len(graph.circle)])
        for place, rank in enumerate(graph.circle)
        if graph.situations[rank].kind == MESSAGE
    ]
    if not gone_on:
        return None
    rank, partner = next(
        (pair for pair in gone_on if graph.situations[pair[1]].kind != MESSAGE), gone_on[0]
    )
    cause = (
        f"Rank {rank} {graph.situations[rank].text}. But rank {partner} has gone on without it, "
        f"and {graph.situations[partner].text}. {circle}"
    )
    return graph.verdict(MISSING, cause, [partner], cycle=graph.circle)


def _absent_one(graph: WaitGraph) -> Diagnosis | None:
    """A rank that alone is absent from a collective, while it waits in another for those in there."""
    for rank in graph.circle:
        seen = graph.situations[rank]
        if len(seen.waits_for) != 1 or len(seen.group.ranks) < 3:
            continue
        (absent,) = seen.waits_for
        there = [other for other in seen.group.ranks if other != absent]
        cause = (
            f"Rank {absent} is missing from {collective_text(seen.call, seen.group)}, where "
            f"{ranks_in_words(there)} are. It has gone on without it, and "
            f"{graph.situations[absent].text}. Either it has left a collective out, or it is in one "
            "that the others do not enter, or it enters them in another order."
        )
        details = tuple(_first_difference(graph, [absent]))
        return graph.verdict(MISSING, cause, [absent], cycle=graph.circle, details=details)
    return None


def _other_order(graph: WaitGraph, circle: str) -> Diagnosis:
    calls = [graph.situations[rank] for rank in graph.circle]
    entered = "; ".join(
        f"rank {seen.rank} is in {collective_text(seen.call, seen.group)}" for seen in calls
    )
    cause = f"The ranks entered their collectives in different orders: {entered}. {circle}"
    return graph.verdict(ORDER, cause, graph.circle, cycle=graph.circle)


def find_stuck(graph: WaitGraph) -> Diagnosis | None:
    """A rank that others wait for, and that is busy with something else."""
    ranks = [rank for rank in graph.ends if rank in graph.records]
    if not ranks:
        return None
    who = "; ".join(f"Rank {rank} {graph.situations[rank].text}" for rank in ranks)
    waiting = _subject(graph.waiting_for(ranks))
    hidden = all(graph.situations[rank].kind == HIDDEN for rank in ranks)
    kind = MISSING if hidden else STUCK
    return graph.verdict(kind, f"{who}. {waiting} for {_them(ranks)}.", ranks)


def find_rest(graph: WaitGraph) -> Diagnosis:
    """What is left: an unknown rank, a broken connection, or no hang at all."""
    unseen = sorted(graph.waited_for - graph.records.keys())
    if unseen:
        waiting = _subject(graph.waiting_for(unseen))
        return graph.verdict(
            MISSING, f"{waiting} for {ranks_in_words(unseen)}, of which nothing is known.", unseen
        )
    waiting = [rank for rank, seen in graph.situations.items() if seen.kind in (*WAITING, HIDDEN)]
    if waiting and all(_waits_for_unknown(graph.situations[rank]) for rank in waiting):
        cause = (
            f"{_subject(waiting)}, but for which rank is not known: the doctor cannot see the other "
            "side of such a call. Probably it is a message that nobody has sent, or nobody takes; or "
            "a collective that not all ranks of its group have entered."
        )
        return graph.verdict(UNKNOWN, cause, waiting)
    if waiting:
        cause = (
            f"{_subject(waiting)}, but everybody they wait for has come: either the connection "
            "between them is slow or broken, or calls are missing that the doctor cannot see."
        )
        return graph.verdict(UNKNOWN, cause, waiting)
    running = [rank for rank, seen in graph.situations.items() if seen.kind != OVER]
    cause = "No rank waits for another. This may be slow rather than stuck."
    return graph.verdict(NOBODY, cause, running)


def _waits_for_unknown(seen: Situation) -> bool:
    """Whether a rank waits, and its record does not say for which rank."""
    return seen.kind == HIDDEN or (seen.kind == MESSAGE and not seen.waits_for)


def _subject(ranks: list[int]) -> str:
    who = ranks_in_words(ranks)
    return f"R{who[1:]} {'waits' if len(ranks) == 1 else 'wait'}"


def _them(ranks: list[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


FINDERS = (
    find_mismatch,
    find_swallowed,
    find_unequal,
    find_wrong_peer,
    find_over_or_stopped,
    find_circle,
    find_stuck,
    find_rest,
)
"""Those that explain most come first; the last always finds something."""
