"""A recorded step in figures: bubble beside formula, plan beside run, and where the time went.

Torch-free. Megatron has no counterpart.
"""

from collections.abc import Iterator

from minimegatron.core.orders.work import ALL_TO_ALL, HIDDEN, RING_HOP
from minimegatron.tracing.compare import compare_with_plan, wrong_messages
from minimegatron.tracing.lanes import exposure
from minimegatron.tracing.node_order import wrong_nodes
from minimegatron.tracing.step import Step, TracedGap
from minimegatron.tracing.step_costs import planned_exposure
from minimegatron.tracing.trace_words import (
    gap_words,
    late_words,
    lines_words,
    milliseconds,
    pace_words,
    percent,
    step_title,
)

MOST_PROBLEMS = 8
SHORT_GAP = 0.02
"""Gaps shorter than this share of the step are summed up and not listed."""


def step_report(step: Step, clock_words: str = "") -> Iterator[str]:
    """The lines of the report."""
    yield from heading(step, clock_words)
    yield ""
    yield from plan_lines(step)
    yield ""
    yield from bubble_lines(step)
    yield ""
    yield from blame_lines(step)
    for lane in HIDDEN:
        yield from exposed_lines(step, lane)


def heading(step: Step, clock_words: str = "") -> Iterator[str]:
    """Which step this is, and how it was recorded."""
    yield f"step {step.number}: {step_title(step.config, step.run)}"
    if step.pace is not None:
        yield f"  {pace_words(step.pace)}; lengths of computation mean nothing else"
        if late := late_words(step):
            yield f"  {late}"
    if lines := lines_words(step):
        yield f"  {lines}"
    if clock_words:
        yield f"  {clock_words}"


def plan_lines(step: Step) -> Iterator[str]:
    """Whether the run did what its plan says, and where it first did not."""
    problems = [*map(str, compare_with_plan(step)), *wrong_messages(step), *wrong_nodes(step)]
    num_actions = sum(len(step.actions(rank)) for rank in range(len(step.stages)))
    if not problems:
        yield (
            f"plan: followed exactly, {num_actions} actions and {len(step.transfers)} messages on "
            f"{len(step.stages)} ranks"
        )
        return
    yield "plan: NOT followed; where each rank first departs:"
    for problem in problems[:MOST_PROBLEMS]:
        yield f"  {problem}"
    if len(problems) > MOST_PROBLEMS:
        yield f"  and {len(problems) - MOST_PROBLEMS} more"


def bubble_lines(step: Step) -> Iterator[str]:
    """The measured bubble, the formula's, and that of the plan at this run's own speed."""
    ideal, formulas = step.simulation, step.formulas
    excess = step.makespan / float(ideal.makespan) - 1 if ideal.makespan else 0.0
    how = "the pace" if step.pace is not None else "these lengths"
    yield (
        f"length  {milliseconds(step.makespan)}; the plan at {how}, messages free: "
        f"{milliseconds(float(ideal.makespan))} ({100 * excess:+.1f} %)"
    )
    if len(step.stages) == 1:
        between = percent(step.bubble_over_total)
        yield f"bubble  no pipeline; {between} of the time lies between its calls"
        return
    rows = (
        ("bubble  idle / all time       ", step.bubble_over_total, ideal.bubble_over_total, 1),
        ("        idle / computing time ", step.bubble_over_ideal, ideal.bubble_over_ideal, 0),
    )
    for label, measured, planned, which in rows:
        line = f"{label} {percent(measured):>7} measured, {percent(planned):>7} by that plan"
        if formulas is not None:
            formula = formulas[which]
            line += f", {percent(formula.value):>7} = {formula.text}"
        yield line


def blame_lines(step: Step) -> Iterator[str]:
    """Per rank: how its idle time is made up, and whom each long gap waited for."""
    yield "idle time, and whom it waited for:"
    for rank in range(len(step.stages)):
        gaps = step.gaps(rank)
        waiting, transfer = sum(gap.waiting for gap in gaps), sum(gap.transfer for gap in gaps)
        idle = step.makespan - step.busy(rank)
        other = max(0.0, idle - waiting - transfer)
        yield (
            f"  stage {rank}: idle {milliseconds(idle)} = waiting {milliseconds(waiting)} + "
            f"transfer {milliseconds(transfer)} + own work {milliseconds(other)}"
        )
        for gap in gaps:
            if gap.length >= SHORT_GAP * step.makespan:
                yield f"    at {milliseconds(gap.start - step.start):>8}: {gap_words(step, gap)}"


HEADS = {ALL_TO_ALL: "all-to-alls", RING_HOP: "hops of attention's ring"}


def exposed_lines(step: Step, lane: str = ALL_TO_ALL) -> Iterator[str]:
    """Per stage: how long all-to-alls, or hops, were in flight, and how much of that was waited for.

    For a paced step beside what the pace alone would leave to wait for. Nothing without any.
    """
    found = [exposure(events, lane) for events in step.events]
    if not any(of_stage.number for of_stage in found):
        return
    yield ""
    yield f"{HEADS[lane]}, in flight from start to the end of the wait; exposed is the wait:"
    for rank, of_stage in enumerate(found):
        line = (
            f"  stage {rank}: {of_stage.number}, in flight {milliseconds(of_stage.in_flight)}, exposed "
            f"{milliseconds(of_stage.exposed)}"
        )
        if (planned := planned_exposure(step, rank, lane)) is not None:
            line += f"; by the pace {milliseconds(planned)}"
        yield line


def longest_gaps(step: Step, number: int) -> list[TracedGap]:
    """The longest gaps of all ranks, longest first."""
    gaps = [gap for rank in range(len(step.stages)) for gap in step.gaps(rank)]
    return sorted(gaps, key=lambda gap: -gap.length)[:number]
