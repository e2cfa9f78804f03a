"""Checks predicted orders: are they complete, do they run, are they 1F1B?"""

import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from types import ModuleType
from typing import Any, NamedTuple

from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.check import Case, Result, Wrong, wrong_order
from minimegatron.planner.plan import plan

REPLACES = (
    "minimegatron.core.pipeline_parallel.loops.one_f_one_b",
    "minimegatron.core.pipeline_parallel.schedule_table.get_num_warmup_microbatches",
    "minimegatron.core.pipeline_parallel.schedule_table.count_rank_microbatches",
)
BY_HAND = (3, 4)
FORWARD_TIME, BACKWARD_TIME = 1, 2


class Unit(NamedTuple):
    """A forward ("F") or backward ("B") of one microbatch."""

    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


def cases(seed: int) -> list[Case]:
    """By hand, then ordinary sizes, fewer microbatches than stages, one microbatch, one stage."""
    draw = random.Random(seed)
    sizes = [(4, 8), (4, 2), (draw.randint(2, 6), 1), (1, 3), (11, 13), (13, 11)]
    sizes += [(draw.randint(2, 8), draw.randint(2, 12)) for _ in range(3)]
    hand, rule = "part 1, by hand", "part 2, the rule"
    return [
        Case("three stages, four microbatches, by hand", part=hand, p=3, M=4, by_hand=True),
        *(
            Case(f"predict_order, p={p}, M={M}", part=rule, p=p, M=M, by_hand=False)
            for p, M in sizes
        ),
    ]


def run(student: ModuleType, case: Case) -> list[Any]:
    """All stages' orders together."""
    if case.by_hand:
        prediction = getattr(student, "PREDICTION", None)
        return [prediction.get(rank) if isinstance(prediction, dict) else None for rank in range(3)]
    return [_list(student.predict_order(case.p, rank, case.M)) for rank in range(case.p)]


def _list(order: Any) -> Any:
    if not isinstance(order, Iterator):
        return order
    raise Wrong(
        f"predict_order returned a {type(order).__name__}; a list is expected, as the stub says"
    )


def judge(case: Case, orders: list[Any]) -> Result:
    """Complete, possible, and 1F1B."""
    if case.by_hand:
        orders = [_by_hand(order, rank) for rank, order in enumerate(orders)]
    ranks = [_parse(order, rank, case) for rank, order in enumerate(orders)]
    for rank, units in enumerate(ranks):
        _check_complete(units, rank, case)
    makespan = _run_all(ranks, case)
    for rank, units in enumerate(ranks):
        _check_plan(ranks, units, rank, case, makespan)
    return Result(_achieved(ranks, makespan, case.M))


# -- What was written --


def _by_hand(text: Any, rank: int) -> list[str]:
    if not isinstance(text, str):
        raise Wrong(f"PREDICTION has no text for stage {rank}; it is a dict with 0, 1 and 2")
    if not text.strip():
        raise Wrong(
            f"PREDICTION[{rank}] is empty. Write down what stage {rank} of 3 does with four "
            "microbatches, eight actions, for example:\n    F0 B0 F1 B1 F2 B2 F3 B3\n"
            "(That one is right for one of the three stages. Which?)"
        )
    return text.split()


def _parse(order: Any, rank: int, case: Case) -> list[Unit]:
    what = f"stage {rank} of {case.p}, {num_of(case.M, 'microbatch', 'microbatches')}"
    if not isinstance(order, Sequence) or isinstance(order, str):
        given = "None (was `return` forgotten?)" if order is None else repr(order)
        raise Wrong(f'{what}: a list such as ["F0", "B0"] is expected, not {given}')
    units = []
    for word in order:
        match = re.fullmatch(r"([FB])(\d+)", str(word))
        if match is None:
            idle = " Leave out the units in which the stage is idle." if str(word) == "." else ""
            raise Wrong(
                f"{what}: {word!r} is not an action; write F or B and a number, as in F0, B12.{idle}"
            )
        units.append(Unit(match[1], int(match[2])))
    return units


def _check_complete(units: list[Unit], rank: int, case: Case) -> None:
    what, last = (
        f"stage {rank} of {case.p}, {num_of(case.M, 'microbatch', 'microbatches')}",
        case.M - 1,
    )
    for unit in units:
        if unit.microbatch > last:
            hint = ""
            if case.p - rank - 1 > case.M:
                hint = (
                    f"\n{case.p - rank - 1} stages follow, and there are "
                    f"{num_of(case.M, 'microbatch', 'microbatches')}. "
                    "How many forwards can the warm-up have, then?"
                )
            raise Wrong(f"{what}: {unit} does not exist; the last one is {unit.kind}{last}{hint}")
        if units.count(unit) > 1:
            raise Wrong(f"{what}: {unit} is there {units.count(unit)} times; each is done once")
    for microbatch in range(case.M):
        forward, backward = Unit("F", microbatch), Unit("B", microbatch)
        for unit in (forward, backward):
            if unit not in units:
                raise Wrong(f"{what}: {unit} is missing; every microbatch has one F and one B")
        if units.index(backward) < units.index(forward):
            raise Wrong(
                f"{what}: {backward} comes before {forward}\n"
                "A backward uses what its forward kept; the forward must come first."
            )


# -- Does it run? --


def _run_all(ranks: list[list[Unit]], case: Case) -> int:
    """Runs all stages together; the time they take. Raises Wrong if they wait for ever."""
    for rank in range(case.p - 1):
        _check_arrivals(ranks, rank)
    done: dict[tuple[int, Unit], int] = {}
    places, clocks = [0] * case.p, [0] * case.p
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, units in enumerate(ranks):
            while places[rank] < len(units):
                unit = units[places[rank]]
                needed = _needs(rank, unit, case.p)
                if needed is not None and needed not in done:
                    break
                start = max(clocks[rank], done.get(needed, 0))
                clocks[rank] = start + (FORWARD_TIME if unit.kind == "F" else BACKWARD_TIME)
                done[rank, unit] = clocks[rank]
                places[rank] += 1
                has_moved = True
    stuck = [rank for rank, units in enumerate(ranks) if places[rank] < len(units)]
    if stuck:
        raise Wrong(_stuck_words(ranks, places, stuck, case))
    return max(clocks)


def _needs(rank: int, unit: Unit, p: int) -> tuple[int, Unit] | None:
    """What must be done on another stage first."""
    if unit.kind == "F":
        return (rank - 1, unit) if rank > 0 else None
    return (rank + 1, unit) if rank < p - 1 else None


def _check_arrivals(ranks: list[list[Unit]], rank: int) -> None:
    """Between two stages everything arrives in the order in which it was sent."""
    links = (("F", rank, rank + 1, "activation"), ("B", rank + 1, rank, "gradient"))
    for kind, sender, receiver, payload in links:
        sent = [unit for unit in ranks[sender] if unit.kind == kind]
        used = [unit for unit in ranks[receiver] if unit.kind == kind]
        for number, (one, other) in enumerate(zip(sent, used, strict=True)):
            if one != other:
                raise Wrong(
                    f"stage {receiver} does {other} as its {kind} number {number}, but the "
                    f"{payload} number {number} that comes from stage {sender} is that of "
                    f"microbatch {one.microbatch}\nMessages arrive in the order in which they were "
                    "sent: the oldest microbatch in flight comes first."
                )


def _stuck_words(ranks: list[list[Unit]], places: list[int], stuck: list[int], case: Case) -> str:
    lines = [f"p={case.p}, M={case.M}: these orders hang, each stage waits for another:"]
    for rank in stuck:
        unit = ranks[rank][places[rank]]
        other, needed = _needs(rank, unit, case.p)
        before = " ".join(map(str, ranks[rank][: places[rank]])) or "nothing"
        lines.append(
            f"  stage {rank} has done {before}; {unit} waits for {needed} of stage {other}"
        )
    return "\n".join(lines)


# -- Is it 1F1B? --


def _planned(case: Case, rank: int) -> list[Unit]:
    work = plan("1f1b", case.p, case.M).work(rank)
    return [Unit(action.kind[0].upper(), action.microbatch) for action in work]


def _peak(units: list[Unit]) -> int:
    held = [sum(1 if u.kind == "F" else -1 for u in units[: i + 1]) for i in range(len(units))]
    return max(held)


def _check_plan(
    ranks: list[list[Unit]], units: list[Unit], rank: int, case: Case, makespan: int
) -> None:
    planned = _planned(case, rank)
    if units == planned:
        return
    mine, theirs = _peak(units), _peak(planned)
    best = _run_all([_planned(case, each) for each in range(case.p)], case)
    cost = []
    if mine > theirs:
        cost.append(
            f"stage {rank} holds {num_of(mine, 'microbatch', 'microbatches')} at once where 1F1B "
            f"holds {theirs}: it does "
            f"{mine - theirs} more forward{'s' * (mine - theirs > 1)} than it must before its first "
            "backward"
        )
    if mine < theirs:
        cost.append(
            f"stage {rank} has time for {theirs - mine} more forward{'s' * (theirs - mine > 1)} "
            "before its first gradient comes back, and waits instead"
        )
    if makespan > best:
        cost.append(
            f"the whole step takes {makespan} units of time where 1F1B takes {best} (a forward takes "
            f"{FORWARD_TIME}, a backward {BACKWARD_TIME})"
        )
    cost = cost or ["it takes neither longer nor more memory, but it is another schedule"]
    words = _up_to_difference if case.by_hand else _beside_plan
    text = words(planned, units, f"stage {rank} of {case.p}, M={case.M}")
    raise Wrong("\n".join([text, "Your order runs, but: " + "; ".join(cost) + "."]))


def _beside_plan(planned: list[Unit], units: list[Unit], stage: str) -> str:
    shown = str(wrong_order(list(map(str, planned)), list(map(str, units)), 0))
    return shown.replace("rank 0:", f"{stage}:", 1)


def _up_to_difference(planned: list[Unit], units: list[Unit], stage: str) -> str:
    """Where the order is wrong, and not what is right there: that is the exercise."""
    first = next(
        i for i, (mine, theirs) in enumerate(zip(units, planned, strict=True)) if mine != theirs
    )
    before = " ".join(map(str, units[:first])) or "nothing"
    return (
        f"{stage}: the order is not that of 1F1B from action {first} on: you wrote {units[first]}\n"
        f"  right so far: {before}"
    )


def _achieved(ranks: list[list[Unit]], makespan: int, M: int) -> dict[str, str]:
    busy = M * (FORWARD_TIME + BACKWARD_TIME)
    bubble = Fraction(makespan - busy, makespan)
    peaks = ", ".join(str(_peak(units)) for units in ranks)
    return {
        "bubble": f"{float(bubble):.1%} of the time ({bubble})",
        "microbatches held": f"{peaks} on stage 0, 1, ...",
    }
