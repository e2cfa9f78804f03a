"""A timeline for the terminal: one line per rank (and chunk), then the figures beside formulas.

Megatron has no counterpart.
"""

import textwrap
from collections.abc import Iterator
from fractions import Fraction
from itertools import groupby
from math import ceil, gcd, lcm

from minimegatron.planner.actions import (
    BACKWARD,
    COMMUNICATE,
    FORWARD,
    KINDS,
    PAIR,
    Action,
    Time,
    parts_of,
)
from minimegatron.planner.layer_costs import has_lanes, lanes_of
from minimegatron.planner.layer_plan import ALL_TO_ALL, COMPUTE, RING_HOP, LayerTimeline
from minimegatron.planner.plan_report import (
    cost_words,
    figures,
    formula_words,
    gap_words,
    number_words,
    rank_figures,
    ring_table,
    tick_step,
    title,
    ways_table,
)
from minimegatron.planner.simulator import Simulation

IDLE = "·"
LANES, EXPOSED = {ALL_TO_ALL: "a2a", RING_HOP: "ring"}, "/"
"""Of the lines of all-to-alls and hops: their names, and what stands where nothing hides one."""
NO_COLOUR = "\033[0m"
MOST_LINES = 200
"""A timeline of more lines than these is squeezed into one block."""


def render_text(simulation: Simulation, width: int = 100, colour: bool = False) -> str:
    """The timeline in at most `width` columns, with the table and the figures below it.

    Every line fits `width`: a table that is wider goes on in a second one below it. Bars carry
    microbatch numbers where they are wide enough. `colour` adds terminal colours.
    """
    lines = [title(simulation), cost_words(simulation), ""]
    lines += _TextGantt(simulation, width).lines(colour)
    lines.append("")
    lines += _aligned(_rank_table(simulation), width)
    lines.append("")
    lines += _figure_lines(simulation)
    if ways := ways_table(simulation):
        lines += ["", *_aligned(ways, width)]
        if simulation.plan.config.pp_size == 1:
            lines.append("not joined: a step's end is not waited for, as on a GPU")
    if rings := ring_table(simulation):
        lines += ["", *_aligned(rings, width)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


# -- Bars --


class _TextGantt:
    """Bars on a grid of characters. Time t is drawn at column round(t * scale).

    A step too long for one line goes on in further blocks; one too long even for that is squeezed
    into one block, without numbers.
    """

    def __init__(self, simulation: Simulation, width: int):
        self.simulation = simulation
        config = simulation.plan.config
        self.num_ranks, self.num_chunks = config.pp_size, config.num_model_chunks
        self.last_microbatch = config.num_microbatches - 1
        self.labels = [self._label_of(rank, 0) for rank in range(self.num_ranks)]
        self.indent = len(self.labels[-1]) + 2
        self.block_width = width - self.indent
        shortest = self._shortest_bars()
        self.scale = self._choose_scale(shortest)
        self.num_columns = self._column(simulation.makespan)
        least = min((int(time * self.scale) for time in shortest), default=0)
        self.letters = least >= len(f"F{self.last_microbatch}")
        self.numbers = least >= len(f"{self.last_microbatch}")

    def _label_of(self, rank: int, chunk: int) -> str:
        width = len(f"rank {self.num_ranks - 1}")
        label = (f"rank {rank}" if chunk == 0 else "").ljust(width)
        return label if self.num_chunks == 1 else f"{label} chunk {chunk}"

    def _shortest_bars(self) -> set[Time]:
        """Every length of bar that occurs, but 0; of a pair on one line, that of its halves."""
        lengths = set()
        for kind, of_ranks in self.simulation.times.items():
            if kind == FORWARD or kind in self.simulation.kinds:
                lengths.update(time for of_rank in of_ranks for time in of_rank.values())
            elif kind == PAIR:
                lengths.update(
                    time if key[0][1] != key[1][1] else _half(time)
                    for of_rank in of_ranks
                    for key, time in of_rank.items()
                )
        return lengths - {0}

    def _choose_scale(self, lengths: set[Time]) -> Time:
        """Columns per unit of time: as many as labels need, and more if one block has room."""
        makespan = self.simulation.makespan
        if not lengths:
            return 1
        # Two-digit numbers side by side would run together: they get one more column.
        num_digits = len(str(self.last_microbatch))
        needed = Fraction(num_digits + (num_digits > 1)) / Fraction(min(lengths))
        if has_lanes(self.simulation):
            lanes = lanes_of(self.simulation, 0)  # an all-to-all, or a hop, has a column at least
            exchanges = {n.node.length for n in lanes.nodes if n.node.lane != COMPUTE} - {0}
            needed = max([needed, *(1 / Fraction(length) for length in exchanges)])
        unit = _common_unit(lengths)
        if unit is not None:
            # Every bar gets a whole number of columns.
            most = len(f"F{self.last_microbatch}") + 1
            fitting = min(int(self.block_width * unit / makespan), most) / unit
            needed = ceil(needed * unit) / unit
            # No bar of one unit is cut by the end of a block.
            self.block_width -= self.block_width % int(needed * unit)
        else:
            fitting = Fraction(self.block_width) / Fraction(makespan)
        if fitting >= needed:
            return fitting
        num_blocks = ceil(needed * Fraction(makespan) / self.block_width)
        if num_blocks * self.num_ranks * self.num_chunks <= MOST_LINES:
            return needed
        return Fraction(self.block_width) / Fraction(makespan)

    def _column(self, time: Time) -> int:
        return round(float(time) * float(self.scale))

    def lines(self, colour: bool) -> Iterator[str]:
        rows = [self._rows(rank) for rank in range(self.num_ranks)]
        axis = self._axis()
        for first in range(0, max(self.num_columns, 1), self.block_width):
            block = slice(first, first + self.block_width)
            yield "time".ljust(self.indent) + "".join(axis[block])
            for of_chunks in rows:
                for name, cells, kinds in of_chunks:
                    text = _paint(cells[block], kinds[block]) if colour else "".join(cells[block])
                    yield name.ljust(self.indent) + text
        for words in self._legend():
            for line in textwrap.wrap(words, self.block_width, subsequent_indent="  "):
                yield f"{'':{self.indent}}{line}"

    def _rows(self, rank: int) -> list[tuple[str, list[str], list[str | None]]]:
        """Per chunk and lane: its name, the characters of its line, and the kind of work of each."""
        simulation = self.simulation
        rows: list[tuple[list[str], list[str | None]]] = [
            ([IDLE] * self.num_columns, [None] * self.num_columns) for _ in range(self.num_chunks)
        ]
        for index, action in enumerate(simulation.plan.ranks[rank]):
            if action.kind == COMMUNICATE:
                continue
            start = self._column(simulation.starts[rank][index])
            end = self._column(simulation.ends[rank][index])
            for chunk, (cells, kinds) in enumerate(rows):
                # The rank is busy, if only with another chunk.
                cells[start:end] = " " * (end - start)
                here = [part for part in parts_of(action) if part.chunk == chunk]
                # Two parts of a pair that share a line share the bar.
                for number, part in enumerate(here):
                    first = start + (end - start) * number // len(here)
                    width = start + (end - start) * (number + 1) // len(here) - first
                    bar = self._label(part, width).ljust(width, KINDS[part.kind].fill)
                    cells[first : first + width] = bar
                    kinds[first : first + width] = [part.kind] * width
        named = [(self._label_of(rank, chunk), *row) for chunk, row in enumerate(rows)]
        if has_lanes(simulation):
            lanes = lanes_of(simulation, rank)
            named += [(f"  {LANES[x]}", *self._lane(lanes, x)) for x in lanes.hidden_lanes]
        return named

    def _lane(self, lanes: LayerTimeline, name: str) -> tuple[list[str], list[str | None]]:
        """The line of all-to-alls or hops: a column shows what there is at its middle."""
        cells: list[str] = [IDLE] * self.num_columns
        kinds: list[str | None] = [None] * self.num_columns
        exchanges = [n for n in lanes.nodes if n.node.lane == name]
        for stretches, is_exposed in (
            ([(timed, timed.start, timed.end) for timed in exchanges], False),
            (lanes.exposed_parts([name]), True),
        ):
            for timed, start, end in stretches:
                first, last = (ceil(float(t) * float(self.scale) - 0.5) for t in (start, end))
                kind = timed.node.kind
                cells[first:last] = (EXPOSED if is_exposed else KINDS[kind].fill) * (last - first)
                kinds[first:last] = [None if is_exposed else kind] * (last - first)
        return cells, kinds

    def _label(self, action: Action, width: int) -> str:
        number = str(action.microbatch)
        label = f"{KINDS[action.kind].letter}{number}" if self.letters else number
        return label if (self.letters or self.numbers) and len(label) <= width else ""

    def _axis(self) -> list[str]:
        step = tick_step(12 / Fraction(self.scale))
        ticks = [" "] * (self.num_columns + 12)
        time: Time = 0
        while self._column(time) <= self.num_columns:
            text = number_words(time)
            column = self._column(time)
            # A number that the end of a block would cut is left out.
            if column % self.block_width + len(text) <= self.block_width:
                ticks[column : column + len(text)] = text
            time += step
        return ticks[: self.num_columns]

    def _legend(self) -> Iterator[str]:
        words = []
        for name in self.simulation.kinds:
            kind = KINDS[name]
            if not self.numbers:
                words.append(f"{kind.fill} {kind.words}")
                continue
            sample = f"{kind.letter}0" if self.letters else f"0{kind.fill}"
            is_first = name == FORWARD
            its, of_which = ("", " of microbatch 0") if is_first else ("its ", "")
            words.append(f"{sample} {its}{kind.words}{of_which}")
        meaning = ", ".join(words)
        if not self.numbers and len(words) > 1:
            meaning += " (too many to number)"
        yield f"{meaning}, {IDLE} idle"
        hidden = lanes_of(self.simulation, 0).hidden_lanes if has_lanes(self.simulation) else ()
        for lane in hidden:
            fills = " ".join(KINDS[name].fill for name in (FORWARD, BACKWARD))
            words = {ALL_TO_ALL: "all-to-alls", RING_HOP: "hops of attention's ring"}[lane]
            yield (
                f"{LANES[lane]}: {words}, {fills} hidden by what is computed beside, {EXPOSED} exposed"
            )
        if PAIR in self.simulation.times:
            yield "a pair is one step, drawn side by side or in two chunks" + (
                "; it may hold a layer more" * self.simulation.plan.pairs_go_by_layers
            )
            if self.simulation.plan.pairs_go_by_layers and not hidden:
                yield "here as long as both; --layer-nodes shows all-to-alls, and what hides them"


def _half(time: Time) -> Time:
    return time / 2 if isinstance(time, float) else Fraction(time) / 2


def _paint(cells: list[str], kinds: list[str | None]) -> str:
    runs = groupby(zip(cells, kinds, strict=True), key=lambda cell: cell[1])
    return "".join(
        (KINDS[kind].terminal + text + NO_COLOUR) if kind else text
        for kind, text in ((kind, "".join(c for c, _ in run)) for kind, run in runs)
    )


def _common_unit(times: set[Time]) -> Fraction | None:
    """The largest unit that divides all of them; None where there is none (floats)."""
    if any(isinstance(time, float) for time in times):
        return None
    fractions = {Fraction(time) for time in times}
    denominator = lcm(*(f.denominator for f in fractions))
    return Fraction(gcd(*(int(f * denominator) for f in fractions)), denominator)


# -- Figures --


def _rank_table(simulation: Simulation) -> list[list[str]]:
    has_phases = any(a.phase for actions in simulation.plan.ranks for a in actions)
    head = ["", "warm-up", "steady", "cool-down"] if has_phases else [""]
    rows = [[*head, "busy", "idle", "in flight", "longest wait"]]
    for rank in range(simulation.plan.config.pp_size):
        row = rank_figures(simulation, rank)
        in_flight = str(row.peak_in_flight)
        if row.peak_formula is not None:
            sign = "=" if row.peak_formula.value == row.peak_in_flight else "not"
            in_flight += f" {sign} {row.peak_formula.text}"
        rows.append(
            [
                f"rank {rank}",
                *(row.phases.values() if has_phases else ()),
                number_words(row.busy),
                number_words(row.idle),
                in_flight,
                gap_words(simulation, row.longest_gap) if row.longest_gap else "-",
            ]
        )
    return rows


def _aligned(rows: list[list[str]], width: int) -> list[str]:
    """The rows as lines. Columns that do not fit stand below, behind the first column again."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = len(widths)
    while shown > 2 and sum(widths[:shown]) + 2 * (shown - 1) > width:
        shown -= 1
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths[:shown], strict=False)) for row in rows
    ]
    if shown == len(widths):
        return lines
    return [*lines, "", *_aligned([[row[0], *row[shown:]] for row in rows], width)]


def _figure_lines(simulation: Simulation) -> list[str]:
    rows = figures(simulation)
    name_width = max(len(row.name) for row in rows)
    text_width = max(len(row.text) for row in rows[:-1])
    lines = [
        f"{row.name:{name_width}}  {row.text:>{text_width}}  {formula_words(row)}" for row in rows
    ]
    num_bytes = simulation.plan.bytes_sent()
    if num_bytes:
        lines.append(f"{'bytes sent':{name_width}}  {num_bytes:,}")
    return lines
