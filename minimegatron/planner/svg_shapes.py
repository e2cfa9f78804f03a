"""Shapes and colours of pictures as SVG text: rectangles, words, the shades of a kind of work.

Megatron has no counterpart.
"""

from xml.sax.saxutils import escape

from minimegatron.planner.actions import KINDS

# -- Colours --

STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif;
  font-size: 12px; fill: #1c2733; font-variant-numeric: tabular-nums; }
.paper { fill: #ffffff; } .track { fill: #eef1f4; } .hatch { stroke: #cfd6dd; }
.title { font-size: 17px; font-weight: 650; } .quiet { fill: #5b6773; } .bold { font-weight: 650; }
.num { font-size: 11px; text-anchor: middle; } .small { font-size: 9px; } .end { text-anchor: end; }
.middle { text-anchor: middle; } .rule { stroke: #c3cbd3; } .phase { stroke: #5b6773; }
.critical { fill: none; stroke: #c2185b; stroke-width: 2; } .bare { stroke: #1c2733; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6ebf0; } .paper { fill: #12181f; } .track { fill: #1f2831; }
  .hatch { stroke: #394552; } .quiet { fill: #9aa7b4; } .rule { stroke: #46525e; }
  .phase { stroke: #9aa7b4; } .critical { stroke: #ff77a9; }
  .bare { stroke: #e6ebf0; }
}
"""

# With these two, one always has a contrast of 4.5 or more, on any colour.
DARK_TEXT, LIGHT_TEXT = "#000000", "#ffffff"


def shade(kind: str, chunk: int, num_chunks: int) -> str:
    """The colour of a chunk's bars.

    >>> shade("forward", 0, 1), shade("forward", 0, 2), shade("forward", 1, 2)
    ('#0072b2', '#0072b2', '#b5def5')
    """
    darkest = 1.0 if num_chunks <= 2 else 0.0
    place = darkest + (2 - darkest) * chunk / max(num_chunks - 1, 1)
    low = min(int(place), 1)
    stops = KINDS[kind].shades
    return _mix(stops[low], stops[low + 1], place - low)


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _mix(a: str, b: str, part: float) -> str:
    pairs = zip(_channels(a), _channels(b), strict=True)
    return "#" + "".join(f"{round(x + (y - x) * part):02x}" for x, y in pairs)


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours, 1 to 21, as WCAG 2 defines it."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in _channels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def text_colour(background: str) -> str:
    """White or black, whichever reads better on the colour."""
    return max((LIGHT_TEXT, DARK_TEXT), key=lambda text: contrast(text, background))


# -- Shapes --


def label(x: float, y: float, words: str, css: str = "") -> str:
    """Words; `y` is their baseline."""
    css = f' class="{css}"' if css else ""
    return f'<text{css} x="{x:.2f}" y="{y:.2f}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, rest: str) -> str:
    """A rectangle; `rest` are its other attributes."""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height}" {rest}/>'


def tipped(shapes: str, tip: str) -> str:
    """Shapes that say `tip` when pointed at."""
    return f"<g><title>{escape(tip)}</title>{shapes}</g>"
