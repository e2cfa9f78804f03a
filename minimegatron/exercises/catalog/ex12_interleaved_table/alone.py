"""Checks the interleaved schedule's table and counts: alone, and in plans."""

import random
from types import ModuleType
from typing import Any

from minimegatron.core.pipeline_parallel import schedule_table
from minimegatron.core.pipeline_parallel.schedule_table import RankMicrobatches
from minimegatron.exercises.catalog.ex12_interleaved_table.tables import check_table
from minimegatron.exercises.check import (
    Case,
    Result,
    Wrong,
    installed,
)
from minimegatron.exercises.room.stand_ins import stood_for
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.plan_check import check
from minimegatron.planner.plan_report import percent
from minimegatron.planner.simulator import Costs, simulate

TABLE = "minimegatron.core.pipeline_parallel.schedule_table."
NAMES = ("get_schedule_table", "count_rank_microbatches")
REPLACES = tuple(TABLE + name for name in NAMES)
OURS = {name: getattr(schedule_table, name) for name in NAMES}
"""In a dict, where `installed` does not replace them."""
TABLES, PLANS, OTHERS = "the table", "the counts, in plans", "other steps"
FIELDS = f"RankMicrobatches({', '.join(RankMicrobatches._fields)})"
OTHER_CALLS = [
    ((4, 1, 8, 2, 4), {"forward_only": True}, "forward_only"),
    ((1, 0, 8, 2, 4), {}, "one stage"),
    ((1, 0, 8, 2, 4), {"forward_only": True}, "forward_only"),
    ((1, 0, 8, 1, 4), {"is_interleaved": False, "forward_only": True}, "forward_only"),
    ((4, 0, 8, 1, 4), {"is_interleaved": False}, "plain"),
    ((4, 0, 2, 1, 4), {"is_interleaved": False}, "plain"),
    ((5, 2, 9, 1, 5), {"is_interleaved": False}, "plain"),
    ((4, 2, 8, 1, 4), {"is_interleaved": False, "forward_only": True}, "forward_only"),
    ((4, 1, 8, 1, 4), {}, "one chunk"),
]


def cases(seed: int) -> list[Case]:
    """Tables, counts, plans."""
    draw = random.Random(seed)
    tables = [(5, 2, 3), (8, 2, 4), (4, 3, 4), (7, 2, 4), (6, 1, 2), (3, 2, 5)]
    tables += [(draw.randint(2, 12), draw.randint(1, 4), draw.randint(2, 6)) for _ in range(4)]
    plans = [(4, 8, 2, 4), (2, 4, 2, 2), (3, 7, 3, 4), (4, 4, 2, 4)]
    for _ in range(2):
        p = draw.randint(2, 5)
        G = draw.randint(p, p + 2)
        plans.append((p, draw.choice([1, 2, 3]) * G, draw.randint(2, 3), G))
    tables += [(M, v, G) for _, M, v, G in plans]
    found = [Case("tables of some sizes", part=TABLES, tables=tables)]
    found += [
        Case(f"a plan: p={p}, M={M}, v={v}, G={G}", part=PLANS, plan=(p, M, v, G))
        for p, M, v, G in plans
    ]
    return [*found, Case("forward-only, 1 stage, plain 1F1B", part=OTHERS)]


def run(student: ModuleType, case: Case) -> Any:
    """What the student's functions return."""
    if case.part == TABLES:
        return [_plain_table(student.get_schedule_table(*sizes)) for sizes in case.tables]
    if case.part == PLANS:
        p, M, v, G = case.plan
        counts = [student.count_rank_microbatches(p, r, M, v, G) for r in range(p)]
        return [_plain_counts(one) for one in counts]
    return [
        _plain_counts(student.count_rank_microbatches(*arguments, **options))
        for arguments, options, _ in OTHER_CALLS
    ]


def _plain_table(table: Any) -> Any:
    """A list travels as it is; of anything else its type. What stands for torch is refused later."""
    is_shown = type(table) is list or stood_for(table)
    return table if is_shown else {"type": type(table).__name__}


def _plain_counts(counts: Any) -> dict[str, Any]:
    """`RankMicrobatches` travels with the names of its fields; of anything else its type."""
    if isinstance(counts, RankMicrobatches):
        return counts._asdict()
    if stood_for(counts):
        return counts
    return {"type": type(counts).__name__}


def judge(case: Case, found: Any) -> Result:
    """What the case asks for. No message holds a right table or count: it could be copied."""
    if case.part == TABLES:
        for sizes, table in zip(case.tables, found, strict=True):
            check_table(table, *sizes)
        return Result({"tables": len(case.tables)})
    if case.part == PLANS:
        p, M, v, G = case.plan
        counts = [
            _counts(one, f"count_rank_microbatches({p}, {r}, {M}, {v}, {G})", M * v)
            for r, one in enumerate(found)
        ]
        return _judge_plan(p, M, v, G, counts)
    return _judge_others(found)


def _other_type(call: str, found: dict[str, Any], wanted: str) -> Wrong:
    name = found["type"]
    what = "None (was `return` forgotten?)" if name == "NoneType" else f"a {name}"
    return Wrong(f"{call} returned {what}; return {wanted}")


def _counts(found: dict[str, Any], call: str, total: int) -> RankMicrobatches:
    """What a call returned, if it does not contradict itself."""
    if "type" in found:
        raise _other_type(call, found, FIELDS)
    counts = RankMicrobatches(**found)
    for name in ("total", "num_warmup", "num_remaining"):
        if type(found[name]) is not int:
            raise Wrong(f"{call}: {name} is {found[name]!r}; an int is expected")
    if counts.total != total:
        raise Wrong(f"{call}: total is {counts.total}, but M * v is {total}")
    if not 0 <= counts.num_warmup <= total:
        raise Wrong(
            f"{call}: num_warmup is {counts.num_warmup}; it is at least 0, and at most total, {total}"
        )
    if counts.num_remaining != total - counts.num_warmup:
        raise Wrong(
            f"{call}: num_remaining is {counts.num_remaining}, but {counts.num_warmup} of {total} "
            "forwards are warm-up"
        )
    if bool(counts.are_all_in_warmup) != (counts.num_remaining == 0):
        raise Wrong(
            f"{call}: are_all_in_warmup is {counts.are_all_in_warmup!r}, but num_remaining is "
            f"{counts.num_remaining}"
        )
    return counts


# -- Plans --


def _judge_plan(p: int, M: int, v: int, G: int, counts: list[RankMicrobatches]) -> Result:
    """The table is ours: the student's has been compared with it, for these sizes too."""
    found = [one.num_warmup for one in counts]
    warmups = f"your warm-up on stages 0 to {p - 1} is {found}"

    def count(p: int, r: int, *_: Any, **__: Any) -> RankMicrobatches:
        return counts[r]

    with installed(count, TABLE + "count_rank_microbatches"):
        step = plan("interleaved", p, M, vpp=v, group_size=G)
        problems = check(step)
        one_by_one = plan("interleaved", p, M, vpp=v, group_size=G, batch_p2p_comm=False)
        separate_problems = check(one_by_one)
    if problems or separate_problems:
        where = "" if problems else " if messages are sent one by one (batch_p2p_comm=False)"
        problems = problems or separate_problems
        stuck = [problem for problem in problems if problem.kind == "deadlock"]
        raise Wrong(
            f"planned with your functions, the step cannot work{where}: {warmups}\n"
            f"  {(stuck or problems)[0]}\n{_why_stuck(found, M, v, G)}"
        )
    for r, mine in enumerate(found):
        if mine > OURS["count_rank_microbatches"](p, r, M, v, G).num_warmup:
            raise Wrong(
                f"stage {r} warms up longer than it must; {warmups}\n"
                f"The step works, but at its peak the stage holds {step.peak_in_flight(r)} "
                "microbatches' activations, and fewer are enough."
            )
    return Result(figures(step))


def _why_stuck(warmups: list[int], M: int, v: int, G: int) -> str:
    falls = [a - b for a, b in zip(warmups, warmups[1:], strict=False)]
    if warmups[-1] < min((v - 1) * G, M * v):
        return (
            f"The last stage's first backward belongs to its last chunk: the first group of {G} must "
            f"be through its {v - 1} earlier chunk{'s' * (v > 2)} by then."
        )
    for r, fall in enumerate(falls):
        if fall < 0:
            return (
                f"The warm-up rises from stage {r} to stage {r + 1}. It must fall: the first gradient "
                "is made on the last stage, and comes to stage 0 last."
            )
    if set(falls) == {0}:
        return (
            "All stages warm up alike. But a gradient comes later to a stage that is nearer to the "
            "beginning: that stage must do more forwards before it."
        )
    if set(falls) == {1}:
        return (
            "The warm-up falls by one from stage to stage, as in plain 1F1B. But here a stage does a "
            "forward and a backward before each exchange. Per link, one exchange takes the "
            "activation down and another brings the gradient up: that makes two."
        )
    links = len(falls)
    which = f"each of the {links} links" if links > 1 else "the link"
    return f"Count, for {which} between stages, the exchanges on the way down and up."


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
        "one chunk": "This step is interleaved, although a stage has one chunk: is_interleaved says "
        "so. Which of your branches does it take?",
        "plain": "Plain 1F1B warms up with one forward per stage that follows, at most M.",
    }
    for (arguments, options, why), got in zip(OTHER_CALLS, found, strict=True):
        expected = OURS["count_rank_microbatches"](*arguments, **options)
        words = ", ".join([*map(str, arguments), *(f"{k}={x}" for k, x in options.items())])
        call = f"count_rank_microbatches({words})"
        num_warmup = _counts(got, call, expected.total).num_warmup
        if num_warmup != expected.num_warmup:
            raise Wrong(f"{call}: num_warmup is {num_warmup}\n{whys[why]}")
    return Result({"calls": len(OTHER_CALLS)})
