"""The lanes of a recorded step as text: one line each, on one time axis, with a legend below.

Torch-free. Megatron has no counterpart.
"""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from textwrap import wrap

from minimegatron.core.orders.work import HIDDEN
from minimegatron.planner.actions import FORWARD, KINDS
from minimegatron.planner.plan_report import number_words, tick_step
from minimegatron.tracing.lanes import (
    BATCH,
    COLLECTIVE,
    COMPUTE,
    SIGNS,
    WAITS,
    Bar,
    Lane,
    exposed_of,
    has_communicators,
    lanes_of,
)
from minimegatron.tracing.step import Step

IDLE, MIXED, SUMMED = "·", "x", "#"
UNDER_WAY, EXPOSED = "-", "/"
"""Of an all-to-all or a hop: between its start and the end of the wait for it; and that wait."""
LEAST_WIDTH = 40
TICK_COLUMNS = 12
"""Columns from one number of the axis to the next, at least."""


def render_lanes(step: Step, width: int = 100) -> list[str]:
    """The lines, of at most `width` columns each. Raises ValueError for fewer than 40.

    A bar has its name where it is wide enough, and one column at least. The axis is in milliseconds,
    from the beginning of the step's first bar.
    """
    if width < LEAST_WIDTH:
        raise ValueError(f"--width is {width}; give {LEAST_WIDTH} or more")
    stages = lanes_of(step)
    lanes = [lane for of_stage in stages for lane in of_stage]
    picture = _LaneGrid(lanes, width)
    lines = [picture.axis().rstrip(), *map(picture.line, lanes)]
    legend = ["", *_signs(step, lanes), *_meaning(step, lanes)]
    if (needed := picture.width_for_names(lanes)) > width:
        legend.append(f"With --width {needed}, every piece of work has its name.")
    return [*lines, *(line for words in legend for line in wrap(words, width) or [""])]


class _LaneGrid:
    """Time t is drawn at column round((t - origin) * scale)."""

    def __init__(self, lanes: list[Lane], width: int):
        self.indent = 2 + max(len(_title(lane)) for lane in lanes)
        self.num_columns = max(width - self.indent, 1)
        bars = [bar for lane in lanes for bar in lane.bars]
        self.origin = min((bar.start for bar in bars), default=0.0)
        self.length = max((bar.end for bar in bars), default=0.0) - self.origin
        self.scale = self.num_columns / self.length if self.length else 0.0

    def axis(self) -> str:
        ticks = [" "] * self.num_columns
        step = tick_step(Fraction(self.length) / 1000 * TICK_COLUMNS / self.num_columns or 1)
        for number in range(int(self.length / 1000 / step) + 1):
            text = number_words(number * step)
            column = self._column(self.origin + float(1000 * number * step))
            if column + len(text) <= self.num_columns:
                ticks[column : column + len(text)] = text
        return "ms".ljust(self.indent) + "".join(ticks)

    def line(self, lane: Lane) -> str:
        cells = [IDLE] * self.num_columns
        if lane.name in HIDDEN:
            return _title(lane).ljust(self.indent) + "".join(self._in_flight(cells, lane))
        for bar in lane.bars:
            start, end = self._column(bar.start), self._column(bar.end)
            if start == end:
                start = min(start, self.num_columns - 1)
                end = start + 1
                if cells[start] != IDLE:
                    continue  # a longer bar ends there
            label = bar.label if len(bar.label) <= end - start else ""
            cells[start:end] = label.ljust(end - start, _fill(bar))
        return _title(lane).ljust(self.indent) + "".join(cells)

    def _in_flight(self, cells: list[str], lane: Lane) -> list[str]:
        """Under way, and over that, where it was waited for."""
        spans = [(bar.start, bar.end, UNDER_WAY) for bar in lane.bars]
        spans += [(*exposed_of(bar), EXPOSED) for bar in lane.bars]
        for start, end, sign in spans:
            first = min(self._column(start), self.num_columns - 1)
            last = max(self._column(end), first + (sign == UNDER_WAY))
            cells[first:last] = sign * (last - first)
        return cells

    def width_for_names(self, lanes: list[Lane]) -> int:
        """From how many columns on each piece of work is wide enough for its name."""
        needed = [
            # A bar loses up to one column by rounding.
            (len(bar.label) + 1) * self.length / (bar.end - bar.start)
            for lane in lanes
            for bar in lane.bars
            if bar.kind in KINDS and bar.end > bar.start
        ]
        return self.indent + ceil(max(needed, default=0))

    def _column(self, time: float) -> int:
        return round((time - self.origin) * self.scale)


def _title(lane: Lane) -> str:
    return f"rank {lane.rank}" if lane.name == COMPUTE else f"  {lane.name}"


def _fill(bar: Bar) -> str:
    if bar.kind in KINDS:
        return KINDS[bar.kind].fill
    if bar.kind == COLLECTIVE:
        return SUMMED
    signs = {SIGNS[event.attributes["doing"]] for event in bar.events}
    return signs.pop() if len(signs) == 1 else MIXED


# -- Words --


def _signs(step: Step, lanes: list[Lane]) -> Iterator[str]:
    """What the characters of the bars say."""
    work = [
        f"{KINDS[kind].letter}0{KINDS[kind].fill} "
        + (
            f"{KINDS[kind].words} of microbatch 0"
            if kind == FORWARD
            else f"its {KINDS[kind].words}"
        )
        for kind in step.kinds
    ]
    chunks = " F0' is F0 of chunk 1." if step.config.num_model_chunks > 1 else ""
    yield f"{', '.join(work)}, {IDLE} idle.{chunks}"
    for name in dict.fromkeys(lane.name for lane in lanes if lane.name in HIDDEN):
        yield (
            f"{name}: {UNDER_WAY} one is in flight, from its start to the end of the wait for "
            f"it; {EXPOSED} it is waited for (exposed)."
        )
    others = (COMPUTE, *HIDDEN)
    bars = [bar for lane in lanes if lane.name not in others for bar in lane.bars]
    if any(bar.kind != COLLECTIVE for bar in bars):
        yield (
            ">F0 sends what F0 made, <F0 receives what F0 needs; >B0 and <B0 likewise, a gradient. "
            "A bar too narrow for its name has its sign alone."
        )
    if any(bar.kind == BATCH for bar in bars):
        yield f"{MIXED} is a batch that sends and receives."
    sums = sorted({(bar.label, bar.events[0].name) for bar in bars if bar.kind == COLLECTIVE})
    if sums:
        yield f"{', '.join(f'{label}{SUMMED} {name}' for label, name in sums)}."


def _meaning(step: Step, lanes: list[Lane]) -> Iterator[str]:
    """What the times of the lanes are."""
    if has_communicators(step):
        names = sorted({lane.name for lane in lanes} - {COMPUTE, *HIDDEN})
        pair = next((name for name in names if ":" in name), None)
        if pair is not None:
            a, b = pair.split(" ")[1].split(":")
            yield f"{pair} is the NCCL communicator of ranks {a} and {b} alone."
        if any(":" not in name for name in names):
            group = next(name for name in names if ":" not in name)
            yield f"{group} is the communicator of a whole group, with its ranks."
        yield (
            "A communication's bar begins when this GPU has done what comes before it in the "
            "program and in its communicator. The bar ends when the communication is done on this "
            "GPU, so it includes the wait for other ranks."
        )
    elif any(lane.bars for lane in lanes if lane.name == WAITS):
        clock = "program" if step.stages[0].device == "cpu" else "GPU's compute stream"
        yield (
            f"{WAITS}: the {clock} was in a call that waits for a message, or in a collective. These "
            "are no times of a communicator; a recording of GPUs over NCCL has a lane for each."
        )
