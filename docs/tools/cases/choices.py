"""Layouts to choose from: what each kind of parallelism costs, three worked choices, what was measured.

Called by: the page on costs. Calls: `layout_costs`, the planner (each step in a table is a simulated
one), the record `rank_bytes`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

from cases import layout_costs
from cases.case_words import table
from cases.layout_costs import Layout
from minimegatron.core.orders.orders import INTERLEAVED, NO_PIPELINING, ONE_F_ONE_B
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_report import percent
from minimegatron.planner.simulator import Costs, simulate
from source.places import recorded

FREE = Fraction(1, 10)
"""Of a GPU's memory, that a choice leaves: for kernels, libraries, and what lies between tensors."""
NANO = 10**9

# -- A step by the planner --


@cache
def planned_seconds(x: Layout) -> float:
    """A step as the planner simulates it, with the output layer on the last stage."""
    chunk = layout_costs.stage_work_seconds(x) / x.v
    works = [chunk] * (x.p * x.v)
    works[-1] += layout_costs.output_seconds(x)
    passes = layout_costs.passes(x)
    is_pipeline = x.p > 1
    speed = layout_costs.speed(x, x.t * x.c * x.d * x.p)
    costs = Costs(
        [round(work / passes * NANO) for work in works],
        [round(work * (passes - 1) / passes * NANO) for work in works],
        bandwidth=Fraction(round(speed), NANO) if is_pipeline else None,
    )
    schedule = INTERLEAVED if x.v > 1 else ONE_F_ONE_B if is_pipeline else NO_PIPELINING
    size = int(layout_costs.stage_bytes(x)) if is_pipeline else 0
    planned = plan(schedule, x.p, x.M, x.v if x.v > 1 else None, message_bytes=size)
    return float(simulate(planned, costs).makespan) / NANO + layout_costs.copies_seconds(x)


# -- Three choices --


@dataclass(frozen=True)
class Choice:
    """A model for so many GPUs, and what other layouts that come to mind have in place of the best."""

    model: dict[str, Any]
    num_gpus: int
    num_sequences: int
    """Of one step."""
    others: tuple[dict[str, Any], ...]


LARGE = {"L": 88, "h": 8192, "a": 64, "V": 50304, "s": 4096}
CHOICES = {
    "7 B on 8": Choice(
        {"L": 32, "h": 4096, "a": 32, "V": 50304, "s": 4096},
        8,
        512,
        ({"t": 2, "d": 4}, {"t": 8, "d": 1}, {"p": 2, "d": 4}, {"p": 8, "d": 1}),
    ),
    "70 B on 64": Choice(
        LARGE,
        64,
        512,
        (
            {"t": 2, "d": 8},
            {"t": 2, "d": 8, "recompute": "full"},
            {"p": 8, "d": 2},
            {"t": 8, "p": 2},
            {"t": 16, "p": 1},
        ),
    ),
    "experts on 256": Choice(
        {"L": 64, "h": 4096, "a": 32, "V": 50304, "s": 4096, "E": 64, "k": 4, "f": 2048},
        256,
        1024,
        (
            {"t": 1, "d": 32},
            {"e": 1},
            {"e": 32},
            {"v": 1},
            {"p": 32, "v": 2, "d": 4},
        ),
    ),
}
TENSOR_SIZES = (1, 2, 4, 8)
"""Of one node. A table shows what more cost."""
MOST_CHUNKS = 8
MICRO_BATCH_SIZES = (1, 2, 4)
TRIED = 12
"""Layouts that the planner simulates, of those that are quickest by the formula."""


def tried_words() -> str:
    """
    >>> tried_words()
    't, v ≤ 8, b ≤ 4'
    """
    assert max(TENSOR_SIZES) == MOST_CHUNKS
    return f"t, v ≤ {MOST_CHUNKS}, b ≤ {MICRO_BATCH_SIZES[-1]}"


def layouts(choice: Choice) -> Iterator[Layout]:
    """All layouts of a model, whether they fit or not. Each step has the same sequences."""
    num_layers = choice.model["L"]
    for t in TENSOR_SIZES:
        for p in _divisors(num_layers, choice.num_gpus // t):
            if choice.num_gpus % (t * p):
                continue
            d = choice.num_gpus // (t * p)
            for v in _divisors(num_layers // p, MOST_CHUNKS if p > 1 else 1):
                for e in _divisors(choice.model.get("E", 1), t * d):
                    yield from _runs(choice, {"t": t, "p": p, "v": v, "d": d, "e": e})


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _runs(choice: Choice, cut: dict[str, int]) -> Iterator[Layout]:
    for b in MICRO_BATCH_SIZES:
        num, rest = divmod(choice.num_sequences, b * cut["d"])
        if rest or (cut["v"] > 1 and num % cut["p"]) or cut["t"] * cut["d"] % cut["e"]:
            continue
        for recompute in ("selective", "full"):
            yield Layout(**choice.model, **cut, b=b, M=num, recompute=recompute, m=0)


def in_flight(p: int, M: int, v: int) -> Fraction:
    """Microbatches' worth of a stage's layers that stage 0 holds at its peak."""
    x = Layout(**LARGE, p=p, M=M, v=v)
    return Fraction(layout_costs.chunks_in_flight(x, True), v)


def fits(x: Layout) -> bool:
    return layout_costs.held_bytes(x) <= x.memory * 1e9 * (1 - FREE)


@cache
def chosen(name: str) -> Layout:
    """The quickest that fits: the formula ranks all, and the planner decides among the first."""
    able = [x for x in layouts(CHOICES[name]) if fits(x)]
    first = sorted(able, key=layout_costs.step_seconds)[:TRIED]
    return min(first, key=planned_seconds)


def others(name: str) -> list[Layout]:
    """Each with its number of microbatches for the same sequences."""
    choice, best = CHOICES[name], chosen(name)
    found = []
    for change in choice.others:
        x = replace(best, **change)
        found.append(replace(x, M=choice.num_sequences // (x.b * x.d)))
        assert x.t * x.p * x.d == choice.num_gpus, f"{name}: {change} is for other GPUs"
    return found


def choice_table(name: str) -> str:
    """The choice in the first row, then the others, with what the seconds of a step are made of."""
    rows = [_row(x) for x in (chosen(name), *others(name))]
    rows[0][0] = f"**{rows[0][0]}**"
    head = ["layout", "holds", "step", "computing", "moved in layers", "copies", "idle, messages"]
    return table(head, rows)


def _row(x: Layout) -> list[str]:
    step = planned_seconds(x)
    layers = x.M * x.L / x.p
    moved = layers * layout_costs.moving_seconds(x)
    work = layers * layout_costs.work_seconds(x) + x.M * layout_costs.output_seconds(x) / x.p
    copies = layout_costs.copies_seconds(x)
    rest = step - moved - work - copies
    shares = [f"{max(part, 0) / step:.0%}" for part in (work, moved, copies, rest)]
    return [unbroken(layout_words(x)), _held_words(x), unbroken(f"{step:.3g} s"), *shares]


def unbroken(text: str) -> str:
    """With line breaks after commas only."""
    return text.replace(" ", "\u00a0").replace(",\u00a0", ", ")


def layout_words(x: Layout) -> str:
    """
    >>> layout_words(Layout(32, 4096, 32, 50304, 4096, t=2, p=4, v=2))
    't = 2, p = 4, v = 2, d = 1'
    """
    found = [f"t = {x.t}", f"p = {x.p}"] + [f"v = {x.v}"] * (x.v > 1) + [f"d = {x.d}"]
    found += [f"e = {x.e}"] * (x.E > 0) + ["recompute"] * (x.recompute == "full")
    return ", ".join(found)


def _held_words(x: Layout) -> str:
    size = f"{float(layout_costs.held_bytes(x)) / 1e9:.0f} GB"
    return size if fits(x) else f"{size}: too much"


def step_with(name: str, num_sequences: int) -> float:
    """Seconds of the choice's step, with other sequences in it."""
    x = chosen(name)
    return planned_seconds(replace(x, M=num_sequences // (x.b * x.d)))


def size_of(name: str) -> float:
    """Parameters of the whole model."""
    x = Layout(**CHOICES[name].model)
    return float(layout_costs.dense_parameters(x, True) + layout_costs.expert_parameters(x))


# -- What each kind costs --

EVERYWHERE, NOWHERE = 10**6, 0
"""GPUs of a node: all groups lie within it, or none does."""
LONG = LARGE | {"s": 131072}
EXPERTS = CHOICES["experts on 256"].model


class Kind(NamedTuple):
    """One kind of parallelism alone: what it costs by hand, and in a case."""

    case: str
    layout: Layout
    moved: str
    per: str
    formula: str
    by_hand: Callable[[Layout, float], float]
    """What is moved over what is computed, from the layout and R."""


IN_LAYER = "layer and microbatch"
KINDS = {
    "t": Kind(
        "t = 8",
        Layout(**LARGE, t=8),
        "20 s b h (t − 1)/t",
        IN_LAYER,
        "5 (t − 1) R / (18 h + 3 s)",
        lambda x, R: 5 * (x.t - 1) * R / (18 * x.h + 3 * x.s),
    ),
    "c": Kind(
        "c = 8, s = 131,072",
        Layout(**LONG, c=8),
        "4 s b h (3 c − 2)/c",
        IN_LAYER,
        "(3 c − 2) R / (18 h + 3 s)",
        lambda x, R: (3 * x.c - 2) * R / (18 * x.h + 3 * x.s),
    ),
    "e": Kind(
        "e = 8, f = 2048",
        Layout(**EXPERTS, e=8, d=8),
        "8 s b k h (e − 1)/e",
        IN_LAYER,
        "4 (e − 1) R / (9 e f)",
        lambda x, R: 4 * (x.e - 1) * R / (9 * x.e * x.f),
    ),
    "p": Kind(
        "p = 8",
        Layout(**LARGE, p=8),
        "4 s b h",
        "stage and microbatch",
        "p R / (L (18 h + 3 s))",
        lambda x, R: x.p * R / (x.L * (18 * x.h + 3 * x.s)),
    ),
    "d": Kind(
        "d = 8, 65,536 tokens",
        Layout(**LARGE, d=8, M=16),
        "6 P (d − 1)/d",
        "step",
        "(d − 1) R / (d M b s)",
        lambda x, R: (x.d - 1) * R / (x.d * x.M * x.b * x.s),
    ),
}


def moved_share(x: Layout, node: int) -> float:
    """Seconds that the layout's one kind moves, over the seconds that what it divides computes."""
    x = replace(x, node=node)
    work = x.L / x.p * layout_costs.work_seconds(x)
    if x.E > 0:
        tokens = layout_costs.passes(x) * layout_costs.tokens_of_rank(x)
        flops = layout_costs.expert_flops(x) * tokens * layout_costs.layers_of_rank(x)
        work = float(flops) / layout_costs.rate(x)
    moved = x.L / x.p * layout_costs.moving_seconds(x) + 2 * layout_costs.stage_seconds(x)
    if x.d > 1 and x.E == 0:
        moved += layout_costs.copies_seconds(x) / x.M
    return float(moved / work)


def by_hand(name: str, node: int | None = None, **sizes: Any) -> float:
    """The kind's formula, in a node unless it is d's or `node` says otherwise."""
    if node is None:
        node = NOWHERE if name == "d" else EVERYWHERE
    return KINDS[name].by_hand(replace(KINDS[name].layout, **sizes), flops_per_byte(node))


def cost_table() -> str:
    head = [
        "",
        "a rank moves, bytes",
        "for each",
        "moving / computing",
        "case",
        "in a node",
        "between",
    ]
    rows = []
    for name, kind in KINDS.items():
        shares = [f"{moved_share(kind.layout, node):.1%}" for node in (EVERYWHERE, NOWHERE)]
        rows.append([name, kind.moved, kind.per, kind.formula, kind.case, *shares])
    return table(head, rows)


def flops_per_byte(node: int = EVERYWHERE) -> int:
    """R: operations in the time in which one byte moves."""
    x = Layout(**LARGE, node=node)
    return round(layout_costs.rate(x) / layout_costs.speed(x, 1))


# -- What was measured --


def measured_runs() -> dict[str, tuple[Layout, int]]:
    """Name -> the layout, and the bytes that were counted on the rank that held most."""
    runs = recorded("rank_bytes")["runs"]
    return {
        name: (Layout(**run["sizes"]), max(sum(rank.values()) for rank in run["ranks"]))
        for name, run in runs.items()
    }


def error(name: str) -> float:
    """How far the estimate is from what was measured, as a share of the latter."""
    x, measured = measured_runs()[name]
    return float(layout_costs.held_bytes(x)) / measured - 1


def largest_error() -> str:
    return percent(max(abs(error(name)) for name in measured_runs()))


def measured_table() -> str:
    rows = []
    for name, (x, measured) in measured_runs().items():
        sizes = [f"{float(size) / 1e6:.1f}" for size in (measured, layout_costs.held_bytes(x))]
        rows.append([name, *sizes, f"{error(name):+.1%}".replace("-", "−")])
    return table(["", "measured, MB", "estimate, MB", "off by"], rows)
