"""What a layer keeps for backward: measured tensor by tensor, beside the formula; an MLP's conjugates.

Called by: the page on what is kept and what is computed again. Calls: the record `kept_bytes`, the
planner's formula, `pictures`.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from cases.case_words import table
from minimegatron.planner.memory import activation_bytes_per_layer
from minimegatron.planner.plan_report import number_words
from pictures.pictures import box, svg, text
from source.places import recorded

NAMES = (
    ("attention: the input of its norm", 1),
    ("that norm's mean and deviation", 2),
    ("the norm's output, input of the projection to queries, keys, values", 1),
    ("queries, keys and values", 1),
    ("attention's sums of the softmax, a number per row", 1),
    ("attention's output, input of the second projection", 1),
    ("MLP: the input of its norm", 1),
    ("that norm's mean and deviation", 2),
    ("the norm's output, input of the first product", 1),
    ("the first product's result, input of GELU", 1),
    ("GELU's output, input of the second product", 1),
)
"""What the tensors are, in the order in which forward keeps them, and how many tensors each is."""


def record() -> dict[str, Any]:
    return recorded("kept_bytes")


def unit() -> int:
    """s · b · h of the measured layer."""
    sizes = record()["sizes"]
    return sizes["seq_length"] * sizes["micro_batch_size"] * sizes["hidden_size"]


def kept(run: str) -> float:
    """Bytes that one layer keeps, measured, in units of s b h."""
    return sum(num_bytes for _, _, num_bytes in record()["runs"][run]["kept"]) / unit()


def by_formula(run: str) -> float:
    """The same by the planner's formula."""
    sizes, how = record()["sizes"], record()["runs"][run]
    found = activation_bytes_per_layer(
        sizes["seq_length"],
        sizes["micro_batch_size"],
        sizes["hidden_size"],
        sizes["num_attention_heads"],
        how["t"],
        sequence_parallel=how["sequence_parallel"],
        recompute=how["recompute"],
        mask_bytes=how["mask_bytes"],
    )
    return float(found) / unit()


def with_masks(mask_bytes: int) -> str:
    """What a layer keeps, with dropout masks of so many bytes per element: in s b h."""
    sizes = record()["sizes"]
    names = ("seq_length", "micro_batch_size", "hidden_size", "num_attention_heads")
    found = activation_bytes_per_layer(*(sizes[n] for n in names), mask_bytes=mask_bytes)
    return number_words(Fraction(found, unit()))


def not_cut() -> str:
    """What tensor parallelism does not divide, from both measured layers: in s b h."""
    return f"{round(2 * kept('t = 2') - kept('as it is')):g}"


def error(run: str) -> float:
    """How far the formula is from what was measured, as a share of the latter."""
    return by_formula(run) / kept(run) - 1


def largest_error() -> float:
    return max(abs(error(run)) for run in record()["runs"])


# -- One layer, tensor by tensor --


def layer_rows(run: str = "as it is") -> list[tuple[str, float]]:
    """What is kept, in order, and how much of it, in units of s b h."""
    sizes = [num_bytes / unit() for _, _, num_bytes in record()["runs"][run]["kept"]]
    rows, at = [], 0
    for name, number in NAMES:
        rows.append((name, sum(sizes[at : at + number])))
        at += number
    assert at == len(sizes), f"{run}: {len(sizes)} tensors are kept, {at} have a name"
    return rows


def layer_table() -> str:
    rows = [[name, _short(size)] for name, size in layer_rows()]
    return table(
        ["kept for backward", "bytes / (s b h)"], [*rows, ["**in all**", _short(kept("as it is"))]]
    )


def _short(number: float) -> str:
    return f"{number:.3f}".rstrip("0").rstrip(".")


# -- Ways to keep less --


def error_table() -> str:
    """Each way, measured and by the formula."""
    rows = [
        [run, _short(kept(run)), number_words(by_formula(run)), f"{error(run):+.1%}"]
        for run in record()["runs"]
    ]
    return table(["", "measured", "formula", "formula is off by"], rows)


SHOWN = (
    "as it is",
    "t = 2",
    "t = 2, sequence parallel",
    "recompute: full",
    "t = 2, sequence parallel, recompute: full",
)


def kept_bars() -> str:
    """Bars of what a layer keeps, by what is done about it."""
    left, scale, row = 270, 12, 30
    parts = []
    for place, run in enumerate(SHOWN):
        y, width = 8 + place * row, kept(run) * scale
        parts.append(text(8, y + 15, run, "mm-small"))
        parts.append(box(left, y, width, 22, "mm-hue-0", f"{run}: {_short(kept(run))} s b h"))
        parts.append(text(left + width + 6, y + 15, _short(kept(run)), "mm-small"))
    title = "Bytes that a layer keeps, in s b h: " + ", ".join(
        f"{r} {_short(kept(r))}" for r in SHOWN
    )
    return svg(left + 32.2 * scale + 70, 14 + len(SHOWN) * row, title, parts)


def held_while_recomputed() -> str:
    """With full recompute, the most that was held in backward, in s b h; and what it is made of."""
    run = record()["runs"]["recompute: full"]
    layers = record()["sizes"]["num_layers"]
    peak = run["peak"] / unit()
    made_again = kept("as it is")
    inputs = layers * kept("recompute: full")
    # The layer that is made again keeps its input, which is there already.
    assert abs(peak - (inputs + made_again - kept("recompute: full"))) < 0.05 * peak, peak
    one = _short(kept("recompute: full"))
    whole = _short(round(made_again, 1))
    return f"{_short(round(peak, 1))} s b h: {layers} inputs of {one}, and one layer of {whole}"


# -- An MLP and its four conjugates --

MOVES = {
    "without sequence parallelism": (
        ("nothing", "all-reduce", "[s, b, h]"),
        ("all-reduce", "nothing", "[s, b, h]"),
    ),
    "with sequence parallelism": (
        ("all-gather", "reduce-scatter", "[s/t, b, h]"),
        ("reduce-scatter", "all-gather", "[s/t, b, h]"),
    ),
}
"""What happens where an MLP is entered and left: in forward, in backward, and the shape outside."""


def mlp_picture() -> str:
    """The two products between entry and exit, twice; above the arrows forward, below them backward."""
    parts: list[str] = []
    for place, (name, moves) in enumerate(MOVES.items()):
        parts += _mlp(name, moves, 30 + place * 112)
    title = "An MLP over t ranks. " + " ".join(
        f"{name}: on entry {enter[0]} in forward and {enter[1]} in backward, on exit {leave[0]} and "
        f"{leave[1]}."
        for name, (enter, leave) in MOVES.items()
    )
    return svg(820, 230, title, parts)


def _mlp(name: str, moves: Any, y: int) -> Iterator[str]:
    enter, leave = moves
    yield text(8, y - 12, name, "mm-strong")
    yield f'<path class="mm-brace" d="M86,{y + 20} H724"/>'
    for x, width, words, hue in (
        (8, 78, "norm", 2),
        (254, 104, "A: h to 4h/t", 0),
        (438, 104, "B: 4h/t to h", 0),
        (724, 78, "dropout", 2),
    ):
        yield box(x, y, width, 40, f"mm-hue-{hue}")
        yield text(x + width / 2, y + 25, words, f"mm-middle mm-small mm-on-{hue}")
    for x, (forward, backward, _) in ((112, enter), (572, leave)):
        yield box(x, y - 4, 116, 48, "mm-module")
        yield text(x + 58, y + 14, f"→ {forward}", "mm-middle mm-small")
        yield text(x + 58, y + 34, f"← {backward}", "mm-middle mm-small")
    between = (
        (98, enter[2]),
        (241, "[s, b, h]"),
        (398, "[s, b, 4h/t]"),
        (556, "[s, b, h]"),
        (706, leave[2]),
    )
    for x, words in between:
        yield text(x, y + 62, words, "mm-middle mm-small mm-quiet")
