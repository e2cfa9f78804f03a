"""Judges a schedule: legal, within the cap, short. No rank is started."""

import random
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from types import ModuleType
from typing import Any

from minimegatron.exercises.bench.schedule_of_order import shortened_1f1b, with_messages
from minimegatron.exercises.check import Case, Result, Wrong
from minimegatron.planner.actions import BACKWARD, FORWARD, Action
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.plan_check import Problem, check
from minimegatron.planner.plan_report import percent
from minimegatron.planner.render_text import render_text
from minimegatron.planner.simulator import Simulation, simulate
from minimegatron.planner.stage import Stage

PER_MICROBATCH = 3
"""Time of a forward and a backward."""


def cases(seed: int) -> list[Case]:
    """Caps that 1F1B exceeds, in different places; some that it does not. The seed draws M."""
    draw = random.Random(seed)
    sizes = [(8, (3, 3, 2, 1)), (8, (2, 2, 2, 1)), (8, (4, 2, 2, 1)), (5, (2, 2, 1)), (6, (1, 1))]
    sizes += [(2, (2, 2, 2, 1)), (8, (4, 3, 2, 1)), (6, (3, 3, 2, 1)), (1, (2, 1))]
    sizes += [(5, (1, 3, 2, 1)), (6, (3, 1, 2, 1)), (4, (1, 1, 1)), (4, (3, 3, 3))]
    if seed:
        sizes = [(M if M < 3 else M + draw.randint(-1, 2), caps) for M, caps in sizes]
    return [
        Case(f"p={len(caps)}, M={M}, room for {_list(caps)}", part="plans", M=M, caps=list(caps))
        for M, caps in sizes
    ]


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """The plan of the student's schedule, as plain data."""
    return planned(student, case.M, case.caps).to_json()


def judge(case: Case, found: dict[str, Any]) -> Result:
    """A plan, judged."""
    return Result(judged(Plan.from_json(found), case.M, case.caps))


def planned(student: ModuleType, M: int, caps: Sequence[int]) -> Plan:
    """All stages' actions, as the student's schedule yields them."""

    def your_schedule(stage: Stage) -> list[Action]:
        return _actions(student.schedule(stage, list(caps)))

    try:
        return plan(your_schedule, len(caps), M)
    except ValueError as error:
        # What the planner refuses is for the student to read; their own mistakes need their lines.
        if traceback.extract_tb(error.__traceback__)[-1].filename == student.__file__:
            raise
        raise Wrong(str(error)) from error


def _actions(found: Any) -> list[Action]:
    """What the student's schedule yielded. Raises Wrong for what is not an action."""
    right = "yield from with_messages(stage, order)"
    if not isinstance(found, Iterable) or isinstance(found, str):
        raise Wrong(f"schedule returned {found!r}; it must yield actions: {right}")
    actions = list(found)
    for action in actions:
        if isinstance(action, Iterator):
            raise Wrong(f"schedule yielded a generator; write `from` too: {right}")
        if not isinstance(action, Action):
            raise Wrong(
                f"schedule yielded {action!r}; yield what the stage's methods return, such as "
                f"stage.forward(0), or write: {right}"
            )
    return actions


# -- Judging --


def judged(step: Plan, M: int, caps: Sequence[int]) -> dict[str, str]:
    """What a plan achieves. Raises Wrong unless it works, keeps to the caps, and is short."""
    if (step.config.pp_size, step.config.num_microbatches) != (len(caps), M):
        raise Wrong(f"the plan is one of {step.config.pp_size} stages, {len(caps)} were asked for")
    problems = check(step)
    if problems:
        raise Wrong(_problem_words(step, problems[0]))
    for rank, cap in enumerate(caps):
        _check_cap(step, rank, cap)
    simulation = simulate(step)
    limit, alone = _limit(M, caps), M * len(caps) * PER_MICROBATCH
    if simulation.makespan > limit:
        raise Wrong(_too_long(simulation, limit, caps))
    board = {
        "bound": _lower_bound(M, caps),
        "YOU": simulation.makespan,
        "limit": limit,
        "one at a time": alone,
    }
    return {
        "makespan": f"{simulation.makespan}",
        "leaderboard": _board_words(board),
        "bubble": percent(simulation.bubble_over_total),
        "in flight": _list([step.peak_in_flight(rank) for rank in range(len(caps))]),
    }


def _board_words(board: dict[str, int]) -> str:
    """The shortest first.

    >>> _board_words({"bound": 36, "YOU": 42, "limit": 42})
    '36 bound < 42 YOU = 42 limit'
    """
    (who, time), *others = sorted(board.items(), key=lambda item: item[1])
    words = f"{time} {who}"
    for who, after in others:
        words += f" {'=' if after == time else '<'} {after} {who}"
        time = after
    return words


def _problem_words(step: Plan, first: Problem) -> str:
    """The first problem: work or a message that is missing is the cause of a deadlock after it."""
    text = first.text.replace(", chunk 0", "")
    if first.kind != "deadlock":
        return f"the schedule cannot work: rank {first.rank}, microbatch {first.microbatch}: {text}"
    if (found := _circle(step)) is None:
        return (
            f"the schedule cannot work: deadlock: {text}\n"
            "The orders of forwards and backwards fit each other, but the messages do not: a message "
            "waits until both ends are there. Let one of these ranks take what the other sends, in "
            "the same exchange."
        )
    rank, i, j = found
    lines = [
        f"the schedule cannot work: deadlock: rank {rank} does B{i} before F{j}, and rank {rank + 1} "
        f"does F{j} before B{i}",
        f"  rank {rank}: {_letters(step, rank)}",
        f"  rank {rank + 1}: {_letters(step, rank + 1)}",
        f"rank {rank} needs rank {rank + 1}'s B{i} for its own, and rank {rank + 1} needs rank "
        f"{rank}'s F{j} for its own: each waits for the other, however the messages are sent. "
        "Change one of the two orders.",
    ]
    return "\n".join(lines)


def _circle(step: Plan) -> tuple[int, int, int] | None:
    """(r, i, j) where rank r does B i before F j, and rank r + 1 the other way round.

    Where work waits for work in a circle, two neighbours always have such a pair.
    """
    places = [
        {(action.kind, action.microbatch): n for n, action in enumerate(step.work(rank))}
        for rank in range(len(step.ranks))
    ]
    for rank, (here, there) in enumerate(pairwise(places)):
        for i, j in product(range(step.config.num_microbatches), repeat=2):
            b, f = (BACKWARD, i), (FORWARD, j)
            if here[b] < here[f] and there[f] < there[b]:
                return rank, i, j
    return None


def _letters(step: Plan, rank: int) -> str:
    return "".join(action.kind[0].upper() for action in step.work(rank))


def _check_cap(step: Plan, rank: int, cap: int) -> None:
    held = 0
    for number, action in enumerate(step.work(rank)):
        held += 1 if action.kind == FORWARD else -1
        if held > cap:
            raise Wrong(
                f"rank {rank}: with the forward of microbatch {action.microbatch} it holds {held} "
                f"microbatches, but has room for {cap}\n"
                f"  its order: {_letters(step, rank)}\n"
                f"             {' ' * number}^ this forward\n"
                f"It must do a backward before this forward. (1F1B holds p - r = "
                f"{step.config.pp_size - rank} here, GPipe all {step.config.num_microbatches}.)"
            )


def _too_long(simulation: Simulation, limit: int, caps: Sequence[int]) -> str:
    return (
        f"the step takes {simulation.makespan}, and may take {limit}: so long does 1F1B take whose "
        "warm-up is shortened in the best way\n\n"
        f"{render_text(simulation, width=96)}\n"
        f"{_advice(simulation, caps)}"
    )


def _advice(simulation: Simulation, caps: Sequence[int]) -> str:
    """What makes the step shorter: tried with the planner where the order is 1F1B's."""
    step, M = simulation.plan, simulation.plan.config.num_microbatches
    orders = [_letters(step, rank) for rank in range(len(caps))]
    mine = tuple(order.index("B") - 1 for order in orders)
    if orders != [shortened_1f1b(mine, rank, M) for rank in range(len(caps))]:
        held = step.peak_in_flight(0)
        room = (
            f"Stage 0 holds {held} at most, and has room for {caps[0]}. " if held < caps[0] else ""
        )
        return (
            f"{room}Look at the longest waits: which work does each wait for, and could the stage "
            "that does it do it earlier?"
        )
    times = {one: time for one in _warmups(caps) if (time := _makespan(one, M)) is not None}
    steps = {one: sum(abs(a - b) for a, b in zip(one, mine, strict=True)) for one in times}
    shorter = [one for one in times if steps[one] == 1 and times[one] < simulation.makespan]
    # One change that helps; else all that lead to the best.
    best = min(shorter or times, key=lambda one: (times[one], steps[one]))
    changes = {"longer": [], "shorter": []}
    for stage, (a, b) in enumerate(zip(best, mine, strict=True)):
        if a != b:
            changes["longer" if a > b else "shorter"].append(str(stage))
    words = [
        f"a {how} warm-up on stage{'s' * (len(on) > 1)} {' and '.join(on)}"
        for how, on in changes.items()
        if on
    ]
    return (
        f"This is 1F1B with warm-ups of {_list(mine)} forwards. With {' and '.join(words)} the step "
        "gets shorter."
    )


def _limit(M: int, caps: Sequence[int]) -> int:
    """The shortest step of a 1F1B with other warm-ups."""
    return min(time for one in _warmups(caps) if (time := _makespan(one, M)) is not None)


def _warmups(caps: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Warm-ups of all stages, as long as caps allow and 1F1B uses."""
    p = len(caps)
    return product(*(range(min(p - rank, caps[rank])) for rank in range(p)))


def _makespan(warmups: tuple[int, ...], M: int) -> int | None:
    def shortened(stage: Stage) -> Iterator[Action]:
        return with_messages(stage, shortened_1f1b(warmups, stage.pp_rank, M))

    try:
        return simulate(plan(shortened, len(warmups), M)).makespan
    except ValueError:  # it never finishes
        return None


def _lower_bound(M: int, caps: Sequence[int]) -> int:
    """Each microbatch stays (p - r)(f + b) on stage r, in one of its places, at the least."""
    p = len(caps)
    return max(
        (M + p - 1) * PER_MICROBATCH,
        *((rank + -(-M // cap) * (p - rank)) * PER_MICROBATCH for rank, cap in enumerate(caps)),
    )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
