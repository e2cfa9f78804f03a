"""Pictures of other models: what travels between stages, a matrix of decays, growth with the length.

Called by: `families`, `states`, `backend`. Calls: `pictures`. Everything in them comes from
arguments.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pictures.pictures import HUES, box, curve, flowing, svg, text


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
    width, gap, top, line, row = 112, 116, 8, 16, 30
    rows = max(len(link.forward) for link in messages)
    height = max(max(map(len, stages)) * line + 14, 2 * rows * row)
    parts, said = [], []
    for place, (words, hue) in enumerate(zip(stages, hues, strict=True)):
        x = 8 + place * (width + gap)
        parts.append(box(x, top, width, height, f"mm-hue-{hue % HUES}"))
        for number, word in enumerate(words):
            css = f"mm-middle mm-on-{hue % HUES} " + ("mm-small" if number else "mm-strong")
            y = top + (height - len(words) * line) / 2 + 12 + number * line
            parts.append(text(x + width / 2, y, word, css))
        said.append(f"{words[0]}: {', '.join(words[1:])}")
    for place, link in enumerate(messages):
        x = 8 + width + place * (width + gap)
        middle = top + height / 2
        for kind, shapes, way in (
            ("mm-activation", link.forward, 1),
            ("mm-gradient", link.backward, -1),
        ):
            for number, shape in enumerate(shapes):
                y = middle - way * (row * (len(shapes) - number) - 12)
                parts += _arrow(x + 5, x + gap - 5, y, way, kind)
                parts.append(text(x + gap / 2, y - 5, shape, "mm-middle mm-small"))
            said.append(
                f"{'forward' if way == 1 else 'back'} over link {place}: {' and '.join(shapes)}"
            )
    right = 16 + len(stages) * (width + gap) - gap
    y = top + height + 26
    parts += _arrow(8, 44, y - 4, 1, "mm-activation")
    parts.append(text(50, y, "activations, forward", "mm-small"))
    parts += _arrow(190, 226, y - 4, -1, "mm-gradient")
    parts.append(text(232, y, "their gradients, back", "mm-small"))
    picture = svg(right, y + 10, "; ".join(said), parts)
    return flowing(picture)


def _arrow(left: float, right: float, y: float, way: int, kind: str) -> list[str]:
    tip = right if way == 1 else left
    start, end = (left, right - 6) if way == 1 else (left + 6, right)
    return [
        f'<line x1="{start:g}" y1="{y:g}" x2="{end:g}" y2="{y:g}" class="mm-message {kind}"/>',
        f'<path d="M{tip:g} {y:g}l{-7 * way} -3v6z" class="{kind}-head"/>',
    ]


# -- A matrix of decays --


def decays(values: Sequence[Sequence[float]], chunk: int) -> str:
    """A lower-triangular matrix: i reads, j wrote. Colour: inside a segment, or through a state."""
    size, left, top = 46, 132, 44
    n = len(values)
    parts = [
        text(left, 16, "token that wrote", "mm-small mm-quiet"),
        text(8, top + size / 2 + 4, "token that reads", "mm-small mm-quiet"),
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
    for number, (hue, words) in enumerate(((5, "inside a segment:"), (1, "from an older one:"))):
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


class Panel(NamedTuple):
    """What is shown; by name of a curve its value for each length; marks at the left."""

    title: str
    curves: Mapping[str, Sequence[float]]
    ticks: Sequence[tuple[float, str]]


def growth(lengths: Sequence[int], panels: Sequence[Panel]) -> str:
    """Values over lengths, all axes logarithmic: a straight line is a power of the length."""
    left, top, width, height, gap = 62, 30, 216, 200, 76
    parts, said = [], []
    for place, panel in enumerate(panels):
        parts += _panel(panel, lengths, left + place * (width + gap), top, width, height)
        said += [
            f"{panel.title}, {name}: {values[0]:.3g} at {lengths[0]}, {values[-1]:.3g} at {lengths[-1]}"
            for name, values in panel.curves.items()
        ]
    x = left + len(panels) * (width + gap) - gap + 18
    for number, name in enumerate(panels[0].curves):
        y = top + 14 + number * 26
        parts.append(curve(f"{x},{y} {x + 30},{y}", number))
        parts.append(text(x + 38, y + 4, name, "mm-small"))
    picture = svg(x + 176, top + height + 26, "; ".join(said), parts)
    return flowing(picture)


def _panel(
    panel: Panel, lengths: Sequence[int], left: float, top: float, width: float, height: float
) -> list[str]:
    values = [value for heights in panel.curves.values() for value in heights]
    values += [value for value, _ in panel.ticks]
    low, high = math.log(min(values)), math.log(max(values))
    first, last = math.log(lengths[0]), math.log(lengths[-1])

    def place(length: float, value: float) -> tuple[float, float]:
        x = left + width * (math.log(length) - first) / (last - first)
        return x, top + height * (high - math.log(value)) / (high - low)

    parts = [text(left, 14, panel.title, "mm-small mm-strong")]
    for value, words in panel.ticks:
        _, y = place(lengths[0], value)
        parts.append(
            f'<line x1="{left:g}" y1="{y:g}" x2="{left + width:g}" y2="{y:g}" class="mm-rule"/>'
        )
        parts.append(text(left - 6, y + 4, words, "mm-small mm-quiet mm-end"))
    for length in lengths[::2]:
        x, _ = place(length, values[0])
        parts.append(text(x, top + height + 18, f"{length:,}", "mm-small mm-quiet mm-middle"))
    for number, heights in enumerate(panel.curves.values()):
        points = [place(*pair) for pair in zip(lengths, heights, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(curve(line, number))
    return parts


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
