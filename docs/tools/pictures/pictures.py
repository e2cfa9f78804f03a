"""Pictures that the planner does not draw: grids of ranks, layers over stages, buffers, modules.

Called by: `cases` and the other pictures. Pictures are SVG with the classes of
stylesheets/site.css, so that they follow the page's colours. Everything in them comes from
arguments.
"""

from collections.abc import Sequence
from html import escape

HUES = 8
"""mm-hue-0 ... in site.css."""


def svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """A picture with a title for those who do not see it."""
    return (
        f'<svg class="mm-picture" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(title)}">' + "".join(parts) + "</svg>"
    )


def flowing(picture: str) -> str:
    """The same, never so narrow that its words could not be read; see symptoms.css."""
    return picture.replace('class="mm-picture"', 'class="mm-picture mm-flowing"')


def curve(points: str, hue: int) -> str:
    """A line through points, written "x,y x,y"."""
    return f'<polyline points="{points}" class="mm-curve mm-curve-{hue}"/>'


def without_style(svg: str) -> str:
    # stylesheets/timeline.css has the rules, once for all pictures, in the page's colours.
    start, end = svg.index("<style>"), svg.index("</style>") + len("</style>")
    return svg[:start] + svg[end:]


def text(x: float, y: float, words: object, css: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{css}">{escape(str(words))}</text>'


def box(x: float, y: float, width: float, height: float, css: str = "", tip: str = "") -> str:
    shape = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{css}"/>'
    )
    return f"<g><title>{escape(tip)}</title>{shape}</g>" if tip else shape


def groups_picture(groups: dict[str, list[list[int]]], kinds: Sequence[str], names: dict) -> str:
    """One row per kind of group: the ranks, those of one group in one colour and box."""
    world = max(rank for ranks in groups[kinds[0]] for rank in ranks) + 1
    cell, left, row_height = 34, 120, 52
    parts = []
    for row, kind in enumerate(kinds):
        y = 12 + row * row_height
        parts.append(text(8, y + 22, names.get(kind, kind), "mm-strong"))
        for index, ranks in enumerate(groups[kind]):
            for rank in ranks:
                x = left + rank * cell
                hue = index % HUES
                members = " ".join(map(str, ranks))
                parts.append(box(x, y, cell - 4, 32, f"mm-hue-{hue}", f"{kind} group: {members}"))
                parts.append(text(x + cell / 2 - 2, y + 21, rank, f"mm-middle mm-on-{hue}"))
    width = left + world * cell + 8
    title = "Ranks by group: " + "; ".join(
        f"{names.get(kind, kind)} " + " ".join(str(g) for g in groups[kind]) for kind in kinds
    )
    return svg(width, 12 + len(kinds) * row_height, title, parts)


def stages_picture(stages: Sequence[Sequence[str]], num_ranks: int) -> str:
    """What each virtual stage holds, as columns of boxes; colour says which rank."""
    column, height = 92, 24
    most = max(len(stage) for stage in stages)
    parts = []
    for index, stage in enumerate(stages):
        x, rank, chunk = 8 + index * column, index % num_ranks, index // num_ranks
        head = [f"rank {rank}", *([f"chunk {chunk}"] if len(stages) > num_ranks else [])]
        for line, words in enumerate(head):
            y = 16 + 14 * line
            parts.append(text(x + column / 2 - 4, y, words, "mm-middle mm-small mm-strong"))
        top = 12 + 14 * len(head)
        for level, what in enumerate(stage):
            y = top + level * (height + 3)
            parts.append(box(x, y, column - 8, height, f"mm-hue-{rank % HUES}"))
            parts.append(
                text(x + column / 2 - 4, y + 16, what, f"mm-middle mm-small mm-on-{rank % HUES}")
            )
    title = "; ".join(
        f"virtual stage {i} on rank {i % num_ranks}: {', '.join(stage) or 'nothing'}"
        for i, stage in enumerate(stages)
    )
    bottom = 22 + 14 * (1 + (len(stages) > num_ranks)) + most * (height + 3)
    return svg(8 + len(stages) * column, bottom, title, parts)


def strip_picture(
    rows: Sequence[tuple[str, Sequence[tuple[int, int, str, int]]]], total: int, unit: str
) -> str:
    """Labelled strips of memory: (label, [(start, end, words, hue)]); hue -1 is padding."""
    left, width, height = 130, 640, 34
    parts = []
    for row, (label, pieces) in enumerate(rows):
        y = 10 + row * (height + 14)
        parts.append(text(8, y + 22, label, "mm-strong"))
        parts.append(box(left, y, width, height, "mm-track"))
        for start, end, words, hue in pieces:
            x, w = left + width * start / total, width * (end - start) / total
            css = "mm-padding" if hue < 0 else f"mm-hue-{hue % HUES}"
            tip = f"{words}: {start} to {end} ({end - start} {unit})"
            parts.append(box(x + 0.5, y, max(w - 1, 1), height, css, tip))
            if w > 7.2 * len(words) + 4:
                on = "" if hue < 0 else f"mm-on-{hue % HUES}"
                parts.append(text(x + w / 2, y + 21, words, f"mm-middle mm-small {on}"))
    bottom = 10 + len(rows) * (height + 14) + 8
    parts.append(text(left, bottom, "0", "mm-small mm-quiet"))
    parts.append(text(left + width, bottom, f"{total} {unit}", "mm-small mm-quiet mm-end"))
    title = "; ".join(
        f"{label}: " + ", ".join(f"{words} {start} to {end}" for start, end, words, _ in pieces)
        for label, pieces in rows
    )
    return svg(left + width + 12, bottom + 12, title, parts)


def layers_picture(rows: Sequence[Sequence[tuple[str, str, str]]], title: str) -> str:
    """Rows of boxes from top to bottom: (name, words, URL). Each imports only from rows below."""
    width, parts, y = 820, [], 8.0
    for row in rows:
        gap = 8
        w = (width - 16 - gap * (len(row) - 1)) / len(row)
        for index, (name, words, url) in enumerate(row):
            x = 8 + index * (w + gap)
            shape = box(x, y, w, 46, "mm-module", words)
            label = text(x + w / 2, y + 20, name, "mm-middle mm-strong")
            small = text(x + w / 2, y + 37, words, "mm-middle mm-small mm-quiet")
            parts.append(f'<a href="{escape(url)}">{shape}{label}{small}</a>')
        y += 58
    return svg(width, y + 4, title, parts).replace('role="img"', 'role="group"')
