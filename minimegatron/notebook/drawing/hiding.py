"""Pictures of all-to-alls beside the computation: two lanes of a recorded step, and what is saved.

Megatron has no counterpart.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from minimegatron.core.orders.work import BACKWARD, FORWARD
from minimegatron.notebook.drawing.palette import BLUE, GREY, LIGHT_GREY, ORANGE, RED
from minimegatron.planner.layer_plan import ATTENTION, MLP
from minimegatron.planner.links import LAYER_NODE
from minimegatron.planner.svg_shapes import shade, text_colour
from minimegatron.tracing.lanes import exposed_of, in_flight
from minimegatron.tracing.step import Step
from minimegatron.tracing.step_costs import has_nodes, is_of_tokens
from minimegatron.tracing.trace_words import pace_words


def draw_lanes(runs: Mapping[str, Step], stage: int = 0) -> None:
    """A panel per recorded step, on one clock: what a stage computes; below, its all-to-alls of tokens.

    Hatched: the stage waits for one, so it computes nothing.
    """
    _, panels = plt.subplots(
        len(runs), 1, sharex=True, figsize=(11, 1.5 * len(runs) + 0.9), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for (panel,), (name, step) in zip(panels, runs.items(), strict=True):
        for kind, number, start, end in _computed(step, stage):
            colour = shade(kind, 0, 1)
            _bar(panel, 0, step, start, end, facecolor=colour, edgecolor="white", lw=0.6)
            look = {"ha": "center", "va": "center", "fontsize": 8, "color": text_colour(colour)}
            panel.text((start + end) / 2e3 - step.start / 1e3, 0.4, number, **look)
        for bar in in_flight(step.events[stage]):
            if is_of_tokens(bar.events[0]):
                _bar(panel, 1, step, bar.start, bar.end, facecolor=GREY, alpha=0.45, ec="white")
                exposed = exposed_of(bar)
                _bar(panel, 1, step, *exposed, facecolor=RED)
                _bar(panel, 0, step, *exposed, facecolor=LIGHT_GREY, hatch="////", ec=GREY, lw=0)
        panel.set(yticks=[0.4, 1.4], yticklabels=["computes", "all-to-all"], ylim=(1.9, -0.1))
        how = pace_words(step.pace) or "real times"
        panel.set_title(f"{name}: {step.makespan / 1e3:.0f} ms ({how.split(':')[0]})", loc="left")
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    panels[-1][0].set_xlabel("ms since the step's first computation")
    handles = [
        Patch(color=shade(FORWARD, 0, 1), label="forward"),
        Patch(color=shade(BACKWARD, 0, 1), label="backward"),
        Patch(color=GREY, alpha=0.45, label="in flight"),
        Patch(color=RED, label="exposed: it is waited for"),
    ]
    above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "fontsize": 8}
    panels[0][0].legend(handles=handles, ncols=len(handles), frameon=False, **above)
    plt.show()


def _bar(panel: Any, row: int, step: Step, start: float, end: float, **look: Any) -> None:
    span = ((start - step.start) / 1e3, (end - start) / 1e3)
    panel.broken_barh([span], (row, 0.8), **look)


def _computed(step: Step, stage: int) -> Iterator[tuple[str, int, float, float]]:
    """(kind of work, microbatch, start, end): of each node, or of each forward and backward."""
    for event in step.events[stage].values():
        told, span = event.attributes, (event.start, event.end)
        if event.name == LAYER_NODE:
            if told["node"] in (ATTENTION, MLP):  # others, such as the residual's, take no time
                yield told["direction"], event.action.microbatch, *span
        elif not has_nodes(step) and event.action.kind in (FORWARD, BACKWARD):
            yield event.action.kind, event.action.microbatch, *span


def draw_hiding(
    lengths: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    measured: Mapping[str, Mapping[float, float]],
    marked: Mapping[float, str],
) -> None:
    """The length of a step by that of an all-to-all: a curve per way, points where one was measured.

    `marked` has words for some lengths of an all-to-all.
    """
    _, panel = plt.subplots(figsize=(7.5, 3.9), layout="constrained")
    for (way, values), colour in zip(curves.items(), (ORANGE, BLUE), strict=True):
        panel.plot(lengths, values, color=colour, label=f"{way}, two lanes on paper")
        points = measured[way]
        look = {"color": colour, "label": f"{way}, measured (paced)", "clip_on": False}
        panel.scatter(points.keys(), points.values(), zorder=3, **look)
    for place, words in marked.items():
        panel.axvline(place, color=GREY, lw=1, ls="--")
        panel.annotate(f" {words}", (place, 0.03), xycoords=("data", "axes fraction"), color=GREY)
    panel.set(xlabel="length of one all-to-all", ylabel="length of the step", xlim=(0, lengths[-1]))
    panel.set_ylim(0, None)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9)
    plt.show()
