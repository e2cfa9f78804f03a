"""Two recorded runs side by side: where they first part, and where the time differs.

Torch-free. Megatron has no counterpart.
"""

from collections.abc import Iterator

from minimegatron.planner.actions import KINDS
from minimegatron.tracing.compare import Divergence, first_divergences
from minimegatron.tracing.step import Step, TracedGap
from minimegatron.tracing.trace_words import (
    action_name,
    gap_words,
    milliseconds,
    percent,
    step_title,
)

NUM_GAPS = 8


def divergences(a: Step, b: Step) -> list[Divergence]:
    """Where each stage of `b` first does something else than in `a`.

    Raises ValueError for pipelines of different length.
    """
    return first_divergences(
        [a.actions(rank) for rank in range(len(a.stages))],
        [b.actions(rank) for rank in range(len(b.stages))],
    )


def diff_report(a: Step, b: Step) -> Iterator[str]:
    """The lines of the comparison; the first run is A, the second B."""
    yield f"A  step {a.number}: {step_title(a.config, a.run)}"
    yield f"B  step {b.number}: {step_title(b.config, b.run)}"
    yield ""
    found = divergences(a, b)
    if found:
        yield "actions: different; where each stage of B first departs from A:"
        yield from (f"  {divergence}" for divergence in found)
    else:
        num_actions = sum(len(a.actions(rank)) for rank in range(len(a.stages)))
        yield f"actions: the same, all {num_actions}"
    yield ""
    yield from _times(a, b)
    yield ""
    yield from _gap_lines(a, b)


def _times(a: Step, b: Step) -> Iterator[str]:
    yield f"{'':26}{'A':>12}{'B':>12}{'B / A':>9}"
    yield _row("step", a.makespan, b.makespan)
    formula = a.formulas[1] if a.formulas is not None and a.formulas == b.formulas else None
    beside = f"   {formula.text} = {percent(formula.value)}" if formula is not None else ""
    yield (
        f"{'bubble, of all time':26}{percent(a.bubble_over_total):>12}"
        f"{percent(b.bubble_over_total):>12}{'':9}{beside}"
    )
    for rank in range(len(a.stages)):
        for kind in KINDS.values():
            lengths = [_mean_length(step, rank, kind.name) for step in (a, b)]
            if any(lengths):
                yield _row(f"stage {rank}: mean {kind.words}", *lengths)
        for name in ("waiting", "transfer"):
            sums = [sum(getattr(gap, name) for gap in step.gaps(rank)) for step in (a, b)]
            yield _row(f"stage {rank}: {name}", *sums)


def _row(label: str, a: float, b: float) -> str:
    ratio = f"{b / a:9.3f}" if a > 0 else f"{'':9}"
    return f"{label:26}{milliseconds(a):>12}{milliseconds(b):>12}{ratio}"


def _mean_length(step: Step, rank: int, kind: str) -> float:
    events = [step.events[rank][index] for index in step.work(rank)]
    lengths = [event.end - event.start for event in events if event.action.kind == kind]
    return sum(lengths) / len(lengths) if lengths else 0.0


def _gap_lines(a: Step, b: Step) -> Iterator[str]:
    """The gaps that changed most: those before the same work on the same stage belong together."""
    gaps_of_a, gaps_of_b = _gaps_by_work(a), _gaps_by_work(b)
    changes = []
    for key in gaps_of_a.keys() | gaps_of_b.keys():
        pair = (gaps_of_a.get(key), gaps_of_b.get(key))
        lengths = [gap.length if gap is not None else 0.0 for gap in pair]
        changes.append((lengths[1] - lengths[0], key, pair))
    changes.sort(key=lambda change: (-abs(change[0]), change[1]))
    yield "gaps that changed most:"
    for change, (rank, name), pair in changes[:NUM_GAPS]:
        sign = "+" if change >= 0 else "-"
        yield f"  stage {rank}, {name}: {sign}{milliseconds(abs(change))}"
        for label, step, gap in (("A", a, pair[0]), ("B", b, pair[1])):
            yield f"    {label}  {gap_words(step, gap) if gap is not None else 'no gap'}"


def _gaps_by_work(step: Step) -> dict[tuple[int, str], TracedGap]:
    gaps = {}
    for rank in range(len(step.stages)):
        for gap in step.gaps(rank):
            if gap.before is None:
                name = "at the end"
            else:
                action = step.events[rank][gap.before].action
                name = f"before {action_name(action, step.config.num_model_chunks)}"
            gaps[rank, name] = gap
    return gaps
