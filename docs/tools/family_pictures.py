"""Pictures of other models: what travels between stages, a matrix of decays, growth with the length.

Called by: `cases_of_families`, `cases_of_states`. Calls: `pictures`. Everything in them comes from
arguments.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from pictures import HUES, box, svg, text


class Link(NamedTuple):
    """What travels between a stage and the next one: shapes in words, forwards and back."""

    forward: Sequence[str]
    backward: Sequence[str]


# -- Stages and their messages --


def links(stages: Sequence[Sequence[str]], hues: Sequence[int], messages: Sequence[Link]) -> str:
    """Stages beside each other; activations above, gradients below, one arrow for each tensor.

    Args:
        stages: lines of words for each stage, the first one is its name.
        hues: the colour of each stage.
        messages: between each stage and the next.
    """
    width, gap, top, line = 112, 116, 40, 16
    rows = max(len(link.forward) for link in messages)
    height = max(max(map(len, stages)) * line + 14, 60)
    parts, said = [], []
    for place, (words, hue) in enumerate(zip(stages, hues, strict=True)):
        x = 8 + place * (width + gap)
        parts.append(box(x, top, width, height, f"mm-hue-{hue % HUES}"))
        for number, word in enumerate(words):
            css = f"mm-middle mm-on-{hue % HUES} " + ("mm-small" if number else "mm-strong")
            parts.append(text(x + width / 2, top + 20 + number * line, word, css))
        said.append(f"{words[0]}: {', '.join(words[1:])}")
    for place, link in enumerate(messages):
        x = 8 + width + place * (width + gap)
        middle = top + height / 2
        for kind, shapes, way in (
            ("mm-activation", link.forward, 1),
            ("mm-gradient", link.backward, -1),
        ):
            for number, shape in enumerate(shapes):
                y = middle - way * (14 + (rows - 1) * 30 - number * 30)
                parts += _arrow(x + 5, x + gap - 5, y, way, kind)
                parts.append(text(x + gap / 2, y - 5, shape, "mm-middle mm-small"))
            said.append(
                f"{'forward' if way == 1 else 'back'} over link {place}: {' and '.join(shapes)}"
            )
    right = 16 + len(stages) * (width + gap) - gap
    y = top + height + 30 + (rows - 1) * 16
    parts += _arrow(8, 44, y - 4, 1, "mm-activation")
    parts.append(text(50, y, "activations, forward", "mm-small"))
    parts += _arrow(190, 226, y - 4, -1, "mm-gradient")
    parts.append(text(232, y, "their gradients, back", "mm-small"))
    picture = svg(right, y + 10, "; ".join(said), parts)
    return picture.replace('class="mm-picture"', 'class="mm-picture mm-flowing"')


def _arrow(left: float, right: float, y: float, way: int, kind: str) -> list[str]:
    tip = right if way == 1 else left
    start, end = (left, right - 6) if way == 1 else (left + 6, right)
    return [
        f'<line x1="{start:g}" y1="{y:g}" x2="{end:g}" y2="{y:g}" class="mm-message {kind}"/>',
        f'<path d="M{tip:g} {y:g}l{-7 * way} -3v6z" class="{kind}-head"/>',
    ]


# -- A matrix of decays --


def decays(values: Sequence[Sequence[float]], chunk: int) -> str:
    """A lower-triangular matrix: token i reads, j wrote. Colour: inside a chunk, or through a state."""
    size, left, top = 46, 92, 44
    n = len(values)
    parts = [
        text(left, 16, "token that wrote", "mm-small mm-quiet"),
        text(8, 16, "token that reads", "mm-small mm-quiet"),
    ]
    for i in range(n):
        y = top + i * size
        parts.append(text(left - 12, y + 27, i, "mm-end mm-strong"))
        parts.append(text(left + i * size + size / 2 - 1, top - 8, i, "mm-middle mm-strong"))
        for j in range(n):
            x = left + j * size
            if j > i:
                parts.append(box(x, y, size - 3, size - 3, "mm-module"))
                continue
            hue = 5 if i // chunk == j // chunk else 1
            parts.append(box(x, y, size - 3, size - 3, "mm-module"))
            shade = f'fill-opacity="{0.12 + 0.88 * values[i][j]:.3f}"'
            parts.append(
                box(x, y, size - 3, size - 3, f"mm-hue-{hue}").replace("<rect", f"<rect {shade}")
            )
            parts.append(text(x + size / 2 - 1, y + 27, _short(values[i][j]), "mm-middle mm-small"))
    edge = left + n * size
    for border in range(chunk, n, chunk):
        at = border * size - 1.5
        for x1, y1, x2, y2 in (
            (left - 4, top + at, edge, top + at),
            (left + at, top - 4, left + at, top + n * size),
        ):
            parts.append(
                f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="mm-limit"/>'
            )
    x = edge + 16
    for number, (hue, words) in enumerate(((5, "inside a chunk:"), (1, "from a chunk before:"))):
        y = top + 10 + number * 56
        parts.append(box(x, y, 16, 16, f"mm-hue-{hue}"))
        parts.append(text(x + 24, y + 13, words, "mm-small mm-strong"))
        more = ("products of matrices", "through the state")[number]
        parts.append(text(x + 24, y + 29, more, "mm-small mm-quiet"))
    said = "Decay from the token that wrote to the one that reads; " + "; ".join(
        f"token {i}: " + " ".join(_short(value) for value in row[: i + 1])
        for i, row in enumerate(values)
    )
    return svg(edge + 176, top + n * size + 4, said, parts)


def _short(value: float) -> str:
    """
    >>> _short(1.0), _short(0.25), _short(0.0625)
    ('1', '.25', '.06')
    """
    return "1" if value == 1 else f"{value:.2f}".removeprefix("0")


# -- Growth --


class Curve(NamedTuple):
    """A name and a value for each length."""

    name: str
    values: Sequence[float]


def growth(
    lengths: Sequence[int], curves: Sequence[Curve], unit: str, ticks: Sequence[tuple[float, str]]
) -> str:
    """Values over lengths, both on logarithmic axes: a straight line is a power of the length."""
    left, right, top, width, height = 66, 190, 26, 440, 210
    all_values = [value for curve in curves for value in curve.values] + [t for t, _ in ticks]
    low, high = math.log(min(all_values)), math.log(max(all_values))
    first, last = math.log(lengths[0]), math.log(lengths[-1])

    def place(length: float, value: float) -> tuple[float, float]:
        x = left + width * (math.log(length) - first) / (last - first)
        return x, top + height * (high - math.log(value)) / (high - low)

    parts = [text(8, 14, unit, "mm-small mm-quiet")]
    for value, words in ticks:
        _, y = place(lengths[0], value)
        parts.append(
            f'<line x1="{left}" y1="{y:g}" x2="{left + width}" y2="{y:g}" class="mm-rule"/>'
        )
        parts.append(text(left - 8, y + 4, words, "mm-small mm-quiet mm-end"))
    for length in lengths:
        x, _ = place(length, math.exp(low))
        parts.append(text(x, top + height + 18, f"{length:,}", "mm-small mm-quiet mm-middle"))
    parts.append(text(left + width + 12, top + height + 18, "tokens", "mm-small mm-quiet"))
    ends = _apart([place(lengths[-1], curve.values[-1])[1] for curve in curves], 15)
    for number, (curve, end) in enumerate(zip(curves, ends, strict=True)):
        points = [place(*pair) for pair in zip(lengths, curve.values, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" class="mm-curve mm-curve-{number}"/>')
        parts.append(text(left + width + 12, end + 4, curve.name, "mm-small mm-strong"))
    said = f"{unit} by number of tokens; " + "; ".join(
        f"{curve.name}: {curve.values[0]:.3g} at {lengths[0]}, {curve.values[-1]:.3g} at {lengths[-1]}"
        for curve in curves
    )
    return svg(left + width + right, top + height + 28, said, parts)


def _apart(wanted: Sequence[float], least: float) -> list[float]:
    """Places near those that are wanted, in their order, no two closer than `least`.

    >>> _apart([10, 12, 40], 15)
    [3.5, 18.5, 40]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    found = list(wanted)
    for before, after in zip(order, order[1:], strict=False):
        missing = least - (found[after] - found[before])
        if missing > 0:
            found[before] -= missing / 2
            found[after] += missing / 2
    return found


# -- Sections of a weight --


class Section(NamedTuple):
    """Rows of a weight that belong together."""

    name: str
    start: int
    end: int


def sections(
    rows: Sequence[tuple[str, Sequence[Section]]], names: Sequence[str], total: int
) -> str:
    """The sections of a weight, in one colour each; a row for the whole, and one for each rank.

    Args:
        rows: a name, and the sections that it has, by rows of the whole weight. They are drawn one
            after the other, as the rank stores them.
        names: of all sections.
    """
    left, width, height, top = 150, 600, 28, 8
    parts, said = [], []
    for number, (name, found) in enumerate(rows):
        y, at = top + number * (height + 10), float(left)
        parts.append(text(8, y + 19, name, "mm-strong" if number == 0 else ""))
        for section in found:
            w = width * (section.end - section.start) / total
            hue = (0, 5, 2, 3, 6)[names.index(section.name) % 5]
            tip = f"{section.name}: rows {section.start} to {section.end - 1}"
            parts.append(box(at + 0.5, y, max(w - 1, 2), height, f"mm-hue-{hue}", tip))
            if w > 9 * len(section.name):
                css = f"mm-middle mm-small mm-on-{hue}"
                parts.append(text(at + w / 2, y + 18, section.name, css))
            at += w
        said.append(f"{name}: " + ", ".join(f"{s.name} {s.start} to {s.end - 1}" for s in found))
    return svg(left + width + 10, top + len(rows) * (height + 10), "; ".join(said), parts)
