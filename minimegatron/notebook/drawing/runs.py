"""Pictures of what a run did: bytes held, waiting, gradient buffers, calls within calls.

Megatron has no counterpart.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from minimegatron.notebook.drawing.palette import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    SKY,
    nth_colour,
)
from minimegatron.planner.actions import Event
from minimegatron.planner.svg_shapes import text_colour
from minimegatron.tracing.rank_trace import RankTrace
from minimegatron.tracing.step import Step
from minimegatron.tracing.trace_view import Trace
from minimegatron.tracing.trace_words import function_name

# -- Memory over a step --


def draw_held_bytes(runs: Mapping[str, tuple[Step, Sequence[Sequence[int]]]]) -> None:
    """A panel per stage: what it keeps for backward, in the course of each run's step.

    A run has its step, and per stage the bytes after each forward and backward.
    """
    step, _ = next(iter(runs.values()))
    num_stages = step.config.pp_size
    _, panels = plt.subplots(
        1, num_stages, figsize=(11, 2.9), sharey=True, layout="constrained", squeeze=False
    )
    for stage, panel in enumerate(panels[0]):
        for (name, (step, held)), colour in zip(runs.items(), (ORANGE, BLUE), strict=False):
            ends = [(step.events[stage][i].end - step.start) / 1e3 for i in step.work(stage)]
            times, kib = [0, *ends], [0, *(num_bytes / 1024 for num_bytes in held[stage])]
            panel.step(times, kib, where="post", color=colour, lw=1.8, label=name)
            panel.fill_between(times, kib, step="post", color=colour, alpha=0.15)
        panel.set(title=f"stage {stage}", xlabel="ms")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("KiB kept for backward")
    panels[0][0].legend(frameon=False, loc="upper left", fontsize=9)
    plt.show()


# -- Who waits for whom --


def draw_waiting(tables: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Each table, [stage][for which stage] in milliseconds, as a square; dark is long."""
    limit = max(max(map(max, table)) for table in tables.values())
    _, panels = plt.subplots(1, len(tables), figsize=(8, 3.4), layout="constrained")
    for panel, (title, table) in zip(panels, tables.items(), strict=True):
        panel.imshow(table, cmap="Blues", vmin=0, vmax=limit)
        for row, lengths in enumerate(table):
            for column, length in enumerate(lengths):
                colour = "white" if length > limit / 2 else "black"
                text = f"{length:.0f}" if length else ""
                panel.annotate(text, (column, row), ha="center", va="center", color=colour)
        panel.set(title=f"{title}: ms of waiting", xlabel="for stage", ylabel="stage")
        panel.set(xticks=range(len(table)), yticks=range(len(table)))
    plt.show()


# -- Gradient buffers --

LONG_ENOUGH = 40_000
"""Elements of a stretch that has room for its parameter's name."""


def draw_buffer(places: Sequence[tuple[str, int, int, int]], numel: int) -> None:
    """Where each gradient lies in the buffer, in the colour of its bucket.

    A place is (parameter's name, first element, the one after the last, bucket).
    """
    _, axes = plt.subplots(figsize=(10, 1.9), layout="constrained")
    for name, start, end, bucket in places:
        colour = nth_colour(bucket)
        stretch = [(start, end - start)]
        axes.broken_barh(stretch, (0, 1), facecolor=colour, edgecolor="white", lw=0.6)
        if end - start > LONG_ENOUGH:
            _, _, layer, *words = name.removesuffix(".weight").split(".")
            label = f"layer {layer}\n{words[-1].removeprefix('linear_')}"
            look = {"ha": "center", "va": "center", "fontsize": 7, "color": text_colour(colour)}
            axes.text((start + end) / 2, 0.5, label, **look)
    axes.set(xlim=(0, numel), yticks=[], xlabel="element of the buffer")
    axes.set_title("Where each gradient lies")
    buckets = sorted({bucket for *_, bucket in places})
    handles = [Patch(color=nth_colour(bucket), label=f"bucket {bucket}") for bucket in buckets]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.45)}
    axes.legend(handles=handles, ncols=len(buckets), frameon=False, **below)
    plt.show()


def draw_flights(runs: Mapping[str, RankTrace]) -> None:
    """The last two forwards and backwards of one rank, and below them the buckets on their way."""
    flights = {title: _flights(rank.events) for title, rank in runs.items()}
    _, panels = plt.subplots(len(runs), 1, figsize=(10, 3.9), layout="constrained")
    num_rows = max(map(len, flights.values()))
    for panel, (title, rank) in zip(panels, runs.items(), strict=True):
        work = {
            name: [event for event in rank.events if event.name == name][-2:]
            for name in ("forward-compute", "backward-compute")
        }
        origin = work["forward-compute"][0].start
        for (name, events), colour in zip(work.items(), (SKY, BLUE), strict=True):
            for event in events:
                start, length = (event.start - origin) / 1e3, (event.end - event.start) / 1e3
                panel.broken_barh([(start, length)], (0, 0.8), color=colour)
                label = f" {name[0].upper()}{event.action.microbatch}"
                panel.text(start, 0.4, label, color=text_colour(colour), va="center")
        for row, (bucket, launched, there) in enumerate(flights[title], 1):
            start, length = (launched - origin) / 1e3, (there - launched) / 1e3
            panel.broken_barh([(start, length)], (row, 0.7), color=nth_colour(bucket))
            look = {"ha": "right", "va": "center", "fontsize": 8}
            panel.text(start, row + 0.35, f"bucket {bucket} ", **look)
        panel.set(yticks=[], ylim=(num_rows + 0.9, -0.2), title=title)
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("ms; a bucket's bar goes from its launch to the end of the wait for it")
    plt.show()


def _flights(events: Sequence[Event]) -> list[tuple[int, float, float]]:
    """(bucket, launched, known to be there) of every launch."""
    launches = [event for event in events if event.name == "bucket-launch"]
    waits = [event for event in events if event.name == "collective-wait"]
    return [
        (bucket, launched.start, waited.end)
        for launched, waited in zip(launches, waits, strict=False)
        for bucket in launched.attributes["bucket"]
    ]


# -- Calls within calls --

KINDS = {
    "forward": (BLUE, "forward-compute"),
    "backward": (ORANGE, "backward-compute"),
    "gradients over ranks": (GREEN, "finalize-model-grads"),
    "optimizer": (PINK, "optimizer"),
    "the rest": ("#c8ced4", ""),
}
LETTERS = 150
"""How many letters a bar of full width has room for."""


def draw_calls(trace: Trace, ranks: Sequence[int]) -> None:
    """A panel per rank. Time runs to the right, each row is called by the row above it."""
    _, panels = plt.subplots(
        len(ranks), 1, figsize=(12, 3 * len(ranks)), layout="constrained", squeeze=False
    )
    for (panel,), number in zip(panels, ranks, strict=True):
        rank = trace.rank(number)
        _draw_calls_of(panel, rank.events)
        panel.set_title(f"rank {number}: stage {rank.coordinates['pp']}", loc="left")
    panels[-1][0].set_xlabel(f"ms since {function_name(rank.events[0])} was called (real times)")
    handles = [Patch(color=colour, label=kind) for kind, (colour, _) in KINDS.items()]
    above = {"loc": "lower right", "bbox_to_anchor": (1, 1)}
    panels[0][0].legend(handles=handles, ncols=len(KINDS), frameon=False, **above)
    plt.show()


def _draw_calls_of(axes: Any, events: Sequence[Event]) -> None:
    colour_of = {name: colour for colour, name in KINDS.values()}
    depths: dict[int | None, int] = {None: -1}
    colours: dict[int | None, str] = {None: colour_of[""]}
    origin, total = events[0].start, events[0].end - events[0].start
    for i, event in enumerate(events):
        depths[i] = depths[event.parent] + 1
        colours[i] = colour_of.get(event.name, colours[event.parent])
        start, length = event.start - origin, event.end - event.start
        bar = [(start / 1e3, length / 1e3)]
        axes.broken_barh(bar, (depths[i], 0.92), color=colours[i], ec="white", lw=0.4)
        name = function_name(event)
        if length / total * LETTERS > len(name):
            look = {"ha": "center", "va": "center", "fontsize": 6.5}
            middle = (start + length / 2) / 1e3
            axes.text(middle, depths[i] + 0.46, name, color=text_colour(colours[i]), **look)
    axes.set(ylim=(max(depths.values()) + 1, 0), yticks=[], xlim=(0, total / 1e3))
    axes.spines[["top", "right", "left"]].set_visible(False)
