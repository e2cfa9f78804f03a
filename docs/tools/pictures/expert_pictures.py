"""Pictures of experts: tokens × experts, the way of tokens to other ranks, balance over steps.

Called by: `experts`. Calls: `pictures`. Everything in them comes from arguments; an expert's
colour is its number's.
"""

from collections.abc import Sequence

from pictures.pictures import HUES, box, curve, svg, text

Cell = tuple[float, bool, bool]
"""Probability, chosen, kept."""


def routing(cells: Sequence[Sequence[Cell]], capacity: int) -> str:
    """A row for each token; below, each expert's tokens as a column of boxes."""
    width, height, left, top = 96, 26, 84, 34
    num_experts = len(cells[0])
    parts = [
        text(left + e * width + width / 2 - 4, 22, f"expert {e}", "mm-middle mm-strong")
        for e in range(num_experts)
    ]
    for t, row in enumerate(cells):
        y = top + t * (height + 4)
        parts.append(text(8, y + 18, f"token {t}", "mm-strong"))
        for e, cell in enumerate(row):
            parts += _cell(left + e * width, y, width - 8, height, e, cell)
    line_y = top + len(cells) * (height + 4) + 22
    parts.append(text(8, line_y - 4, "tokens", "mm-strong"))
    most = 0
    for e in range(num_experts):
        column = [cell for cell in (row[e] for row in cells) if cell[1]]
        most = max(most, len(column))
        for place, kept in enumerate(sorted((cell[2] for cell in column), reverse=True)):
            y = line_y + place * 14 - 16 + (5 if place >= capacity else 0)
            css = f"mm-hue-{e % HUES}" if kept else "mm-padding"
            parts.append(box(left + e * width, y, width - 8, 11, css))
    y = line_y + capacity * 14 - 15
    right = left + num_experts * width
    parts.append(f'<line x1="{left - 8}" y1="{y:g}" x2="{right:g}" y2="{y:g}" class="mm-limit"/>')
    parts.append(text(right + 4, y + 4, f"capacity {capacity}", "mm-small"))
    said = "; ".join(
        f"token {t}: "
        + ", ".join(
            f"expert {e} {p:.2f}" + ("" if kept else " (dropped)")
            for e, (p, chosen, kept) in enumerate(row)
            if chosen
        )
        for t, row in enumerate(cells)
    )
    return svg(right + 84, line_y + most * 14 + 5, said, parts)


def _cell(x: float, y: float, w: float, h: float, expert: int, cell: Cell) -> list[str]:
    prob, chosen, kept = cell
    if not chosen:
        return [box(x, y, w, h, "mm-module")]
    css = f"mm-hue-{expert % HUES}" if kept else "mm-padding"
    on = f" mm-on-{expert % HUES}" if kept else ""
    words = f"{prob:.2f}" + ("" if kept else " dropped")
    return [box(x, y, w, h, css), text(x + w / 2, y + 17, words, f"mm-middle mm-small{on}")]


ROW, GAP = 11, 8


def travel(chosen: Sequence[Sequence[Sequence[int]]], share: int) -> str:
    """Tokens of each rank, their copies in the order of experts, and the ranks that these go to.

    `chosen` says by rank, token and expert whether they belong together; a rank has `share` experts.
    """
    num_ranks, num_experts = len(chosen), len(chosen[0][0])
    counts = [[sum(row[e] for row in rank) for e in range(num_experts)] for rank in chosen]
    tokens_x, copies_x, blocks_x, top = 64, 212, 470, 30
    parts = [
        text(x, 16, words, "mm-middle mm-small mm-strong")
        for x, words in (
            (tokens_x + 22, "tokens"),
            (copies_x + 22, "permuted"),
            (blocks_x + 22, "the experts' order"),
        )
    ]
    # Where the copies of a rank for an expert begin, on both sides of the all-to-all.
    starts, y = {}, float(top)
    for r in range(num_ranks):
        zone = y
        for e in range(num_experts):
            starts[r, e] = y
            y += counts[r][e] * ROW + 2
        parts.append(text(4, (zone + y) / 2 + 4, f"rank {r}", "mm-strong"))
        parts += _tokens(
            chosen[r], zone, y, (tokens_x, copies_x), [starts[r, e] for e in range(num_experts)]
        )
        y += 2 * GAP
    ends, bottom, y = {}, y, float(top)
    for e in range(num_experts):
        first = y
        for r in range(num_ranks):
            ends[r, e] = y
            y += counts[r][e] * ROW
        number = sum(counts[r][e] for r in range(num_ranks))
        parts.append(text(blocks_x + 52, (first + y) / 2 + 4, f"expert {e}: {number}", "mm-small"))
        if (e + 1) % share == 0:
            rank = e // share
            head = ends[0, rank * share]
            parts.append(text(blocks_x + 138, (head + y) / 2 + 4, f"rank {rank}", "mm-strong"))
        y += 2 * GAP if (e + 1) % share == 0 else 4
    for (r, e), start in starts.items():
        parts += _ribbon(copies_x + 44, start, blocks_x, ends[r, e], counts[r][e] * ROW, e)
    said = "; ".join(
        f"rank {r} sends {counts[r][e]} to expert {e} on rank {e // share}" for r, e in starts
    )
    return svg(blocks_x + 190, max(bottom, y) + 4, said, parts)


def _tokens(
    rows: Sequence[Sequence[int]], zone: float, end: float, at: tuple[int, int], starts: list[float]
) -> list[str]:
    """A rank's tokens, and a thin line from each to each of its copies."""
    tokens_x, copies_x = at
    parts, placed = [], list(starts)
    step = (end - zone) / len(rows)
    for t, row in enumerate(rows):
        y = zone + t * step
        parts.append(box(tokens_x, y, 44, step - 4, "mm-module"))
        parts.append(text(tokens_x + 22, y + step / 2 + 2, t, "mm-middle mm-small"))
        for e, is_chosen in enumerate(row):
            if is_chosen:
                to = placed[e] + ROW / 2
                placed[e] += ROW
                parts.append(
                    f'<line x1="{tokens_x + 46}" y1="{y + step / 2 - 2:g}" x2="{copies_x - 2}" '
                    f'y2="{to:g}" class="mm-flow"/>'
                )
                parts.append(box(copies_x, to - ROW / 2, 44, ROW - 1.5, f"mm-hue-{e % HUES}"))
                on = f"mm-middle mm-tiny mm-on-{e % HUES}"
                parts.append(text(copies_x + 22, to + 3, t, on))
    return parts


def _ribbon(x: float, y: float, to_x: float, to_y: float, height: float, expert: int) -> list[str]:
    if not height:
        return []
    height -= 1.5
    bend = (to_x - x) * 0.45
    path = (
        f"M{x:g} {y:g} C{x + bend:g} {y:g} {to_x - bend:g} {to_y:g} {to_x:g} {to_y:g} "
        f"V{to_y + height:g} "
        f"C{to_x - bend:g} {to_y + height:g} {x + bend:g} {y + height:g} {x:g} {y + height:g} Z"
    )
    css = f"mm-hue-{expert % HUES}"
    return [
        f'<path d="{path}" class="{css} mm-ribbon"/>',
        box(to_x, to_y, 44, height, css),
    ]


def curves(named: Sequence[tuple[str, Sequence[float]]], worst: str) -> str:
    """The load imbalance over steps: 1 is the lowest that can be, `worst` the highest."""
    left, right, top, width, height = 44, 120, 16, 520, 190
    highest = float(worst)
    num_steps = len(named[0][1])

    def place(step: float, value: float) -> tuple[float, float]:
        x = left + width * step / (num_steps - 1)
        return x, top + height * (highest - value) / (highest - 1)

    parts = []
    for value in range(1, int(highest) + 1):
        _, y = place(0, value)
        parts.append(
            f'<line x1="{left}" y1="{y:g}" x2="{left + width}" y2="{y:g}" class="mm-rule"/>'
        )
        parts.append(text(left - 8, y + 4, value, "mm-small mm-quiet mm-end"))
    for hue, (name, values) in enumerate(named):
        points = [place(step, value) for step, value in enumerate(values)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(curve(line, hue))
        x, y = points[-1]
        parts.append(text(x + 8, y + 4, name, "mm-small mm-strong"))
    parts.append(text(left, top + height + 20, "step 1", "mm-small mm-quiet"))
    parts.append(
        text(left + width, top + height + 20, f"step {num_steps}", "mm-small mm-quiet mm-end")
    )
    said = "Load imbalance by step; " + "; ".join(
        f"{name}: {values[0]:.2f} at first, {values[-1]:.2f} at last" for name, values in named
    )
    return svg(left + width + right, top + height + 30, said, parts)


def groups(rows: Sequence[tuple[str, Sequence[Sequence[int]], str]]) -> str:
    """A row for each kind of group: its name, its groups, and what is done over them."""
    cell, left, height = 40, 104, 44
    world = max(rank for _, found, _ in rows for ranks in found for rank in ranks) + 1
    parts = []
    for number, (name, found, what) in enumerate(rows):
        y = 8 + number * height
        parts.append(text(4, y + 21, name, "mm-strong"))
        for hue, ranks in enumerate(found):
            for rank in ranks:
                x = left + rank * cell
                tip = f"{name} group: {' '.join(map(str, ranks))}"
                parts.append(box(x, y, cell - 6, 32, f"mm-hue-{hue % HUES}", tip))
                on = f"mm-middle mm-on-{hue % HUES}"
                parts.append(text(x + cell / 2 - 3, y + 21, rank, on))
        parts.append(text(left + world * cell + 8, y + 21, what))
    said = "; ".join(
        f"{name} groups {' '.join(str(list(ranks)) for ranks in found)}: {what}"
        for name, found, what in rows
    )
    return svg(left + world * cell + 190, 8 + len(rows) * height, said, parts)
