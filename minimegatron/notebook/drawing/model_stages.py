"""Pictures of models over the stages of a pipeline: what each stage holds, reads and sends.

Megatron has no counterpart.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch

from minimegatron.notebook.drawing.palette import (
    BLUE,
    GREEN,
    LIGHT_GREY,
    LINE_GREY,
    nth_colour,
)
from minimegatron.planner.svg_shapes import text_colour

WIDTH, GAP = 2.8, 0.95
"""Of a stage's box, and of the room for the messages between two, in inches."""
PART, READ, TOP, BETWEEN = 0.34, 0.19, 0.3, 0.36
"""Heights in inches: of a part, of a line of what is read, of a model's name, between two models."""
EDGE = 0.06
"""Around everything."""


class StageOfModel(NamedTuple):
    """What one stage of a model has to do with."""

    held: Sequence[tuple[str, Sequence[str]]]
    """Its parts, a layer at a time: (name, what a layer has inside; nothing for other parts)."""
    reads: Sequence[str] = ()
    """What it takes from the batch."""
    sends: Sequence[str] = ()
    """The tensors that it sends to the next stage for one microbatch, each in words."""


def draw_models(models: Mapping[str, Sequence[StageOfModel]]) -> None:
    """A row per model, a box per stage. Layers that have the same inside have the same colour."""
    heights = [_height(stages) for stages in models.values()]
    num_stages = max(map(len, models.values()))
    right = num_stages * (WIDTH + GAP) - GAP
    bottom = sum(heights) + BETWEEN * (len(models) - 1)
    figure = plt.figure(figsize=(right + 2 * EDGE, bottom + 2 * EDGE))
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(-EDGE, right + EDGE), ylim=(bottom + EDGE, -EDGE))
    panel.axis("off")
    colours = _colours(models)
    top = 0.0
    for (name, stages), height in zip(models.items(), heights, strict=True):
        panel.text(0, top + 0.2, name, weight="bold", fontsize=11)
        for number, stage in enumerate(stages):
            _draw_stage(panel, stage, number, top + TOP, _body(stages), colours)
        top += height + BETWEEN
    plt.show()


def _body(stages: Sequence[StageOfModel]) -> float:
    """The height of a model's boxes: they are equally high, and messages fit between them."""
    parts = max(len(stage.held) for stage in stages)
    return 0.3 + PART * max(parts, *(len(stage.sends) + 1 for stage in stages))


def _height(stages: Sequence[StageOfModel]) -> float:
    return TOP + _body(stages) + READ * max(len(stage.reads) for stage in stages)


def _colours(models: Mapping[str, Sequence[StageOfModel]]) -> dict[tuple[str, ...], str]:
    """Of each kind of layer, by what it has inside."""
    insides = (
        tuple(inside)
        for stages in models.values()
        for stage in stages
        for _, inside in stage.held
        if inside
    )
    taken = (colour for colour in map(nth_colour, range(8)) if colour != GREEN)
    return {inside: next(taken, BLUE) for inside in dict.fromkeys(insides)}


def _draw_stage(
    panel: Any, stage: StageOfModel, number: int, top: float, body: float, colours: Mapping
) -> None:
    left = number * (WIDTH + GAP)
    box = {"fc": LIGHT_GREY, "ec": LINE_GREY}
    panel.add_patch(plt.Rectangle((left, top), WIDTH, body, **box))
    panel.text(left + 0.1, top + 0.2, f"stage {number}", fontsize=9)
    y = top + 0.27
    for words, colour in _parts(stage, colours):
        strip = plt.Rectangle((left + 0.08, y), WIDTH - 0.16, PART - 0.05, fc=colour)
        panel.add_patch(strip)
        middle = {"ha": "center", "va": "center", "fontsize": 8, "color": text_colour(colour)}
        panel.text(left + WIDTH / 2, y + (PART - 0.05) / 2, words, **middle)
        y += PART
    if stage.reads:
        panel.text(left + 0.08, top + body + READ * 0.85, "reads", fontsize=8)
    for line, name in enumerate(stage.reads):
        panel.text(left + 0.5, top + body + READ * (line + 0.85), name, fontsize=8)
    for line, words in enumerate(stage.sends):
        y = top + 0.35 + PART * (line + 0.5)
        ends = (left + WIDTH + 0.04, y), (left + WIDTH + GAP - 0.04, y)
        arrow = FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=11, color=BLUE, lw=1.6)
        panel.add_patch(arrow)
        panel.text(left + WIDTH + GAP / 2, y - 0.06, words, ha="center", fontsize=8.5)


def _parts(stage: StageOfModel, colours: Mapping) -> Iterator[tuple[str, str]]:
    """(words, colour) of each part."""
    for name, inside in stage.held:
        if inside:
            yield f"{name}: {', '.join(inside)}", colours[tuple(inside)]
        else:
            yield name, GREEN if name == "embedding" else LINE_GREY
