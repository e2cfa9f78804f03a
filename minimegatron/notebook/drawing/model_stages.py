"""Pictures of models over the stages of a pipeline: what each stage holds, reads and sends.

Megatron has no counterpart.
"""

import textwrap
from collections.abc import Mapping, Sequence
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

WIDTH, GAP = 2.35, 0.85
"""Of a stage's box, and of the room for the messages between two, in inches."""
LINE, MESSAGE, TOP, BETWEEN = 0.2, 0.36, 0.3, 0.36
"""Heights in inches: of a line of words, of a message, of a model's name, between two models."""
EDGE = 0.06
"""Around everything, and around the words of a part."""
LETTERS = 32
"""That fit into a line of a part."""


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
    parts = max(sum(_part_height(*part) + EDGE for part in stage.held) for stage in stages)
    messages = max(MESSAGE * len(stage.sends) for stage in stages)
    return TOP + max(parts, messages + EDGE)


def _height(stages: Sequence[StageOfModel]) -> float:
    return TOP + _body(stages) + LINE * max(len(stage.reads) for stage in stages)


def _lines(name: str, inside: Sequence[str]) -> list[str]:
    """The words of a part."""
    return textwrap.wrap(f"{name}: {', '.join(inside)}" if inside else name, LETTERS)


def _part_height(name: str, inside: Sequence[str]) -> float:
    return LINE * len(_lines(name, inside)) + EDGE


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
    panel.add_patch(plt.Rectangle((left, top), WIDTH, body, fc=LIGHT_GREY, ec=LINE_GREY))
    panel.text(left + 0.08, top + 0.2, f"stage {number}", fontsize=9)
    y = top + TOP - EDGE / 2
    for name, inside in stage.held:
        height = _part_height(name, inside)
        kind = GREEN if name == "embedding" else LINE_GREY
        colour = colours[tuple(inside)] if inside else kind
        panel.add_patch(plt.Rectangle((left + EDGE, y), WIDTH - 2 * EDGE, height, fc=colour))
        look = {"ha": "center", "va": "center", "fontsize": 9, "color": text_colour(colour)}
        panel.text(left + WIDTH / 2, y + height / 2, "\n".join(_lines(name, inside)), **look)
        y += height + EDGE
    if stage.reads:
        panel.text(left, top + body + LINE * 0.85, "reads", fontsize=9)
    for line, name in enumerate(stage.reads):
        panel.text(left + 0.48, top + body + LINE * (line + 0.85), name, fontsize=9)
    for line, words in enumerate(stage.sends):
        _draw_message(panel, left + WIDTH, top + TOP + MESSAGE * (line + 0.5), words)


def _draw_message(panel: Any, left: float, y: float, words: str) -> None:
    ends = (left + 0.03, y), (left + GAP - 0.03, y)
    arrow = FancyArrowPatch(
        *ends, arrowstyle="-|>", mutation_scale=11, color=BLUE, lw=1.6, shrinkA=0, shrinkB=0
    )
    panel.add_patch(arrow)
    panel.text(left + GAP / 2, y - 0.06, words, ha="center", fontsize=9)
