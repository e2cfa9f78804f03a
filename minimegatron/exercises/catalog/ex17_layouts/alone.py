"""Checks a layout: that it is one, that its slowest stage is the fastest possible, what it gains."""

import math
import random
import re
from fractions import Fraction
from types import ModuleType
from typing import Any

from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
    describe_stage,
)
from minimegatron.exercises.check import Case, Result, Wrong
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_report import number_words, percent
from minimegatron.planner.simulator import Costs, Simulation, simulate

NUM_MICROBATCHES = 8


def cases(seed: int) -> list[Case]:
    """Models with heavy ends, few layers, many layers; the seed draws some more."""
    draw = random.Random(seed)
    models = {
        "a heavy loss": (13, 4, 1, 3, 7),
        "a loss heavier than any stage": (6, 4, 0, 2, 11),
        "a heavy embedding": (7, 3, 9, 2, 4),
        "more stages than layers": (3, 6, 1, 2, 5),
        "one layer, many stages": (1, 3, 0, 1, 0),
        "one stage": (5, 1, 1, 3, 2),
        "61 layers, 16 stages": (61, 16, 2, 5, 17),
        "times that are no integers": (10, 4, 0.3, 1.1, 2.45),
        # Equal shares, rounded, and other short ways are wrong for the next four, with any seed.
        "seven stages": (27, 7, 3, 5, 3),
        "a loss of five layers": (24, 3, 1, 4, 20),
        "nearly nothing at the ends": (23, 4, 2, 5, 1),
        "times below 1": (23, 5, 0.5, 0.3, 1.1),
        # Filling stages up to about their share, from either end, and mending that is wrong for these.
        "eight stages, a loss of two layers": (20, 8, 1, 4, 8),
        "five stages, light ends": (20, 5, 3, 4, 2),
        "six stages, a loss of three layers": (30, 6, 0.308, 0.306, 0.934),
        "seven stages, heavy ends": (23, 7, 0.604, 0.218, 0.87),
        "seven stages, a loss of four layers": (25, 7, 0.41, 0.415, 1.567),
    }
    for i in range(10):
        p, layers = draw.randint(2, 8), draw.randint(2, 30)
        sizes = (draw.randint(0, 9), draw.randint(1, 5), draw.randint(0, 20))
        models[f"drawn {i + 1}"] = (layers, p, *sizes)
    return [
        Case(
            f"{name}: num_layers={layers}, p={p}, E {e}, t {t}, L {loss}",
            sizes=(layers, p),
            times={"embedding": e, "decoder": t, "loss": loss},
        )
        for name, (layers, p, e, t, loss) in models.items()
    ]


def run(student: ModuleType, case: Case) -> Any:
    """One model's layout."""
    return student.choose_layout(*case.sizes, dict(case.times))


def judge(case: Case, text: Any) -> Result:
    """One model."""
    num_layers, p = case.sizes
    layout = _parsed(text, num_layers, p)
    times = _stage_times(layout, case.times)
    best = _best_slowest(num_layers, p, case.times)
    if max(times) > best * (1 + 1e-9):
        raise Wrong(_too_slow(layout, times))
    mine, even = _simulated(layout, case.times), _simulated(_even(num_layers, p), case.times)
    gain = float(1 - mine.makespan / even.makespan)
    saved = f", {percent(gain)} saved" if gain > 0 else ""
    achieved = {
        "slowest stage": number_words(max(times)),
        "a 1F1B step": f"{number_words(mine.makespan)} (evenly counted: "
        f"{number_words(even.makespan)}{saved})",
        "bubble": percent(mine.bubble_over_total),
    }
    return Result(achieved)


def _parsed(text: Any, num_layers: int, p: int) -> PipelineParallelLayerLayout:
    if not isinstance(text, str):
        raise Wrong(f"choose_layout returned {text!r}; return a string such as 'Ett|ttL'")
    try:
        num_stages = PipelineParallelLayerLayout.get_num_stages_from_str(text)
        if num_stages != p:
            raise Wrong(
                f"your layout has {num_stages} stage{'s' * (num_stages != 1)}, but p is {p}: write "
                f"p - 1 bars, that is {p - 1}\n  {text}"
            )
        layout = PipelineParallelLayerLayout(text, p)
        layout.validate_layer_layout(num_layers)
    except ValueError as error:
        raise Wrong(f"your string is not a layout of this model: {_here(str(error))}") from error
    return layout


def _here(words: str) -> str:
    """The parser's words, without its advice about options of the command line.

    >>> _here("pipeline layout: t stands 2 times but --num-layers is 1; remove 1 or set --num-layers 2")
    't stands 2 times but num_layers is 1; remove 1'
    """
    reason, shown, below = words.removeprefix("pipeline layout: ").partition("\n")
    reason = re.sub(r" or set --[\w-]+ \d+", "", reason)
    reason = re.sub(r"--([\w-]+)", lambda match: match[1].replace("-", "_"), reason)
    return reason + shown + below


def _stage_times(layout: PipelineParallelLayerLayout, times: dict[str, float]) -> list[float]:
    return [sum(times[layer.name] for layer in chunks[0]) for chunks in layout.layout]


def _best_slowest(num_layers: int, p: int, times: dict[str, float]) -> float:
    """By dynamic programming over prefixes: best[i] is the slowest of s stages holding i layers."""
    layers = [times["embedding"]] + [times["decoder"]] * num_layers + [times["loss"]]
    sums = [sum(layers[:i]) for i in range(len(layers) + 1)]
    # E must be on the first stage and L on the last.
    best = [sums[i] if i >= 1 else math.inf for i in range(len(sums))]
    for stage in range(1, p):
        is_last = stage == p - 1
        best = [
            math.inf
            if is_last and i < len(layers)
            else min(
                max(best[j], sums[i] - sums[j])
                for j in range(min(i + 1, len(layers)) if not is_last else len(layers))
            )
            for i in range(len(sums))
        ]
    return best[-1]


def _too_slow(layout: PipelineParallelLayerLayout, times: list[float]) -> str:
    """Without the best time: to find it is half of the exercise."""
    slowest = times.index(max(times))
    lines = [
        f"stage {slowest} is the slowest and takes {number_words(times[slowest])}, but a layout exists "
        "whose slowest stage is faster",
        f"  your layout: {layout}",
    ]
    for stage, (chunks, time) in enumerate(zip(layout.layout, times, strict=True)):
        mark = "   <- all wait for this one" if stage == slowest else ""
        lines.append(f"  stage {stage}: {number_words(time):>6}  {describe_stage(chunks[0])}{mark}")
    if slowest == len(times) - 1:
        lines.append("The loss counts too: give the last stage fewer layers.")
    elif slowest == 0:
        lines.append("The embedding counts too: give the first stage fewer layers.")
    else:
        lines.append(
            f"Together they take {number_words(sum(times))}, which is "
            f"{number_words(sum(times) / len(times))} per stage. Move a cut."
        )
    return "\n".join(lines)


def _even(num_layers: int, p: int) -> PipelineParallelLayerLayout:
    """Layers counted evenly, the first stages getting one more where it does not come out."""
    counts = [num_layers // p + (stage < num_layers % p) for stage in range(p)]
    stages = ["t" * count for count in counts]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    if p == 1:
        stages = ["E" + "t" * num_layers + "L"]
    return PipelineParallelLayerLayout("|".join(stages), p)


def _simulated(layout: PipelineParallelLayerLayout, times: dict[str, float]) -> Simulation:
    """A 1F1B step; a third of each time is the forward."""
    exact = {name: Fraction(time).limit_denominator(1000) for name, time in times.items()}
    thirds = {name: (time / 3, time * 2 / 3) for name, time in exact.items()}
    p = layout.pipeline_model_parallel_size
    step = plan("no-pipelining" if p == 1 else "1f1b", p, NUM_MICROBATCHES)
    return simulate(step, Costs.from_layout(layout, thirds))
