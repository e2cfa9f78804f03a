"""A timeline as one SVG picture that needs nothing else: no script, font or file.

Megatron has no counterpart.

Colours come from the table `KINDS`: blue is forward and orange is backward, told apart under every
common colour blindness and in grey (Okabe and Ito 2008); chunks are shades, dark first. A pair is a
bar of two halves, the first part above. The picture follows the reader's light or dark
scheme. Each bar and each gap says what it is when pointed at.
"""

from collections.abc import Iterator
from fractions import Fraction
from xml.sax.saxutils import escape

from minimegatron.core.orders.work import COMPUTE
from minimegatron.planner.actions import (
    COMMUNICATE,
    COOLDOWN,
    KINDS,
    PAIR,
    STEADY,
    WARMUP,
    Action,
    Time,
    parts_of,
)
from minimegatron.planner.layer_costs import has_lanes, lanes_of
from minimegatron.planner.plan_report import (
    LANE_WORDS,
    cost_words,
    exposed_words,
    figures,
    formula_words,
    gap_words,
    number_words,
    percent,
    rank_figures,
    tick_step,
    title,
)
from minimegatron.planner.render_layers import (
    HATCHED,
    LANE_GAP,
    LANE_HEIGHT,
    lane_shapes,
    lane_tops,
)
from minimegatron.planner.simulator import Simulation
from minimegatron.planner.svg_shapes import STYLE, label, rect, shade, text_colour, tipped

PHASES = {WARMUP: ("warm-up", "7 3"), STEADY: ("steady", ""), COOLDOWN: ("cool-down", "2 3")}


# -- The picture --

MARGIN = 24
LABEL_WIDTH = 56
RIGHT_WIDTH = 150
ROW_HEIGHT, BAR_HEIGHT = 38, 26
TOP = 96
LEAST_WIDTH, MOST_WIDTH = 640, 1600
DIGIT_WIDTHS = {"num": 6.6, "num small": 5.3}
"""Class of a bar's number -> width of a digit, larger first."""
LETTER_WIDTH = 7.2
"""A generous guess: which font the reader has is not known."""


def render_svg(simulation: Simulation, critical_path: bool = False) -> str:
    """The timeline as SVG text. `critical_path` outlines the actions that set its length."""
    return _Picture(simulation, critical_path).draw()


class _Picture:
    def __init__(self, simulation: Simulation, critical_path: bool):
        self.simulation, self.config = simulation, simulation.plan.config
        self.critical = set(simulation.critical_path()) if critical_path else set()
        self.num_ranks = self.config.pp_size
        self.lanes = []
        if has_lanes(simulation):
            self.lanes = [lanes_of(simulation, rank) for rank in range(self.num_ranks)]
        self.left = MARGIN + LABEL_WIDTH
        self.chart_width = self._chart_width()
        makespan = simulation.makespan
        self.scale = self.chart_width / float(makespan) if makespan else 1.0
        self.right = self.left + self.chart_width
        self.width = self.right + RIGHT_WIDTH + MARGIN
        self.lane_names = self.lanes[0].hidden_lanes if self.lanes else []
        below = len(self.lane_names) * (LANE_HEIGHT + LANE_GAP)
        self.row_height = ROW_HEIGHT + (below + 14 if self.lanes else 0)
        self.bottom = TOP + self.num_ranks * self.row_height
        self.number_classes = {kind: self._number_class(kind) for kind in self._shown_kinds()}
        self.figures = figures(simulation)
        self.height = self.bottom + 92 + 20 * (len(self.figures) + 1) + MARGIN

    def _chart_width(self) -> float:
        # Wide enough for a number in the shortest bar, within what a page can show.
        lengths = set().union(*(self._lengths(kind) for kind in self._shown_kinds()))
        if not lengths:
            return LEAST_WIDTH
        if self.lanes:  # a node of a layer has its microbatch's number
            nodes = (timed.node for lanes in self.lanes for timed in lanes.nodes)
            lengths = {node.length for node in nodes if node.lane == COMPUTE and node.length}
        digits = len(str(self.config.num_microbatches - 1))
        wanted = (
            (DIGIT_WIDTHS["num"] * digits + 8)
            * float(self.simulation.makespan)
            / float(min(lengths))
        )
        return round(min(max(wanted, LEAST_WIDTH), MOST_WIDTH))

    def _shown_kinds(self) -> list[str]:
        """The kinds of work that have bars: those of the plan, and pairs."""
        has_pairs = PAIR in self.simulation.times
        return [*self.simulation.kinds, PAIR] if has_pairs else self.simulation.kinds

    def _lengths(self, kind: str) -> set[Time]:
        times = self.simulation.times.get(kind, [])
        return {time for of_rank in times for time in of_rank.values() if time}

    def _number_class(self, kind: str) -> str | None:
        """The largest type in which every bar of this kind holds its number, if there is one."""
        digits = len(str(self.config.num_microbatches - 1))
        least = self.scale * float(min(self._lengths(kind), default=0))
        fitting = [css for css, width in DIGIT_WIDTHS.items() if width * digits + 2 <= least]
        return fitting[0] if fitting else None

    def _x(self, time: Time) -> float:
        return self.left + float(time) * self.scale

    def draw(self) -> str:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" '
            'aria-labelledby="title description" style="max-width:100%;height:auto">',
            f'<title id="title">{escape(title(self.simulation))}</title>',
            f'<desc id="description">{escape(self._description())}</desc>',
            f"<style>{STYLE}</style>",
            '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><line class="hatch" x1="0" y1="0" x2="0" y2="6"/>'
            f"</pattern>{HATCHED if self.lanes else ''}</defs>",
            f'<rect class="paper" width="{self.width}" height="{self.height}" rx="6"/>',
            *self._header(),
            *self._axis(),
        ]
        for rank in range(self.num_ranks):
            parts += self._row(rank)
        parts += self._legend(self.bottom + 52)
        parts += self._footer(self.bottom + 92)
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _description(self) -> str:
        return (
            f"{cost_words(self.simulation)}. "
            + "; ".join(f"{f.name} {f.text} {formula_words(f)}".strip() for f in self.figures)
            + ". Peak microbatches in flight per stage: "
            + ", ".join(str(self.simulation.plan.peak_in_flight(r)) for r in range(self.num_ranks))
            + "."
        )

    def _header(self) -> Iterator[str]:
        name, _, rest = title(self.simulation).partition(", ")
        yield label(MARGIN, 40, name, "title")
        yield label(MARGIN, 62, f"{rest} · {cost_words(self.simulation)}", "quiet")
        idle = percent(self.simulation.bubble_over_total)
        yield label(self.width - MARGIN, 40, f"{idle} idle", "title end")
        yield label(self.width - MARGIN - 74, TOP - 10, "idle", "quiet end")
        yield label(self.width - MARGIN, TOP - 10, "in flight", "quiet end")

    def _axis(self) -> Iterator[str]:
        y = self.bottom + 8
        yield f'<line class="rule" x1="{self.left}" y1="{y}" x2="{self.right}" y2="{y}"/>'
        yield label(MARGIN, y + 18, "time", "quiet")
        step = tick_step(Fraction(56) / Fraction(self.scale))
        time: Time = 0
        while time <= self.simulation.makespan:
            x = self._x(time)
            yield f'<line class="rule" x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + 5}"/>'
            yield label(x, y + 18, number_words(time), "quiet middle")
            time += step

    # -- One rank --

    def _row(self, rank: int) -> Iterator[str]:
        top = TOP + rank * self.row_height
        row = rank_figures(self.simulation, rank)
        yield f'<g id="rank-{rank}">'
        yield label(MARGIN, top + 18, f"stage {rank}", "bold")
        yield rect(self.left, top, self.chart_width, BAR_HEIGHT, 'class="track"')
        for gap in self.simulation.gaps(rank):
            x, width = self._x(gap.start), float(gap.length) * self.scale
            tip = f"stage {rank} idle: {gap_words(self.simulation, gap, noun='stage')}"
            yield tipped(rect(x, top, width, BAR_HEIGHT, 'fill="url(#idle)"'), tip)
        for index, action in enumerate(self.simulation.plan.ranks[rank]):
            if action.kind != COMMUNICATE:
                bar = self._bar(rank, index, action, top)
                yield f'<g opacity="0.3">{bar}</g>' if self.lanes else bar
        below = top + BAR_HEIGHT + 4
        if self.lanes:
            for below in lane_tops(top, len(self.lane_names)):
                yield rect(self.left, below, self.chart_width, LANE_HEIGHT, 'class="track"')
            below += LANE_HEIGHT + 2
            yield from lane_shapes(self.lanes[rank], self._x, top, self.config.num_model_chunks)
            yield label(self.left, below + 14, exposed_words(self.lanes[rank]), "quiet small")
        yield from self._phase_lines(rank, below)
        yield label(self.width - MARGIN - 74, top + 18, number_words(row.idle), "end")
        yield label(self.width - MARGIN, top + 18, str(row.peak_in_flight), "end bold")
        yield "</g>"

    def _bar(self, rank: int, index: int, action: Action, top: float) -> str:
        start, end = self.simulation.starts[rank][index], self.simulation.ends[rank][index]
        x, width = self._x(start), float(end - start) * self.scale
        parts = parts_of(action)
        height = BAR_HEIGHT // len(parts)
        shapes = [
            shape
            for number, part in enumerate(parts)
            for shape in self._bar_of(action.kind, part, x, width, top + number * height, height)
        ]
        if (rank, index) in self.critical:
            outline = rect(
                x + 1.5, top + 1, max(width - 3, 0.4), BAR_HEIGHT - 2, 'class="critical"'
            )
            shapes.insert(1 if len(parts) == 1 else len(shapes), outline)
        return tipped("".join(shapes), self._tip(rank, action, start, end))

    def _bar_of(
        self, kind: str, part: Action, x: float, width: float, y: float, height: float
    ) -> Iterator[str]:
        """The shapes of single work, or of one half of a pair: `kind` is that of the whole."""
        fill = shade(part.kind, part.chunk, self.config.num_model_chunks)
        # Half a pixel of paper on either side keeps neighbours apart, whatever their colours.
        inset = 0.5 if width > 3 else 0
        yield rect(x + inset, y, max(width - 2 * inset, 0.4), height, f'rx="2" fill="{fill}"')
        css = self.number_classes[kind]
        if css and width and not self.lanes:  # else the nodes before it have the number
            css = css if kind != PAIR else "num small"
            baseline = y + 17 if kind != PAIR else y + height - 3.5
            yield (
                f'<text class="{css}" x="{x + width / 2:.2f}" y="{baseline}" '
                f'style="fill:{text_colour(fill)}">{part.microbatch}</text>'
            )

    def _tip(self, rank: int, action: Action, start: Time, end: Time) -> str:
        has_chunks = self.config.num_model_chunks > 1
        work = " and ".join(
            f"{KINDS[part.kind].words} of microbatch {part.microbatch}"
            + (f", chunk {part.chunk}" if has_chunks else "")
            for part in parts_of(action)
        )
        phase = f" ({PHASES[action.phase][0]})" if action.phase in PHASES else ""
        return f"stage {rank}: {work}{phase}, {number_words(start)} to {number_words(end)}"

    def _phase_lines(self, rank: int, y: float) -> Iterator[str]:
        spans: dict[str, tuple[Time, Time]] = {}
        for index, action in enumerate(self.simulation.plan.ranks[rank]):
            if action.kind != COMMUNICATE and action.phase in PHASES:
                start, _ = spans.get(action.phase, (self.simulation.starts[rank][index], 0))
                spans[action.phase] = (start, self.simulation.ends[rank][index])
        for phase, (start, end) in spans.items():
            yield _phase_line(self._x(start) + 1, self._x(end) - 1, y, phase)

    # -- Below --

    def _legend(self, y: float) -> Iterator[str]:
        x: float = MARGIN
        for swatches, words in self._legend_entries():
            for swatch, width in swatches:
                yield f'<g transform="translate({x:.2f} {y})">{swatch}</g>'
                x += width
            yield label(x + 5, y + 11, words)
            x += 5 + LETTER_WIDTH * len(words) + 16

    def _legend_entries(self) -> Iterator[tuple[list[tuple[str, int]], str]]:
        num_chunks = self.config.num_model_chunks
        for kind in self.simulation.kinds:
            fills = [shade(kind, chunk, num_chunks) for chunk in range(num_chunks)]
            swatches = [(rect(0, 0, 18, 14, f'rx="2" fill="{fill}"'), 20) for fill in fills]
            words = KINDS[kind].words
            yield swatches, words if num_chunks == 1 else f"{words}, chunk 0 to {num_chunks - 1}"
        if self.lanes:
            fill = shade(self.simulation.kinds[0], 0, num_chunks)
            swatch = rect(0, 0, 18, 14, f'rx="2" fill="{fill}"')
            swatch += rect(0, 0, 18, 14, 'fill="url(#exposed)" opacity="0.55"')
            names = " or ".join(LANE_WORDS[lane] for lane in self.lane_names)
            yield [(swatch, 20)], f"{names}, exposed"
        track = rect(0, 0, 18, 14, 'class="track"') + rect(0, 0, 18, 14, 'fill="url(#idle)"')
        yield [(track, 20)], "idle"
        if self.critical:
            yield [(rect(1, 1, 16, 12, 'class="critical"'), 20)], "critical path"
        present = {a.phase for actions in self.simulation.plan.ranks for a in actions}
        for phase, (words, _) in PHASES.items():
            if phase in present:
                yield [(_phase_line(0, 26, 7, phase), 28)], words

    def _footer(self, y: float) -> Iterator[str]:
        rows = [(f.name, f.text, formula_words(f)) for f in self.figures]
        peaks = [rank_figures(self.simulation, rank) for rank in range(self.num_ranks)]
        shown = [str(row.peak_in_flight) for row in peaks]
        held = ", ".join(shown if len(shown) <= 8 else [*shown[:6], "...", shown[-1]])
        formula = peaks[0].peak_formula
        agrees = formula and all(p.peak_formula.value == p.peak_in_flight for p in peaks)
        rows.append(("in flight, peak", held, f"= {formula.text}" if agrees else ""))
        value_width = LETTER_WIDTH * max(len(text) for _, text, _ in rows)
        for name, text, words in rows:
            yield label(MARGIN, y, name, "quiet")
            yield label(MARGIN + 120, y, text, "bold")
            # A typographic minus; hyphens in formulas stand for nothing else.
            yield label(MARGIN + 136 + value_width, y, words.replace(" - ", " − "), "quiet")
            y += 20


def _phase_line(start: float, end: float, y: float, phase: str) -> str:
    dashes = PHASES[phase][1]
    dashes = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line class="phase" x1="{start:.2f}" y1="{y}" x2="{max(end, start):.2f}" y2="{y}" '
        f'stroke-width="2"{dashes}/>'
    )
