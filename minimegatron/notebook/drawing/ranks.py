"""Pictures of ranks: their groups, matrices, calls, and what each of them has.

Megatron has no counterpart.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyArrowPatch

from minimegatron.core.rank_generator import RankGenerator
from minimegatron.notebook.drawing.palette import (
    BLUE,
    LIGHT_GREY,
    LINE_GREY,
    ORANGE,
    RED,
    nth_colour,
)

# -- Groups --

TITLES = {
    "tp": "tp, tensor: every layer, many times",
    "dp": "dp, data: gradients, once a step",
    "pp": "pp, pipeline: one message per microbatch",
}


def draw_groups(grid: RankGenerator) -> None:
    """Sixteen ranks in two machines of eight; the ranks of one group are joined by a line."""
    _, panels = plt.subplots(3, 1, figsize=(7.5, 5.6), layout="constrained")
    for panel, (axis, title) in zip(panels, TITLES.items(), strict=True):
        for left in (-0.45, 4.55):
            machine = plt.Rectangle((left, -1.45), 3.9, 1.9, fc=LIGHT_GREY, ec=LINE_GREY)
            panel.add_patch(machine)
        for number, group in enumerate(grid.get_ranks(axis)):
            _draw_group(panel, group, nth_colour(number))
        panel.set(title=title, xlim=(-0.7, 8.7), ylim=(-1.6, 0.6), aspect="equal")
        panel.axis("off")
    plt.show()


def _draw_group(panel: Any, group: Sequence[int], colour: str) -> None:
    for rank, next_rank in pairwise(group):
        (x, y), (next_x, next_y) = _place(rank), _place(next_rank)
        # Past a rank that is not in the group, the line goes round it.
        bend = (-0.4, 0.4)[rank % 2] if y == next_y and next_x - x > 1 else 0
        line = FancyArrowPatch(
            (x, y), (next_x, next_y), connectionstyle=f"arc3,rad={bend}", arrowstyle="-"
        )
        line.set(color=colour, lw=3, alpha=0.6)
        panel.add_patch(line)
    xs, ys = zip(*map(_place, group), strict=True)
    panel.scatter(xs, ys, s=330, color=colour, zorder=3)
    for rank in group:
        panel.annotate(rank, _place(rank), color="white", ha="center", va="center", weight="bold")


def _place(rank: int) -> tuple[float, float]:
    """Where a rank is drawn: a row per half of a machine."""
    return rank % 4 + (0.0 if rank < 8 else 5.0), -(rank % 8 // 4)


# -- Matrices --


def draw_matrices(matrices: Mapping[str, torch.Tensor]) -> None:
    """Tensors of tokens and features side by side, in one scale of colours."""
    limit = float(max(matrix.abs().max() for matrix in matrices.values()))
    figure, panels = plt.subplots(1, len(matrices), figsize=(10, 2.4), layout="constrained")
    for panel, (title, matrix) in zip(panels, matrices.items(), strict=True):
        image = panel.imshow(matrix, cmap="PuOr", vmin=-limit, vmax=limit)
        ticks = {"xticks": range(matrix.shape[1]), "yticks": range(matrix.shape[0])}
        panel.set(title=title, xlabel="feature", **ticks)
    panels[0].set_ylabel("token")
    figure.colorbar(image, ax=panels, shrink=0.8)
    plt.show()


# -- Programs of sends and receives --

Program = Sequence[Sequence[tuple[str, int]]]
"""Per rank its calls: (what, peer)."""
Meetings = tuple[Sequence[tuple[int, int, int, int]], Mapping[int, int]]
"""([(sender, its call, receiver, its call), ...] in order, {rank: the call it is stuck in})."""
END = 3.4
"""How far down the lines of ranks go."""


def draw_programs(programs: Mapping[str, tuple[Program, Meetings]]) -> None:
    """A column per rank, time downwards; an arrow per message, red where a rank waits for ever."""
    widths = [len(program) for program, _ in programs.values()]
    size = {"figsize": (1.22 * sum(widths), 3.2), "width_ratios": widths}
    _, panels = plt.subplots(1, len(widths), layout="constrained", squeeze=False, **size)
    for panel, (title, (program, meetings)) in zip(panels[0], programs.items(), strict=True):
        _draw_program(panel, program, *meetings)
        panel.set(xlim=(-0.6, len(program) - 0.4), ylim=(3.6, -0.2))
        panel.set_title(title, fontsize=11)
        panel.axis("off")
    plt.show()


def _draw_program(panel: Any, program: Program, met: Any, stuck: Mapping[int, int]) -> None:
    when: dict[tuple[int, int], int] = {}
    for sender, sends, receiver, receives in met:  # a call comes after the one before it
        before = [(sender, sends - 1), (receiver, receives - 1)]
        when[sender, sends] = when[receiver, receives] = 1 + max(when.get(b, 0) for b in before)
    for rank in range(len(program)):
        panel.plot([rank, rank], [0.4, END], color=LINE_GREY, zorder=0)
        panel.annotate(f"rank {rank}", (rank, 0.1), ha="center", weight="bold")
    for rank, call in stuck.items():
        what, peer = program[rank][call]
        time = 1 + max((when[rank, earlier] for earlier in range(call)), default=0)
        panel.plot([rank, rank], [time, END], color=RED, lw=4)
        box = {"bbox": {"fc": "white", "ec": "none"}, "color": RED, "fontsize": 9}
        panel.annotate(f"{what} {peer}\nfor ever", (rank, time + 0.9), ha="center", **box)
    for sender, sends, receiver, _ in met:
        time = when[sender, sends]
        arrow = {"arrowstyle": "-|>", "color": BLUE, "lw": 2}
        panel.annotate("", (receiver, time + 0.12), (sender, time - 0.12), arrowprops=arrow)


# -- What each rank has --


def draw_snapshots(snapshots: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A column per action, a row per rank: activations held, or the norm of its gradients."""
    _, panel = plt.subplots(figsize=(9, 2.6), layout="constrained")
    for column, ranks in enumerate(snapshots.values()):
        for rank, has in enumerate(ranks):
            norm = has["gradient norm"]
            colour = BLUE if has["holds activations"] else ORANGE if norm > 0 else LIGHT_GREY
            corner = (column - 0.47, rank - 0.44)
            panel.add_patch(plt.Rectangle(corner, 0.94, 0.88, color=colour))
            if norm > 0:
                panel.annotate(f"{norm:.2f}", (column, rank), ha="center", va="center")
    num_ranks = len(next(iter(snapshots.values())))
    panel.set_xticks(range(len(snapshots)), snapshots)
    panel.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    panel.set(xlim=(-0.6, len(snapshots) - 0.4), ylim=(num_ranks - 0.4, -0.6))
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0)
    plt.show()
