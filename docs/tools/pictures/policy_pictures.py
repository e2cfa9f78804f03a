"""Pictures of a policy's step: calls of the schedule one after the other, and where a ratio is clipped.

Called by: `policy`. Calls: `pictures`. Everything in them comes from arguments.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pictures.pictures import box, curve, flowing, svg, text


class Block(NamedTuple):
    """A forward or a backward of one stage, within its call."""

    stage: int
    start: float
    end: float
    is_backward: bool


class Call(NamedTuple):
    """One call of the schedule: its name, what is in it, and how long it takes."""

    name: str
    blocks: Sequence[Block]
    length: float


def calls(found: Sequence[Call], num_stages: int) -> str:
    """Calls from left to right, a lane for each stage; forwards and backwards as everywhere."""
    left, top, unit, gap, lane = 62, 34, 18, 12, 30
    parts, said, x = [], [], float(left)
    for stage in range(num_stages):
        parts.append(text(8, top + stage * lane + 18, f"stage {stage}", "mm-small mm-strong"))
    height = top + num_stages * lane + 6
    for call in found:
        width = call.length * unit
        parts.append(text(x + width / 2, 18, call.name, "mm-middle mm-small"))
        parts.append(box(x - 3, top - 6, width + 6, num_stages * lane + 8, "mm-module"))
        for block in call.blocks:
            css = f"mm-hue-{1 if block.is_backward else 0}"
            w = (block.end - block.start) * unit - 1
            tip = f"{call.name}: {'backward' if block.is_backward else 'forward'}"
            parts.append(
                box(x + block.start * unit, top + block.stage * lane, w, lane - 6, css, tip)
            )
        said.append(f"{call.name}: {len(call.blocks)} blocks, {call.length:g}")
        x += width + gap
    for place, (hue, word) in enumerate(((0, "forward"), (1, "backward"))):
        parts.append(box(left + place * 90, height + 4, 16, 12, f"mm-hue-{hue}"))
        parts.append(text(left + 22 + place * 90, height + 14, word, "mm-small"))
    picture = svg(x + 4, height + 22, "; ".join(said), parts)
    return flowing(picture)


def losses(
    ratios: Sequence[float],
    panels: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    bounds: tuple[float, float],
) -> str:
    """The loss over the ratio, clipped and not; a panel for each sign of the advantage.

    Args:
        ratios: the values of the axis, rising.
        panels: a name, the loss without clipping and with it, at each ratio.
        bounds: the ratios where clipping begins.
    """
    left, top, width, height, gap = 46, 30, 220, 150, 70
    low = min(min(plain) for _, plain, _ in panels)
    high = max(max(plain) for _, plain, _ in panels)
    parts, said = [], []
    for place, (name, plain, clipped) in enumerate(panels):
        x0 = left + place * (width + gap)

        def at(ratio: float, loss: float, x0: float = x0) -> str:
            x = x0 + width * (ratio - ratios[0]) / (ratios[-1] - ratios[0])
            return f"{x:.1f},{top + height * (high - loss) / (high - low):.1f}"

        parts.append(text(x0, 16, name, "mm-small mm-strong"))
        for ratio in (bounds[0], 1.0, bounds[1]):
            x = float(at(ratio, 0).split(",")[0])
            parts.append(
                f'<line x1="{x:g}" y1="{top}" x2="{x:g}" y2="{top + height}" class="mm-rule"/>'
            )
            css = "mm-small mm-quiet mm-middle"
            parts.append(text(x, top + height + 16, f"{ratio:g}", css))
        for number, line in ((2, plain), (0, clipped)):
            points = " ".join(at(*pair) for pair in zip(ratios, line, strict=True))
            parts.append(curve(points, number))
        for value in (low, high):
            y = float(at(1, value).split(",")[1])
            parts.append(text(x0 - 6, y + 4, f"{value:.2g}", "mm-small mm-quiet mm-end"))
        said.append(f"{name}: from {clipped[0]:.2g} to {clipped[-1]:.2g}")
    x = left + len(panels) * (width + gap) - gap + 18
    for number, y, word in ((0, 60, "the loss"), (2, 86, "without clipping")):
        parts.append(curve(f"{x},{y} {x + 28},{y}", number))
        parts.append(text(x + 36, y + 4, word, "mm-small"))
    picture = svg(x + 140, top + height + 24, "; ".join(said), parts)
    return flowing(picture)
