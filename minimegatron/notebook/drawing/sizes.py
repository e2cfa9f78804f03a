"""Pictures of numbers side by side: lengths of steps, weights of tokens, bytes, shares of time.

Megatron has no counterpart.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt

from minimegatron.notebook.drawing.palette import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SKY,
    nth_colour,
)

EMPTY = "#eef1f4"
FILLED = "#c8ced4"


def _open(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


# -- Steps --


def draw_lengths(
    latencies: Sequence[float],
    curves: Mapping[tuple[int | None, bool], Sequence[float]],
    shortest: float,
    title: str,
) -> None:
    """The length of a step by the time of a message; per (chunks, overlapped) a curve."""
    colours = {None: "#000000", 2: BLUE, 4: RED}
    _, axes = plt.subplots(figsize=(7.5, 4), layout="constrained")
    for (chunks, is_overlapped), lengths in curves.items():
        label = "1F1B" if chunks is None else f"v = {chunks}"
        label += ", overlapped" if is_overlapped else ""
        style = "--" if is_overlapped else "-"
        axes.plot(latencies, lengths, color=colours[chunks], ls=style, label=label)
    axes.axhline(shortest, color=GREY, lw=1)
    below = {"xytext": (0, -3), "textcoords": "offset points", "ha": "right", "va": "top"}
    axes.annotate("no bubble at all", (latencies[-1], shortest), color="#666666", **below)
    axes.set_xlabel("time of one message / time of a stage's forward")
    axes.set(ylabel="length of the step", title=title)
    axes.set_ylim(shortest - 0.1 * (max(map(max, curves.values())) - shortest), None)
    _open(axes)
    axes.legend(frameon=False)
    plt.show()


# -- Tokens and answers --


def draw_weights(weights: Mapping[str, Sequence[float]], num_tokens: Sequence[int]) -> None:
    """A panel per way to divide: the weight of one token, by the tokens in its microbatch."""
    _, panels = plt.subplots(1, len(weights), figsize=(12, 2.9), sharey=True, layout="constrained")
    for panel, (name, found) in zip(panels, weights.items(), strict=True):
        panel.bar(range(len(found)), found, color=BLUE)
        panel.axhline(1, color=RED, lw=1.5)
        panel.set(title=name, xlabel="tokens in the microbatch", yscale="log")
        panel.set_xticks(range(len(found)), num_tokens)
        _open(panel)
    panels[0].set_ylabel("weight of one token\n(1: as it should be)")
    plt.show()


def draw_changes(advantages: Sequence[float], changes: Sequence[float], per_prompt: int) -> None:
    """A point per answer: how good it was, and how much more likely an update made it."""
    _, axes = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
    for prompt, marker in zip(range(len(advantages) // per_prompt), "os^Dv*Px", strict=False):
        mine = slice(prompt * per_prompt, (prompt + 1) * per_prompt)
        look = {"marker": marker, "s": 45, "color": nth_colour(prompt)}
        axes.scatter(advantages[mine], changes[mine], label=f"prompt {prompt}", **look)
    axes.axhline(0, color=GREY, lw=0.8)
    axes.axvline(0, color=GREY, lw=0.8)
    axes.set(xlabel="advantage of the answer", ylabel="change of its log-probability")
    _open(axes)
    axes.legend(frameon=False, fontsize=9)
    plt.show()


# -- Memory --

PARTS = {"weights": BLUE, "gradients": SKY, "optimizer": GREEN, "activations": ORANGE}


def draw_stages(
    measured: Mapping[str, Sequence[Mapping[str, float]]],
    modelled: Mapping[str, Sequence[Mapping[str, float]]],
) -> None:
    """A panel per way to run, a bar per stage: what is measured; black lines: the model's sums."""
    _, panels = plt.subplots(1, len(measured), figsize=(10, 3.8), sharey=True, layout="constrained")
    for panel, (way, stages) in zip(panels, measured.items(), strict=True):
        for stage, (found, model) in enumerate(zip(stages, modelled[way], strict=True)):
            bottom = top = 0.0
            for part, colour in PARTS.items():
                height, is_last = found[part] / 2**20, part == "activations"
                label = part if stage == 0 else None
                panel.bar(stage, height, bottom=bottom, color=colour, width=0.7, label=label)
                bottom, top = bottom + height, top + float(model[part]) / 2**20
                label = "the model" if stage == 0 and is_last else None
                ends = [stage - 0.42, stage + 0.42]
                panel.plot(ends, [top, top], color="black", lw=1.3, label=label)
        panel.set(title=f"activations {way}", xticks=range(len(stages)))
        panel.set_xticklabels([f"stage {stage}" for stage in range(len(stages))])
        _open(panel)
    panels[0].set_ylabel("MiB, measured")
    panels[-1].legend(frameon=False)
    plt.show()


def draw_configurations(
    names: Sequence[str],
    states: Sequence[float],
    activations: Mapping[str, Sequence[float]],
    limit: float,
) -> None:
    """Per model a bar of its state; on it, side by side, the activations of each way. GiB."""
    _, axes = plt.subplots(figsize=(10, 3.8), layout="constrained")
    axes.bar(names, states, color=FILLED, width=0.75, label="weights, gradients, optimizer")
    ways = zip(activations.items(), (RED, BLUE, GREEN), strict=True)
    for i, ((way, heights), colour) in enumerate(ways):
        places = [number + (i - 1) * 0.24 for number in range(len(names))]
        look = {"color": colour, "width": 0.22, "label": f"+ activations: {way}"}
        axes.bar(places, heights, bottom=states, **look)
    axes.axhline(limit, color="black", lw=1)
    axes.text(-0.4, limit + 2, f"{limit * 2**30 / 1e9:.0f} GB", fontsize=9)
    axes.set(xlabel="billion parameters", ylabel="GiB per GPU, first stage")
    _open(axes)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(0.08, 1.0))
    plt.show()


def draw_shares(names: Sequence[str], shares: Sequence[Mapping[str, float]], rest: str) -> None:
    """Per model a bar of length 1: the share of each part, and on top what is left, the `rest`."""
    colours = (BLUE, ORANGE, RED, "#000000", GREEN)
    _, axes = plt.subplots(figsize=(10, 3.8), layout="constrained")
    bottom = [0.0] * len(names)
    for part, colour in zip(shares[0], colours, strict=True):
        heights = [share[part] for share in shares]
        axes.bar(names, heights, bottom=bottom, color=colour, width=0.7, label=part)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    left = [1 - below for below in bottom]
    axes.bar(names, left, bottom=bottom, color=EMPTY, width=0.7, label=rest)
    axes.set(xlabel="billion parameters", ylabel="share of the published step")
    _open(axes)
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()
