"""One weight's gradient through a step: who divides it, by what, in which order.

Called by: `symptoms`, for the page of that name. Calls: the package's own
`forward_step_calc_loss`, `backward_step`, `gradient_scaling_factor` and loss scaler.

What needs several ranks, the sum over them and the division by all tokens, is done here in one process;
tests/docs/test_symptoms.py holds the result to that of real ranks.

The weight is 1, and a microbatch's summed loss is weight x its number in `sums`: so that number is the
gradient of the sum, too.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cases.case_words import table
from minimegatron.core.distributed.distributed_data_parallel import gradient_scaling_factor
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.optimizer.grad_scaler import ConstantGradScaler
from minimegatron.core.pipeline_parallel.steps import backward_step, forward_step_calc_loss
from pictures import pictures

COUNTS = ((4, 1), (2, 3))
"""Tokens that count, by data-parallel rank and microbatch; those of the page on the loss contract."""
SUMS = ((8, 5), (2, 9))
"""Summed losses, likewise."""
LOSS_SCALE = 1024.0

SUM, MEAN, OWN_MEAN = "(sum, n, report)", "(mean, report)", "(mean of own tokens, report)"
"""What a loss function returns. `MEAN`: over the tokens of all context ranks."""


class Followed(NamedTuple):
    """The gradient at each place."""

    after_loss: list[list[float]]
    """Of the loss that `forward_step_calc_loss` returned, by rank and microbatch."""
    after_backward: list[float]
    """In each rank's `main_grad`, after its last microbatch."""
    after_ddp: float
    """Scaled and summed over ranks."""
    after_finalize: float
    after_unscale: float
    num_tokens: int
    """By which finalize divided."""
    factor: float
    """By which each rank multiplied before the sum."""


def follow(
    returns: str = SUM,
    per_token: bool = False,
    c: int = 1,
    sums: Sequence[Sequence[float]] = SUMS,
    counts: Sequence[Sequence[int]] = COUNTS,
    loss_scale: float = LOSS_SCALE,
) -> Followed:
    """A step of len(sums) copies; the c ranks of a copy have equal parts of each sequence."""
    scaler = ConstantGradScaler(loss_scale)
    config = ModelParallelConfig(
        calculate_per_token_loss=per_token, grad_scale_func=lambda loss: scaler.scale * loss
    )
    after_loss, main_grads, num_tokens = [], [], 0
    for rank in range(len(sums) * c):
        microbatches = list(zip(sums[rank // c], counts[rank // c], strict=True))
        grads, main_grad = [], 0.0
        for total, n in microbatches:
            weight = torch.ones((), dtype=torch.float64, requires_grad=True)
            loss_func = loss_function(returns, n // c, n)
            loss, counted = forward_step_calc_loss(
                torch.nn.Identity(),
                weight * (total / c),
                loss_func,
                config,
                None,
                False,
                len(microbatches),
                [],
                c,
                True,
            )
            grads.append(float(torch.autograd.grad(loss, weight, retain_graph=True)[0]))
            backward_step(None, loss, None, None, config)
            main_grad += float(weight.grad)
            num_tokens += int(counted)
        after_loss.append(grads)
        main_grads.append(main_grad)
    factor = gradient_scaling_factor(config, DistributedDataParallelConfig(), len(main_grads))
    summed = sum(grad * factor for grad in main_grads)
    divided_by = max(num_tokens, 1) if per_token else 1
    finalized = summed / divided_by
    unscaled = finalized * float(scaler.inv_scale)
    return Followed(after_loss, main_grads, summed, finalized, unscaled, divided_by, factor)


def loss_function(returns: str, own: int, everybodys: int) -> Callable[[torch.Tensor], tuple]:
    """A user's: from a summed loss to what the contract takes."""

    def loss_func(total: torch.Tensor) -> tuple:
        if returns == SUM:
            return total, torch.tensor(own, dtype=torch.int), {}
        return total / (everybodys if returns == MEAN else own), {}

    return loss_func


# -- Words --


def number(value: float) -> str:
    """
    >>> number(13312.0), number(2.75), number(24 / 10)
    ('13,312', '2.75', '2.4')
    """
    return f"{round(value, 9):,.10g}"


def outcome_table() -> str:
    """What is left at the end, by what the loss function returns and the flag."""
    found = {(r, on): follow(r, on) for r in (SUM, MEAN) for on in (False, True)}
    right = {
        "the mean of the microbatches' means": follow(SUM, False).after_unscale,
        "the mean over all tokens": sum(map(sum, SUMS)) / sum(map(sum, COUNTS)),
    }
    rows = []
    for (returns, on), one in found.items():
        words = [what for what, value in right.items() if abs(value - one.after_unscale) < 1e-9]
        times = one.after_unscale / right["the mean of the microbatches' means"]
        words = words or [f"**{number(times)} times** the mean of the microbatches' means"]
        flag = "on" if on else "off"
        rows.append([f"`{returns}`", flag, one.num_tokens, number(one.after_unscale), words[0]])
    head = ["the loss function returns", "flag", "divided by tokens", "gradient", "which is"]
    return table(head, rows)


def context_table(c: int = 2) -> str:
    """Which factor is left with c context ranks, where every microbatch has the same sum and tokens."""
    sums, counts = ((16, 16), (16, 16)), ((8, 8), (8, 8))
    right = 16 / 8
    rows = []
    for returns in (SUM, MEAN, OWN_MEAN):
        for on in (False, True):
            one = follow(returns, on, c, sums, counts)
            times = one.after_unscale / right
            words = "right" if abs(times - 1) < 1e-9 else f"**{number(times)} times** too large"
            rows.append([f"`{returns}`", "on" if on else "off", number(one.after_unscale), words])
    return table(["the loss function returns", "flag", "gradient", ""], rows)


def dividers(per_token: bool) -> list[tuple[str, str]]:
    """Where something is divided or multiplied, in order: the function, and what it does there."""
    tokens = number(follow(SUM, per_token).num_tokens)
    return [
        ("loss function", "returns sum, n"),
        ("forward_step", "nothing" if per_token else "÷ n, ÷ M"),
        ("backward_step", "× S, add up"),
        ("DDP", "sum" if per_token else "÷ d, sum"),
        ("finalize", f"÷ {tokens} tokens" if per_token else "nothing"),
        ("optimizer", "÷ S"),
    ]


# -- The picture --

COLUMN, ROW, BOX = 104, 38, 78


def flow_figure(per_token: bool) -> str:
    """The gradient from four losses to one number, place by place."""
    one = follow(SUM, per_token)
    rows = [r * len(SUMS[0]) + m for r in range(len(SUMS)) for m in range(len(SUMS[0]))]
    columns = [
        [(y, number(s), y // 2) for y, s in zip(rows, sum(SUMS, ()), strict=True)],
        [(y, number(g), y // 2) for y, g in zip(rows, sum(one.after_loss, []), strict=True)],
        [(2 * r + 0.5, number(g), r) for r, g in enumerate(one.after_backward)],
        [(1.5, number(one.after_ddp), 2)],
        [(1.5, number(one.after_finalize), 2)],
        [(1.5, number(one.after_unscale), 2)],
    ]
    parts, top, left = [], 54, 78
    for place, (who, what) in enumerate(dividers(per_token)):
        x = left + place * COLUMN + BOX / 2
        quiet = " mm-quiet" if what == "nothing" else ""
        parts.append(pictures.text(x, 18, who, "mm-middle mm-small mm-strong"))
        parts.append(pictures.text(x, 36, what, f"mm-middle mm-small{quiet}"))
    for rank, counts in enumerate(COUNTS):
        for mb, n in enumerate(counts):
            y = top + (2 * rank + mb) * ROW
            parts.append(pictures.text(0, y + 12, f"rank {rank}, mb {mb}", "mm-small"))
            parts.append(pictures.text(0, y + 26, f"n = {n}", "mm-small mm-quiet"))
    for place, boxes in enumerate(columns):
        x = left + place * COLUMN
        for y, words, hue in boxes:
            parts.append(pictures.box(x, top + y * ROW, BOX, 28, f"mm-hue-{hue}"))
            css = f"mm-middle mm-on-{hue}"
            parts.append(pictures.text(x + BOX / 2, top + y * ROW + 19, words, css))
        if place:
            parts += _lines(columns[place - 1], boxes, x, top)
    width, height = left + 6 * COLUMN - (COLUMN - BOX) + 8, top + 4 * ROW
    title = "; ".join(
        f"{who}, {what}: {', '.join(words for _, words, _ in boxes)}"
        for (who, what), boxes in zip(dividers(per_token), columns, strict=True)
    )
    svg = pictures.svg(width, height, title, parts)
    return pictures.flowing(svg)


def _lines(before: list[tuple], after: list[tuple], x: float, top: float) -> list[str]:
    """From each box to the one that it goes into: the nearest."""
    parts = []
    for y, _, _ in before:
        target = min(after, key=lambda box: abs(box[0] - y))[0]
        start, end = x - (COLUMN - BOX) + 2, x - 2
        parts.append(
            f'<line x1="{start:g}" y1="{top + y * ROW + 14:g}" x2="{end:g}" '
            f'y2="{top + target * ROW + 14:g}" class="mm-flow"/>'
        )
    return parts
