"""Checks the interleaved schedule's table and counts: alone, and in plans."""

import contextlib
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from minimegatron.core.pipeline_parallel import schedule_table
from minimegatron.core.pipeline_parallel.schedule_table import RankMicrobatches
from minimegatron.exercises.check import (
    Case,
    Result,
    Wrong,
    check_value,
    installed,
    wrong_value,
)
from minimegatron.planner.check import check
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.report import percent
from minimegatron.planner.simulator import Costs, simulate

TABLE = "minimegatron.core.pipeline_parallel.schedule_table."
NAMES = ("get_schedule_table", "count_rank_microbatches")
REPLACES = tuple(TABLE + name for name in NAMES)
OURS = {name: getattr(schedule_table, name) for name in NAMES}
"""In a dict, where `installed` does not replace them."""
TABLES, PLANS, OTHERS = "the table", "the counts, in plans", "other steps"
OTHER_CALLS = [
    ((4, 1, 8, 2, 4), {"forward_only": True}, "forward_only"),
    ((1, 0, 8, 2, 4), {}, "one stage"),
    ((4, 0, 8, 1, 4), {"is_interleaved": False}, "plain"),
    ((4, 0, 2, 1, 4), {"is_interleaved": False}, "plain"),
]


def cases(seed: int) -> list[Case]:
    """Tables, counts, plans."""
    draw = random.Random(seed)
    tables = [(5, 2, 3), (8, 2, 4), (4, 3, 4), (7, 2, 4), (6, 1, 2)]
    tables += [(draw.randint(2, 12), draw.randint(1, 4), draw.randint(2, 6)) for _ in range(4)]
    plans = [(4, 8, 2, 4), (2, 4, 2, 2), (3, 7, 3, 4), (4, 4, 2, 4)]
    for _ in range(2):
        p = draw.randint(2, 5)
        G = draw.randint(p, p + 2)
        plans.append((p, draw.choice([1, 2, 3]) * G, draw.randint(2, 3), G))
    found = [Case("tables of some sizes", part=TABLES, tables=tables)]
    found += [
        Case(f"a plan: p={p}, M={M}, v={v}, G={G}", part=PLANS, plan=(p, M, v, G))
        for p, M, v, G in plans
    ]
    return [*found, Case("forward-only, 1 stage, plain 1F1B", part=OTHERS)]


def run(student: ModuleType, case: Case) -> list[Any]:
    """What the student's functions return."""
    if case.part == TABLES:
        return [student.get_schedule_table(*sizes) for sizes in case.tables]
    if case.part == PLANS:
        p, M, v, G = case.plan
        counts = [student.count_rank_microbatches(p, r, M, v, G) for r in range(p)]
        return [[_plain(one) for one in counts], student.get_schedule_table(M, v, G)]
    return [
        _plain(student.count_rank_microbatches(*arguments, **options))
        for arguments, options, _ in OTHER_CALLS
    ]


def _plain(counts: Any) -> Any:
    """`RankMicrobatches` travels as a list, anything else as it is."""
    return list(counts) if isinstance(counts, RankMicrobatches) else counts


def judge(case: Case, found: list[Any]) -> Result:
    """What the case asks for."""
    if case.part == TABLES:
        return _judge_tables(case, found)
    if case.part == PLANS:
        return _judge_plan(*case.plan, *found)
    return _judge_others(found)


# -- The table --


def _judge_tables(case: Case, tables: list[Any]) -> Result:
    for (M, v, G), found in zip(case.tables, tables, strict=True):
        expected = OURS["get_schedule_table"](M, v, G)
        what = f"get_schedule_table({M}, {v}, {G}), {M} microbatches, {v} chunks, groups of {G},"
        check_value(what, found, expected, _why_table(found, M, v, G))
    return Result({"tables": len(case.tables)})


def _why_table(found: Any, M: int, v: int, G: int) -> str:
    rows = found if isinstance(found, list) else []
    beyond = [row for row in rows if isinstance(row, tuple) and row and row[0] >= M]
    if beyond:
        return (
            f"There is no microbatch {beyond[0][0]}: the last group has {M % G or G} microbatches."
        )
    if rows == [(chunk, microbatch) for microbatch, chunk in OURS["get_schedule_table"](M, v, G)]:
        return "Rows are (microbatch, chunk), in this order."
    if rows == [(m, c) for m in range(M) for c in range(v)]:
        return (
            "Here each microbatch visits all chunks before the next one starts: the stage would "
            "wait for it to come round the ring each time. A whole group goes first."
        )
    if rows == [(m, c) for c in range(v) for m in range(M)]:
        return (
            "Here all microbatches visit chunk 0 before any visits chunk 1, as if there were one "
            f"group: with M={M} in flight the memory of all is needed. Groups have {G} microbatches."
        )
    if len(rows) < M * v:
        return f"Each of {M} microbatches visits each of {v} chunks: {M * v} rows are needed."
    return "Groups are outermost, then chunks, then the microbatches of the group."


# -- Plans --


def _judge_plan(p: int, M: int, v: int, G: int, found: list[Any], table: Any) -> Result:
    right = [OURS["count_rank_microbatches"](p, r, M, v, G) for r in range(p)]
    for r, (mine, wanted) in enumerate(zip(found, right, strict=True)):
        if not isinstance(mine, list) or not all(isinstance(one, int) for one in mine):
            raise wrong_value(f"stage {r}: what count_rank_microbatches returns", mine, wanted)
        if mine[0] != M * v or mine[2] > M * v or mine[2] + mine[3] != M * v:
            raise Wrong(
                f"stage {r}: RankMicrobatches is {tuple(mine)}, but total must be M * v = {M * v}, "
                "num_warmup at most that, and num_remaining what is left of it"
            )
        if bool(mine[1]) != (mine[2] == M * v):
            check_value(f"stage {r}: RankMicrobatches", tuple(mine), tuple(wanted))
    warmups = f"your warm-up on stages 0 to {p - 1} is {[counts[2] for counts in found]}"
    with _theirs(found, table):
        step = plan("interleaved", p, M, vpp=v, group_size=G)
        problems = check(step)
    stuck = [problem for problem in problems if problem.kind == "deadlock"]
    if problems:
        raise Wrong(_stuck_words((stuck or problems)[0], warmups, p, v, G, found))
    for r, (mine, wanted) in enumerate(zip(found, right, strict=True)):
        if tuple(mine) != tuple(wanted):
            raise Wrong(
                f"stage {r} warms up with {mine[2]} forwards, {wanted[2]} are enough; {warmups}\n"
                f"The step works, but at its peak the stage holds {step.peak_in_flight(r)} "
                f"microbatches' activations instead of {min(M * v, wanted[2] + 1)}."
            )
    return Result(figures(step))


@contextlib.contextmanager
def _theirs(counts: list[list[int]], table: Any) -> Iterator[None]:
    """What the student's functions have returned stands where ours would be called."""

    def count(p: int, r: int, *_: Any, **__: Any) -> RankMicrobatches:
        return RankMicrobatches(*counts[r])

    with contextlib.ExitStack() as stack:
        stack.enter_context(installed(lambda *_: table, TABLE + "get_schedule_table"))
        stack.enter_context(installed(count, TABLE + "count_rank_microbatches"))
        yield


def _stuck_words(problem: Any, warmups: str, p: int, v: int, G: int, found: list) -> str:
    lines = [
        f"planned with your functions, the step cannot work: {warmups}",
        f"  {problem}",
    ]
    falls = {a[2] - b[2] for a, b in zip(found, found[1:], strict=False)}
    if falls == {1} and found[-1][2] == (v - 1) * G:
        lines.append(
            "The warm-up falls by one from stage to stage, as in plain 1F1B. But here a stage does a "
            "forward and a backward before each exchange. Per link, one exchange takes the "
            "activation down and another brings the gradient up: that makes two."
        )
    elif found[-1][2] != min((v - 1) * G, found[-1][0]):
        lines.append(
            f"The last stage's first backward belongs to its last chunk: the first group of {G} must "
            f"be through its {v - 1} earlier chunk{'s' * (v > 2)} by then."
        )
    else:
        lines.append(f"Count, for each of the {p - 1} links, the exchanges on the way down and up.")
    return "\n".join(lines)


def figures(step: Plan) -> dict[str, str]:
    """Bubble and microbatches held, of a plan."""
    config = step.config
    simulation = simulate(step, Costs.of_stages(1, 2, config.num_model_chunks))
    peaks = [step.peak_in_flight(rank) for rank in range(config.pp_size)]
    bubble = simulation.bubble_over_total
    return {
        "bubble": f"{percent(bubble)} = {bubble}",
        "in flight": ", ".join(map(str, peaks)),
    }


def _judge_others(found: list[Any]) -> Result:
    whys = {
        "forward_only": "In a forward-only step every forward is a warm-up forward.",
        "one stage": "With one stage nothing must be waited for: no warm-up.",
        "plain": "Plain 1F1B warms up with one forward per stage that follows, at most M.",
    }
    for (arguments, options, why), got in zip(OTHER_CALLS, found, strict=True):
        expected = list(OURS["count_rank_microbatches"](*arguments, **options))
        words = ", ".join([*map(str, arguments), *(f"{k}={x}" for k, x in options.items())])
        check_value(f"count_rank_microbatches({words})", got, expected, whys[why])
    return Result({"calls": len(OTHER_CALLS)})
