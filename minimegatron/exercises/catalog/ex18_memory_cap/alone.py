"""Judges a schedule: legal, within the cap, short. No rank is started."""

import random
import traceback
from collections.abc import Iterator, Sequence
from itertools import product
from types import ModuleType
from typing import Any

from minimegatron.exercises.bench_schedule import shortened_1f1b, with_messages
from minimegatron.exercises.check import Case, Result, Wrong
from minimegatron.planner.actions import FORWARD, Action
from minimegatron.planner.check import Problem, check
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.render_text import render_text
from minimegatron.planner.report import percent
from minimegatron.planner.simulator import Simulation, simulate
from minimegatron.planner.stage import Stage

PER_MICROBATCH = 3
"""Time of a forward and a backward."""


def cases(seed: int) -> list[Case]:
    """Caps that 1F1B exceeds, in different places; one that it does not."""
    draw = random.Random(seed)
    sizes = [(8, (3, 3, 2, 1)), (8, (2, 2, 2, 1)), (8, (4, 2, 2, 1)), (5, (2, 2, 1)), (6, (1, 1))]
    sizes += [(2, (2, 2, 2, 1)), (8, (4, 3, 2, 1)), (6, (3, 3, 2, 1))]
    for _ in range(3 if seed else 0):
        p = draw.randint(2, 4)
        caps = tuple(draw.randint(1, max(1, p - rank)) for rank in range(p))
        sizes.append((draw.randint(1, 10), caps))
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

    def your_schedule(stage: Stage) -> Any:
        return student.schedule(stage, list(caps))

    try:
        return plan(your_schedule, len(caps), M)
    except ValueError as error:
        # What the planner refuses is for the student to read; their own mistakes need their lines.
        if traceback.extract_tb(error.__traceback__)[-1].filename == student.__file__:
            raise
        raise Wrong(str(error)) from error


# -- Judging --


def judged(step: Plan, M: int, caps: Sequence[int]) -> dict[str, str]:
    """What a plan achieves. Raises Wrong unless it works, keeps to the caps, and is short."""
    if (step.config.pp_size, step.config.num_microbatches) != (len(caps), M):
        raise Wrong(f"the plan is one of {step.config.pp_size} stages, {len(caps)} were asked for")
    problems = check(step)
    if problems:
        raise Wrong(_problem_words(problems))
    for rank, cap in enumerate(caps):
        _check_cap(step, rank, cap)
    simulation = simulate(step)
    limit, alone = _limit(M, caps), M * len(caps) * PER_MICROBATCH
    if simulation.makespan > limit:
        raise Wrong(_too_long(simulation, limit, caps[0]))
    board = [
        (_lower_bound(M, caps), 0, "bound"),
        (simulation.makespan, 1, "YOU"),
        (limit, 2, "limit"),
        (alone, 3, "one at a time"),
    ]
    return {
        "makespan": f"{simulation.makespan}",
        "leaderboard": " < ".join(f"{time} {who}" for time, _, who in sorted(board)),
        "bubble": percent(simulation.bubble_over_total),
        "in flight": _list([step.peak_in_flight(rank) for rank in range(len(caps))]),
    }


def _problem_words(problems: list[Problem]) -> str:
    stuck = [problem for problem in problems if problem.kind == "deadlock"]
    # Where work is missing or done twice, that is the cause and the deadlock follows from it.
    first = problems[0] if problems[0].kind in ("absent", "duplicate", "range", "order") else None
    shown = first or (stuck or problems)[0]
    lines = [f"the schedule cannot work: {shown}"]
    if shown.kind == "deadlock":
        lines.append(
            "A message waits until both ends are there. If a stage sends while its neighbour is in "
            "an exchange that waits for this very stage, both wait for ever: a stage that runs ahead "
            "needs a neighbour that takes what it makes."
        )
    return "\n".join(lines)


def _check_cap(step: Plan, rank: int, cap: int) -> None:
    held = 0
    for number, action in enumerate(step.work(rank)):
        held += 1 if action.kind == FORWARD else -1
        if held > cap:
            order = "".join(a.kind[0].upper() for a in step.work(rank))
            raise Wrong(
                f"rank {rank}: with the forward of microbatch {action.microbatch} it holds {held} "
                f"microbatches, but has room for {cap}\n"
                f"  its order: {order[: number + 1]}{order[number + 1 :].lower()}\n"
                f"It must do a backward before this forward. (1F1B holds p - r = "
                f"{step.config.pp_size - rank} here, GPipe all {step.config.num_microbatches}.)"
            )


def _too_long(simulation: Simulation, limit: int, cap: int) -> str:
    advice = (
        "A warm-up that is as long as that of the stage before, or longer, can do harm: see which "
        "stage waits for which, and let it hold less."
    )
    if simulation.plan.peak_in_flight(0) < cap:
        advice = (
            f"Stage 0 has room for {cap}: let it begin the next microbatch before the first one "
            "comes back."
        )
    return (
        f"the step takes {simulation.makespan}, and may take {limit}: so long does 1F1B take whose "
        "warm-up is shortened in the best way\n\n"
        f"{render_text(simulation, width=96)}\n"
        f"{advice}"
    )


def _limit(M: int, caps: Sequence[int]) -> int:
    """The shortest step of a 1F1B with other warm-ups."""
    p = len(caps)
    choices = [range(min(p - rank, caps[rank])) for rank in range(p)]
    return min(
        found for warmups in product(*choices) if (found := _makespan(warmups, M)) is not None
    )


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
