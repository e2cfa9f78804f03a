"""Pictures of experts: who chose whom, which way tokens go, how even the load is.

Megatron has no counterpart.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch

from minimegatron.notebook.drawing.palette import GREY, LIGHT_GREY, LINE_GREY, nth_colour


def draw_routing(probs: torch.Tensor) -> None:
    """A row per token, a column per expert, [T, E]: how much it counts; below, tokens per expert."""
    num_tokens, num_experts = probs.shape
    size = {"figsize": (5.0, 4.6), "height_ratios": [3, 1]}
    _, (grid, bars) = plt.subplots(2, 1, sharex=True, layout="constrained", **size)
    for token, row in enumerate(probs.tolist()):
        for expert, weight in enumerate(row):
            colour = nth_colour(expert) if weight else LIGHT_GREY
            corner = (expert - 0.46, token - 0.43)
            alpha = 0.25 + 0.75 * weight if weight else 1.0
            grid.add_patch(plt.Rectangle(corner, 0.92, 0.86, color=colour, alpha=alpha))
            if weight:
                grid.annotate(f"{weight:.2f}", (expert, token), ha="center", va="center")
    grid.set(ylabel="token", ylim=(num_tokens - 0.4, -0.6), yticks=range(num_tokens))
    counts = (probs > 0).sum(dim=0).tolist()
    bars.bar(range(num_experts), counts, color=[nth_colour(e) for e in range(num_experts)])
    bars.axhline(sum(counts) / num_experts, color=GREY, lw=1, ls="--")
    bars.set(ylabel="tokens", xlabel="expert (dashed: an even share)", xticks=range(num_experts))
    _bare(grid, bars)
    plt.show()


def draw_ways(maps: Sequence[torch.Tensor]) -> None:
    """Tokens on the left, in order; on the right the rows of each expert; a line for each choice.

    `maps` has a map [T, E] per rank. Rank r holds the r-th part of the experts, and its tokens.
    """
    choices = torch.cat(list(maps))
    experts, tokens = choices.T.nonzero(as_tuple=True)
    per_rank = choices.shape[1] // len(maps)
    # Room between ranks, and a little between experts.
    left = [token + token // len(maps[0]) for token in range(len(choices))]
    right = [i + 0.5 * int(e) + int(e) // per_rank for i, e in enumerate(experts)]
    height = max(left[-1] if left else 0, right[-1] if right else 0)
    left = [y * height / max(left[-1], 1) for y in left]
    _, panel = plt.subplots(figsize=(7.0, 1.2 + 0.16 * height), layout="constrained")
    for y, expert, token in zip(right, experts.tolist(), tokens.tolist(), strict=True):
        panel.plot([0, 1], [left[token], y], color=nth_colour(expert), alpha=0.6, lw=1.5, zorder=0)
        panel.scatter(1, y, s=50, color=nth_colour(expert), marker="s")
    for token, y in enumerate(left):
        panel.scatter(0, y, s=90, color=LINE_GREY)
        panel.annotate(token % len(maps[0]), (0, y), fontsize=7, ha="center", va="center")
        if token % len(maps[0]) == 0 and len(maps) > 1:
            _label(panel, (-0.05, y), f"rank {token // len(maps[0])}", "right")
    for expert in sorted(set(experts.tolist())):
        y = right[experts.tolist().index(expert)]
        where = f", rank {expert // per_rank}" if len(maps) > 1 else ""
        _label(panel, (1.05, y), f"expert {expert}{where}", "left")
    panel.set(xlim=(-0.25, 1.45), ylim=(height + 0.8, -0.8))
    panel.axis("off")
    plt.show()


def draw_splits(rows: torch.Tensor) -> None:
    """[e, e]: how many rows each rank (downwards) sends to each rank (across)."""
    _, panel = plt.subplots(figsize=(2.8, 2.6), layout="constrained")
    panel.imshow(rows, cmap="Blues", vmin=0, vmax=1.6 * float(rows.max()))
    for sender, row in enumerate(rows.tolist()):
        for receiver, number in enumerate(row):
            panel.annotate(int(number), (receiver, sender), ha="center", va="center")
    ranks = range(len(rows))
    panel.set(xlabel="to rank", ylabel="from rank", xticks=ranks, yticks=ranks, title="rows")
    _bare(panel)
    plt.show()


def draw_balance(lines: Mapping[str, Sequence[float]], worst: float) -> None:
    """By step, the tokens of the fullest expert over an even share; 1 is even, `worst` the most."""
    _, panel = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    for number, (name, values) in enumerate(lines.items()):
        panel.plot(values, color=nth_colour(number), label=name)
    for value, words in ((1, "even"), (worst, "all tokens to the same few")):
        panel.axhline(value, color=GREY, lw=1, ls="--")
        panel.annotate(words, (0, value), xytext=(2, 3), textcoords="offset points", color=GREY)
    panel.set(xlabel="step", ylabel="fullest expert / even share", ylim=(0.8, 1.12 * worst))
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    plt.show()


def _bare(*panels: Any) -> None:
    for panel in panels:
        panel.spines[:].set_visible(False)
        panel.tick_params(length=0)


def _label(panel: Any, place: tuple[float, float], words: str, side: str) -> None:
    panel.annotate(words, place, ha=side, va="center", weight="bold", fontsize=9)
