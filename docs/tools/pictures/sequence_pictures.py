"""Pictures of a sequence: who computes which pairs of tokens, the ring's rounds, shifted targets.

Called by: `rings`, `mtp`. Calls: `pictures`. Everything in them comes from arguments;
a rank's colour is its number's.
"""

from collections.abc import Sequence

from pictures.pictures import HUES, box, svg, text

FULL, HALF = "full", "half"
"""How much of a block of pairs is computed: all of it, or what is not above the diagonal."""
Block = tuple[int, int, str]
"""Row, column, FULL or HALF."""


def _block(x: float, y: float, size: float, block: Block, css: str, tip: str = "") -> str:
    """A block of pairs; its half is a triangle, whose corner is below on the left."""
    row, column, how_much = block
    x, y, w = x + column * size + 0.5, y + row * size + 0.5, size - 1
    if how_much == FULL:
        shape = f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{w:g}" class="{css}"/>'
    else:
        points = f"{x:g},{y:g} {x:g},{y + w:g} {x + w:g},{y + w:g}"
        shape = f'<polygon points="{points}" class="{css}"/>'
    return f"<g><title>{tip}</title>{shape}</g>" if tip else shape


# -- Who computes which pairs --


def pairs(panels: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> str:
    """The triangle of causal attention, whose rows of blocks belong to ranks; once for each way to cut.

    Args:
        panels: the name of a way; by piece of the sequence the rank that has it; by rank how many
            pairs of tokens it computes.
    """
    size, gap = 22, 330
    num_chunks = len(panels[0][1])
    side = num_chunks * size
    most = max(max(counts) for _, _, counts in panels)
    parts, said = [], []
    for place, (name, owners, counts) in enumerate(panels):
        left, top = 62 + place * gap, 28
        parts.append(text(left, 16, name, "mm-strong"))
        for row, rank in enumerate(owners):
            css = f"mm-hue-{rank % HUES}"
            y = top + row * size
            parts.append(text(left - 8, y + 15, f"rank {rank}", "mm-small mm-end"))
            parts += [
                _block(left, top, size, (row, k, FULL if k < row else HALF), css)
                for k in range(row + 1)
            ]
        for rank, count in enumerate(counts):
            y = top + side + 14 + rank * 18
            parts.append(text(left - 8, y + 11, f"rank {rank}", "mm-small mm-end"))
            parts.append(box(left, y, side * count / most, 13, f"mm-hue-{rank % HUES}"))
            parts.append(text(left + side * count / most + 6, y + 11, count, "mm-small"))
        said.append(f"{name}: " + ", ".join(f"rank {r} {n} pairs" for r, n in enumerate(counts)))
    height = 28 + side + 14 + len(panels[0][2]) * 18 + 4
    return svg(62 + (len(panels) - 1) * gap + side + 44, height, "; ".join(said), parts)


# -- The rounds of the ring --


def ring_steps(
    chunks: Sequence[tuple[int, int]], steps: Sequence[Sequence[tuple[int, Sequence[Block]]]]
) -> str:
    """What each rank computes in each round: a square of its two pieces of queries and two of keys.

    Args:
        chunks: by rank the two pieces that it has.
        steps: by rank and round whose keys and values are there, and the blocks that are computed.
    """
    size, column, row_height, left, top = 26, 116, 92, 116, 30
    parts, said = [], []
    for step in range(len(steps[0])):
        name = f"round {step}"
        parts.append(text(left + step * column, 16, name, "mm-strong"))
    for rank, row in enumerate(steps):
        y = top + rank * row_height
        parts.append(text(8, y + 32, f"rank {rank}", "mm-strong"))
        parts.append(text(8, y + 48, "queries of", "mm-small mm-quiet"))
        parts.append(text(8, y + 62, f"pieces {chunks[rank][0]}, {chunks[rank][1]}", "mm-small"))
        for step, (owner, blocks) in enumerate(row):
            x = left + step * column
            parts.append(text(x, y + 12, f"keys of {owner}", "mm-small"))
            parts += _square(x, y + 18, size, owner, blocks)
            for place, chunk in enumerate(chunks[owner]):
                css = "mm-middle mm-small mm-quiet"
                parts.append(text(x + (place + 0.5) * size, y + 18 + 2 * size + 12, chunk, css))
            said.append(f"rank {rank}, round {step}: keys of rank {owner}")
    width, height = left + len(steps[0]) * column - 30, top + len(steps) * row_height
    return svg(width, height, "; ".join(said), parts)


def _square(x: float, y: float, size: int, hue: int, blocks: Sequence[Block]) -> list[str]:
    parts = [
        _block(x, y, size, (row, column, FULL), "mm-module") for row in (0, 1) for column in (0, 1)
    ]
    return parts + [_block(x, y, size, block, f"mm-hue-{hue % HUES}") for block in blocks]


# -- Targets of further tokens --


def shifted(rows: Sequence[tuple[str, Sequence[str], int]], first: str = "position") -> str:
    """Rows of boxes, one for each position; an empty word is a position that does not count.

    Args:
        rows: a name, a word for each position, and the number of the row's colour.
    """
    width, height, left = 54, 30, 172
    num_positions = len(rows[0][1])
    parts = [text(8, 16, first, "mm-small mm-quiet")]
    parts += [
        text(left + i * width + 24, 16, i, "mm-middle mm-small mm-quiet")
        for i in range(num_positions)
    ]
    said = []
    for place, (name, words, hue) in enumerate(rows):
        y = 24 + place * height
        parts.append(text(8, y + 17, name, "mm-strong"))
        for i, word in enumerate(words):
            css = f"mm-hue-{hue % HUES}" if word else "mm-padding"
            parts.append(box(left + i * width, y, width - 6, height - 6, css))
            if word:
                css = f"mm-middle mm-small mm-on-{hue % HUES}"
                parts.append(text(left + i * width + 24, y + 16, word, css))
        said.append(f"{name}: " + " ".join(word or "nothing" for word in words))
    return svg(left + num_positions * width + 4, 28 + len(rows) * height, "; ".join(said), parts)
