"""The lanes of a rank as shapes: computation above, all-to-alls or hops below, what is exposed hatched.

Megatron has no counterpart.

Forwards are blue and backwards orange on all lanes. Where nothing is computed beside an all-to-all or a
hop, it is hatched.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from xml.sax.saxutils import escape

from minimegatron.planner.actions import KINDS, Time
from minimegatron.planner.layer_plan import ALL_TO_ALL, COMPUTE, LayerTimeline, TimedNode
from minimegatron.planner.plan_report import LANE_WORDS, exposed_words, number_words, tick_step
from minimegatron.planner.svg_shapes import STYLE, label, rect, shade, text_colour, tipped

COMPUTE_HEIGHT, LANE_HEIGHT, LANE_GAP = 26, 14, 2
"""Of a bar of computation, of one of another lane, and between two lanes."""

HATCHED = (
    '<pattern id="exposed" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line class="bare" x1="0" y1="0" x2="0" y2="5" '
    'stroke-width="3"/></pattern>'
)
"""To stand among a picture's `<defs>`."""

LEFT, RIGHT, TOP, ROW = 96, 24, 46, 84
CHART_WIDTH = 720
LETTER_WIDTH = 6.6


def lane_shapes(
    lanes: LayerTimeline, x_of: Callable[[Time], float], top: float, num_chunks: int = 1
) -> Iterator[str]:
    """The bars of all lanes, from `top` on."""
    below = dict(zip(lanes.hidden_lanes, lane_tops(top, len(lanes.hidden_lanes)), strict=True))
    for timed in lanes.nodes:
        node = timed.node
        is_computed = node.lane == COMPUTE
        y, height = (top, COMPUTE_HEIGHT) if is_computed else (below[node.lane], LANE_HEIGHT)
        x, width = x_of(timed.start), x_of(timed.end) - x_of(timed.start)
        if width <= 0:
            continue
        fill = shade(node.kind, node.chunk, num_chunks)
        inset = 0.5 if width > 3 else 0
        bar = rect(x + inset, y, width - 2 * inset, height, f'rx="2" fill="{fill}"')
        yield tipped(bar + _name(timed, x, width, y + height / 2 + 4, fill), node_words(timed))
    for timed, start, end in lanes.exposed_parts():
        x, y = x_of(start), below[timed.node.lane]
        yield rect(x, y, x_of(end) - x, LANE_HEIGHT, 'fill="url(#exposed)" opacity="0.55"')


def lane_tops(top: float, num_lanes: int) -> list[float]:
    """Where the lanes below the computation begin, one below the other."""
    first = top + COMPUTE_HEIGHT + LANE_GAP
    return [first + number * (LANE_HEIGHT + LANE_GAP) for number in range(num_lanes)]


def _name(timed: TimedNode, x: float, width: float, baseline: float, fill: str) -> str:
    """As much of the node's name as the bar has room for."""
    node = timed.node
    letter = f"{KINDS[node.kind].letter}{node.microbatch}"
    for words in (f"{node.name} {letter}", letter, str(node.microbatch)):
        if len(words) * LETTER_WIDTH + 2 <= width:
            return (
                f'<text class="num" x="{x + width / 2:.2f}" y="{baseline:.1f}" '
                f'style="fill:{text_colour(fill)}">{words}</text>'
            )
    return ""


def node_words(timed: TimedNode) -> str:
    """What a node is, and when.

    >>> from minimegatron.planner.layer_plan import Node
    >>> node_words(TimedNode(Node("dispatch", "forward", 1, 3, 0, 2), 4, 6))
    'all-to-all: dispatch of layer 1, forward of microbatch 3, 4 to 6'
    """
    node = timed.node
    lane = "" if node.lane == COMPUTE else f"{LANE_WORDS[node.lane]}: "
    work = f"{KINDS[node.kind].words} of microbatch {node.microbatch}"
    times = f"{number_words(timed.start)} to {number_words(timed.end)}"
    return f"{lane}{node.name} of layer {node.layer}, {work}, {times}"


def render_layers(rows: Sequence[tuple[str, LayerTimeline]], title: str) -> str:
    """One SVG picture of several timelines on one clock, a name beside each. It needs nothing else."""
    longest = max(float(lanes.total) for _, lanes in rows)
    scale = CHART_WIDTH / longest if longest else 1.0
    found = {lane for _, lanes in rows for lane in lanes.hidden_lanes}
    shown = [lane for lane in LANE_WORDS if lane in found] or [ALL_TO_ALL]
    row_height = ROW + (len(shown) - 1) * (LANE_HEIGHT + LANE_GAP)
    width, height = LEFT + CHART_WIDTH + RIGHT, TOP + row_height * len(rows) + 30

    def x_of(time: Time) -> float:
        return LEFT + float(time) * scale

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="title" style="max-width:100%;height:auto">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>{STYLE}</style><defs>{HATCHED}</defs>",
        f'<rect class="paper" width="{width}" height="{height}" rx="6"/>',
        label(LEFT, 24, title, "bold"),
    ]
    for number, (name, lanes) in enumerate(rows):
        top = TOP + row_height * number
        words = f"{name}: {number_words(lanes.total)}, {exposed_words(lanes)}"
        parts += [label(LEFT, top + 12, words, "quiet"), *_tracks(top + 20, shown)]
        parts += lane_shapes(lanes, x_of, top + 20)
    step, time = tick_step(Fraction(56) / Fraction(scale)), 0
    while time <= longest:
        parts.append(label(x_of(time), height - 10, number_words(time), "quiet middle"))
        time += step
    return "\n".join([*parts, "</svg>"]) + "\n"


def _tracks(top: float, lanes: Sequence[str]) -> Iterator[str]:
    yield label(12, top + 17, "computes")
    yield rect(LEFT, top, CHART_WIDTH, COMPUTE_HEIGHT, 'class="track"')
    for lane, below in zip(lanes, lane_tops(top, len(lanes)), strict=True):
        yield label(12, below + 11, LANE_WORDS[lane])
        yield rect(LEFT, below, CHART_WIDTH, LANE_HEIGHT, 'class="track"')
