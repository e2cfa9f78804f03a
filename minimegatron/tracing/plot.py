"""The step as a matplotlib picture: a row per stage, numbered bars, waiting and transfer told apart.

Megatron has no counterpart.

Colours are those of `planner.render_svg`: told apart under every common colour blindness, and by
their lightness in grey. Chunks are shades of the same colour, dark first.
"""

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimegatron.core.datasets.atomic_file import write_atomically
from minimegatron.core.orders.work import HIDDEN
from minimegatron.planner.actions import COMMUNICATE, KINDS, parts_of
from minimegatron.planner.svg_shapes import shade, text_colour
from minimegatron.tracing.lanes import exposed_of, in_flight
from minimegatron.tracing.step import Step
from minimegatron.tracing.trace_words import (
    late_words,
    milliseconds,
    pace_words,
    percent,
    step_title,
)

ROW, BAR = 1.0, 0.62
"""Height of a stage's row, and of the bars in it."""


@dataclass(frozen=True)
class Theme:
    """Colours of everything that is not a bar."""

    paper: str
    ink: str
    quiet: str
    track: str
    hatch: str
    transfer: str
    exposed: str


THEMES = {
    "light": Theme("#ffffff", "#1c2733", "#5b6773", "#f1f4f7", "#aab4be", "#9b4d86", "#b3261e"),
    "dark": Theme("#12181f", "#e6ebf0", "#9aa7b4", "#1b232b", "#55626f", "#e69ad0", "#ff8a80"),
}


def plot_step(
    step: Step,
    path: str | os.PathLike | None = None,
    *,
    plan: bool = False,
    theme: str = "light",
    width: float | None = None,
    dpi: int = 160,
) -> Any:
    """Draws one step; returns the matplotlib figure, and saves it if `path` is given.

    Args:
        plan: draw the plan as a thin strip under each row, at the run's pace or mean lengths.
        theme: "light" or "dark".
        width: inches; None for one that fits the number of bars.

    Raises ValueError for an unknown theme, and if matplotlib is not installed.
    """
    if theme not in THEMES:
        raise ValueError(f"theme is {theme!r}; use {' or '.join(map(repr, THEMES))}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("pictures need matplotlib; pip install 'minimegatron[plot]'") from error
    num_bars = max(len(step.work(rank)) for rank in range(len(step.stages)))
    width = width or min(max(9.0, 3 + 0.42 * num_bars), 24.0)
    size = (width, 0.97 + top_margin(step) + 0.52 * len(step.stages))
    figure = Figure(figsize=size, dpi=dpi, facecolor=THEMES[theme].paper)
    _Gantt(figure, step, THEMES[theme], plan).draw()
    if path is not None:
        format = Path(path).suffix.removeprefix(".") or "png"
        picture = io.BytesIO()
        figure.savefig(picture, format=format, dpi=dpi, facecolor=figure.get_facecolor())
        write_atomically(path, picture.getvalue(), makes_folder=False)
    return figure


def top_margin(step: Step) -> float:
    """Inches above the rows: for two lines of text, or three."""
    return 1.0 if late_words(step) else 0.78


class _Gantt:
    """One picture. Times are milliseconds from the step's first computation."""

    def __init__(self, figure: Any, step: Step, theme: Theme, plan: bool):
        self.figure, self.step, self.theme, self.plan = figure, step, theme, plan
        width, height = figure.get_size_inches()
        left, right, top, bottom = 0.72, 0.28, top_margin(step), 0.86
        self.axes = figure.add_axes(
            (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
        )
        self.length = step.makespan / 1e3
        if plan:
            self.length = max(self.length, float(step.simulation.makespan) / 1e3)
        self.points_per_ms = (width - left - right) * 72 / max(self.length, 1e-6)

    def draw(self) -> None:
        for rank in range(len(self.step.stages)):
            self._row(rank)
        self._frame()
        self._titles()
        self._legend()

    def _row(self, rank: int) -> None:
        step, axes = self.step, self.axes
        axes.broken_barh([(0, self.length)], self._span(rank), color=self.theme.track, zorder=0)
        for gap in step.gaps(rank):
            self._hatched(rank, gap.start, gap.end)
        for index in step.indices[rank]:
            event = step.events[rank][index]
            if event.name == "p2p-wait":
                self._transfer(rank, event.end - event.attributes.get("transfer", 0.0), event.end)
        for index in step.work(rank):
            event = step.events[rank][index]
            self._bar(rank, event.action, event.start - step.start, event.end - step.start)
        flights = [bar for lane in HIDDEN for bar in in_flight(step.events[rank], lane)]
        for bar in flights:
            self._strip(rank, bar.start, bar.end, self.theme.hatch)
        for bar in flights:  # over all of them: they may overlap
            self._strip(rank, *exposed_of(bar), self.theme.exposed)
        if self.plan:
            self._planned(rank)

    def _strip(self, rank: int, start: float, end: float, colour: str) -> None:
        """Above the bars: an all-to-all or a hop in flight, or its exposed part."""
        self.axes.broken_barh(
            [((start - self.step.start) / 1e3, (end - start) / 1e3)],
            (rank * ROW - BAR / 2 - 0.13, 0.1),
            facecolor=colour,
            zorder=3,
        )

    def _span(self, rank: int, height: float = BAR) -> tuple[float, float]:
        return (rank * ROW - height / 2, height)

    def _bar(self, rank: int, action: Any, start: float, end: float) -> None:
        parts = parts_of(action)  # of a pair the first one above
        for place, part in enumerate(parts):
            height = BAR / len(parts)
            low = rank * ROW - BAR / 2 + place * height
            self._bar_of(part, start, end, low, height)

    def _bar_of(self, action: Any, start: float, end: float, low: float, height: float) -> None:
        colour = shade(action.kind, action.chunk or 0, self.step.config.num_model_chunks)
        start, length = start / 1e3, (end - start) / 1e3
        self.axes.broken_barh(
            [(start, length)],
            (low, height),
            facecolor=colour,
            edgecolor=self.theme.paper,
            linewidth=0.8,
            zorder=3,
        )
        number = "?" if action.microbatch is None else str(action.microbatch)
        room = length * self.points_per_ms
        size = min(10.0 if height == BAR else 6.5, (room - 1.5) / (0.62 * len(number)))
        if size >= 4.0:
            self.axes.text(
                start + length / 2,
                low + height / 2,
                number,
                ha="center",
                va="center_baseline",
                fontsize=size,
                color=text_colour(colour),
                zorder=4,
            )

    def _hatched(self, rank: int, start: float, end: float) -> None:
        start = (start - self.step.start) / 1e3
        length = (end - self.step.start) / 1e3 - start
        if length * self.points_per_ms < 1.5:
            return
        self.axes.broken_barh(
            [(start, length)],
            self._span(rank),
            facecolor="none",
            edgecolor=self.theme.hatch,
            hatch="////",
            linewidth=0,
            zorder=1,
        )

    def _transfer(self, rank: int, start: float, end: float) -> None:
        start = max(start, self.step.start)
        if end <= start:
            return
        length = max((end - start) / 1e3, 1.2 / self.points_per_ms)
        self.axes.broken_barh(
            [((end - self.step.start) / 1e3 - length, length)],
            self._span(rank),
            facecolor=self.theme.transfer,
            zorder=2,
        )

    def _planned(self, rank: int) -> None:
        simulation, num_chunks = self.step.simulation, self.step.config.num_model_chunks
        for action, start, end in zip(
            simulation.plan.ranks[rank], simulation.starts[rank], simulation.ends[rank], strict=True
        ):
            if action.kind == COMMUNICATE:
                continue
            parts = parts_of(action)  # a pair's two start and end together: one below the other
            height = 0.13 / len(parts)
            for place, part in enumerate(parts):
                self.axes.broken_barh(
                    [(float(start) / 1e3, float(end - start) / 1e3)],
                    (rank * ROW + BAR / 2 + 0.05 + place * height, height),
                    facecolor=shade(part.kind, part.chunk or 0, num_chunks),
                    edgecolor=self.theme.paper,
                    linewidth=0.8 / len(parts),
                    zorder=3,
                )

    def _frame(self) -> None:
        axes, num_stages = self.axes, len(self.step.stages)
        axes.set_facecolor(self.theme.paper)
        axes.set_xlim(0, self.length)
        axes.set_ylim(num_stages * ROW - (0.44 if self.plan else 0.5), -0.5)
        axes.set_yticks([rank * ROW for rank in range(num_stages)])
        axes.set_yticklabels([f"stage {rank}" for rank in range(num_stages)], fontsize=9.5)
        axes.tick_params(axis="y", length=0, colors=self.theme.ink)
        axes.tick_params(axis="x", length=3, colors=self.theme.quiet, labelsize=8.5)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(
            "ms since the step's first computation", fontsize=8.5, color=self.theme.quiet
        )
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(self.theme.hatch)

    def _titles(self) -> None:
        step = self.step
        how = pace_words(step.pace) or "real times"
        title = f"{step_title(step.config, step.run)}  ({how})"
        measured = f"{percent(step.bubble_over_total)} of all time is bubble"
        if len(step.stages) == 1:
            measured = (
                f"no pipeline, {percent(step.bubble_over_total)} of all time between its calls"
            )
        elif step.formulas is not None:
            formula = step.formulas[1]
            text = formula.text.replace(" - ", " \u2212 ")
            measured += f"; the formula {text} gives {percent(formula.value)}"
        ranks = f"{len(step.stages)} rank{'s' * (len(step.stages) > 1)}"
        figures = f"measured on {ranks}: {milliseconds(step.makespan)}, {measured}"
        inset = self.axes.get_position().x0
        height = self.figure.get_size_inches()[1]
        room = self.points_per_ms * self.length
        for text, size, drop, colour, weight in (
            (title, 12, 0.26, self.theme.ink, "bold"),
            (figures, 9.5, 0.52, self.theme.quiet, "normal"),
            (late_words(step), 9.5, 0.74, self.theme.quiet, "normal"),
        ):
            letter = 0.66 if weight == "bold" else 0.58
            size = min(size, room / (letter * max(len(text), 1)))
            self.figure.text(
                inset, 1 - drop / height, text, fontsize=size, color=colour, weight=weight
            )

    def _legend(self) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        num_chunks, theme = self.step.config.num_model_chunks, self.theme
        handles = []
        for kind in self.step.kinds:
            words = KINDS[kind].words
            for chunk in range(num_chunks):
                label = words if num_chunks == 1 else f"{words}, chunk {chunk}"
                handles.append(Patch(facecolor=shade(kind, chunk, num_chunks), label=label))
        handles.append(
            Patch(
                facecolor=theme.track,
                edgecolor=theme.hatch,
                hatch="////",
                lw=0,
                label="idle, waiting",
            )
        )
        handles.append(Patch(facecolor=theme.transfer, label="transfer"))
        if self.plan:
            handles.append(
                Line2D([], [], color=theme.quiet, linewidth=3, label="plan (thin strips)")
            )
        inset = self.axes.get_position().x0
        self.figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(inset, 0.0),
            ncols=len(handles),
            frameon=False,
            fontsize=8.5,
            labelcolor=theme.ink,
            handlelength=1.6,
            handleheight=1.1,
            borderaxespad=0.4,
            borderpad=0,
            columnspacing=1.6,
        )
