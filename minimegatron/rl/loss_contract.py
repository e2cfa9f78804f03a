"""Who divides the loss by what: five frameworks, as rows that can be run.

A row says what a framework's step hands to the schedule, given the losses of tokens and their mask:
two values or three, with which factor, at which setting of `calculate_per_token_loss`. `coefficients`
says what becomes of it: how much each token's loss counts in the gradient. In `BREAKS` one
part of a row is exchanged. This happens when code moves from one framework to another.

Megatron has no counterpart. The lines are those of ROLL 8eb27cc, verl 1dda039, slime 624b824, NeMo-RL
7ea279a and Megatron core_v0.16.1; of `train_rl` those of 34c3741, which came after that release.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from minimegatron.core.transformer.zigzag import positions_of_rank


@dataclass(frozen=True)
class Counts:
    """Of a step: what each rank knows of the layout and of the whole batch."""

    num_microbatches: int
    """M, of one copy of the model."""
    copies: int
    """d"""
    context_ranks: int
    """c"""
    tokens: float
    """N, under the mask."""
    rows: float
    """W, of those that have a token under the mask."""
    all_rows: int
    """The global batch size."""
    real_tokens: float
    """R, prompts too, without padding."""
    tokens_of_copy: float = 0.0
    """Under the mask, of this copy alone. No framework divides by it."""


@dataclass(frozen=True)
class Microbatch:
    """What a loss function has on one rank, [b, s]; [b, s/c] of its own, where nothing is gathered."""

    losses: torch.Tensor
    mask: torch.Tensor
    tokens_of_rows: torch.Tensor
    """[b]: of whole rows, under the mask."""
    real_tokens: float
    """Of whole rows, prompts too."""


def sum_of_tokens(one: Microbatch) -> torch.Tensor:
    """Σt, a tensor []."""
    return (one.losses * one.mask).sum()


def sum_of_row_means(one: Microbatch) -> torch.Tensor:
    """Each row divides by its own tokens; a row without any is 0."""
    return ((one.losses * one.mask).sum(dim=1) / one.tokens_of_rows.clamp(min=1)).sum()


@dataclass(frozen=True)
class Row:
    """One framework's way.

    Attributes:
        total: of a microbatch: the sum of its tokens, or of its rows' means.
        factor: what the total is multiplied with.
        count: the second of three values, number of tokens; None where the loss function returns two.
        is_per_token: `calculate_per_token_loss`.
        gather: how log-probabilities cross context ranks: "sum" or "part", after what backward does; ""
            where each rank keeps the losses of its own tokens.
        gradient_of: the formula that the framework states; a key of `FORMULAS`.
    """

    name: str
    place: str
    total: Callable[[Microbatch], torch.Tensor]
    factor: Callable[[Counts], float]
    factor_words: str
    count: Callable[[Microbatch, Counts], float] | None
    count_words: str
    is_per_token: bool
    gather: str
    gradient_of: str

    def hand_over(self, one: Microbatch, counts: Counts) -> tuple[Any, ...]:
        """What the loss function returns: (loss, report), or (loss, number of tokens, report)."""
        loss = self.total(one) * self.factor(counts)
        report = {"loss": loss.detach()}
        if self.count is None:
            return loss, report
        return loss, torch.as_tensor(self.count(one, counts)), report


# -- The formulas --

Pieces = list[tuple[torch.Tensor, torch.Tensor]]
"""Losses and mask of each microbatch, or of each context rank's part of one."""


def token_mean(losses: torch.Tensor, mask: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Over all tokens that count."""
    return (losses * mask).sum() / mask.sum()


def mean_of_rows(losses: torch.Tensor, mask: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Of each row's mean, over rows that have a token."""
    means = (losses * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return means.sum() / (mask.sum(dim=1) > 0).sum()


def mean_of_all_rows(losses: torch.Tensor, mask: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Of each row's mean, over all rows; one without a token counts as 0."""
    means = (losses * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return means.sum() / len(mask)


def at_least_one_a_row(losses: torch.Tensor, mask: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Over tokens, where a row without any counts as one."""
    return (losses * mask).sum() / mask.sum(dim=1).clamp(min=1).sum()


def at_least_one_each(losses: torch.Tensor, mask: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Over tokens, where a microbatch without any counts as one."""
    counts = [part.sum().clamp(min=1) for _, part in pieces]
    return (losses * mask).sum() / torch.stack(counts).sum()


def mean_of_means(losses: torch.Tensor, mask: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Of each piece's mean over its own tokens."""
    means = [(part * counts).sum() / counts.sum().clamp(min=1) for part, counts in pieces]
    return torch.stack(means).mean()


FORMULAS: dict[str, Callable[[torch.Tensor, torch.Tensor, Pieces], torch.Tensor]] = {
    "Σt / N": token_mean,
    "Σr / W": mean_of_rows,
    "Σr / GBS": mean_of_all_rows,
    "Σt / Σ max(tokens of a row, 1)": at_least_one_a_row,
    "Σt / Σ max(tokens of a microbatch, 1)": at_least_one_each,
    "mean of the microbatches' means": mean_of_means,
}
"""Over the whole batch. The last two depend on how it is cut."""

# -- The rows --


def tokens_here(one: Microbatch, counts: Counts) -> float:
    """n of a microbatch, or of this rank's part of it."""
    return float(one.mask.sum())


def tokens_or_one(one: Microbatch, counts: Counts) -> float:
    """The same, but never 0."""
    return max(float(one.mask.sum()), 1.0)


MEGATRON = Row(
    "Megatron, pretrain_gpt, flag on",
    "megatron: pretrain_gpt.py",
    *(sum_of_tokens, lambda counts: 1.0, "Σt"),
    *(tokens_here, "tokens here"),
    *(True, "", "Σt / N"),
)
TRAIN_RL = Row(
    "Megatron, train_rl of August 2026, flag on",
    "Megatron 34c3741: train_rl.py",
    *(sum_of_tokens, lambda counts: 1.0, "Σt"),
    *(tokens_or_one, "max(tokens, 1)"),
    *(True, "sum", "Σt / Σ max(tokens of a microbatch, 1)"),
)
ROLL = Row(
    "ROLL, token-mean",
    "ROLL: roll/utils/functionals.py#L253",
    sum_of_tokens,
    lambda counts: counts.num_microbatches * counts.copies / counts.tokens,
    "Σt / N · M · d",
    *(None, "", False, "part", "Σt / N"),
)
ROLL_ROWS = Row(
    "ROLL, seq-mean-token-mean",
    "ROLL: roll/utils/functionals.py#L263",
    sum_of_row_means,
    lambda counts: counts.num_microbatches * counts.copies / (counts.rows + 1e-8),
    "Σr / (W + 1e-8) · M · d",
    *(None, "", False, "part", "Σr / W"),
)
VERL = Row(
    "verl",
    "verl: verl/workers/engine/megatron/transformer_impl.py#L1431",
    sum_of_tokens,
    lambda counts: counts.copies * counts.num_microbatches / counts.tokens,
    "Σt / N · d · M",
    *(None, "", False, "part", "Σt / N"),
)
VERL_PER_TOKEN = Row(
    "verl, flag on (set where c > 1)",
    "verl: verl/workers/engine/megatron/transformer_impl.py#L1450",
    sum_of_tokens,
    lambda counts: counts.copies / counts.tokens * counts.real_tokens / counts.copies,
    "(Σt / N · d) · R / d",
    lambda one, counts: one.real_tokens // counts.context_ranks,
    "real tokens of the microbatch // c",
    *(True, "part", "Σt / N"),
)
SLIME = Row(
    "slime",
    "slime: slime/backends/megatron_utils/loss.py#L1353",
    sum_of_row_means,
    lambda counts: counts.num_microbatches / counts.all_rows * counts.copies * counts.context_ranks,
    "Σr · M / GBS · d · c",
    lambda one, counts: 1.0,
    "1",
    *(False, "", "Σr / GBS"),
)
SLIME_PER_TOKEN = Row(
    "slime, flag on",
    "slime: slime/backends/megatron_utils/loss.py#L1361",
    sum_of_tokens,
    lambda counts: counts.context_ranks,
    "Σt · c",
    lambda one, counts: float(one.tokens_of_rows.clamp(min=1).sum()),
    "Σ max(tokens of a row, 1), of whole rows on each rank",
    *(True, "", "Σt / Σ max(tokens of a row, 1)"),
)
NEMO = Row(
    "NeMo-RL",
    "NeMo-RL: nemo_rl/models/megatron/train.py#L574",
    sum_of_tokens,
    lambda counts: counts.num_microbatches / (counts.tokens + 1e-8) / counts.context_ranks**2,
    "Σt / (N + 1e-8) / c · M / c",
    *(None, "", True, "sum", "Σt / N"),
)
MEAN_OF_MEANS = "mean of the microbatches' means"
ROWS = (
    MEGATRON,
    replace(
        MEGATRON,
        name="Megatron, pretrain_gpt, flag off",
        is_per_token=False,
        gradient_of=MEAN_OF_MEANS,
    ),
    TRAIN_RL,
    replace(
        TRAIN_RL,
        name="Megatron, train_rl of August 2026, flag off (its default)",
        is_per_token=False,
        gradient_of=MEAN_OF_MEANS,
    ),
    ROLL,
    ROLL_ROWS,
    VERL,
    VERL_PER_TOKEN,
    SLIME,
    SLIME_PER_TOKEN,
    NEMO,
)


# -- One part exchanged --


@dataclass(frozen=True)
class Break:
    """A row that was changed: what its gradient then is, as a multiple of the formula's.

    `times` None: no multiple, it depends on how the batch is cut.
    """

    words: str
    row: Row
    times: Callable[[Counts], float] | None
    times_words: str


def without(row: Row, name: str) -> Callable[[Counts], float]:
    """The row's factor, as if `name` were 1."""
    return lambda counts: row.factor(replace(counts, **{name: 1}))


def of_microbatch(one: Microbatch) -> torch.Tensor:
    """Divided by the tokens of this microbatch, where those of the batch belong."""
    return sum_of_tokens(one) / one.mask.sum().clamp(min=1)


BREAKS = (
    Break(
        "ROLL's loss without M",
        replace(ROLL, factor=without(ROLL, "num_microbatches")),
        *(lambda counts: 1 / counts.num_microbatches, "1 / M"),
    ),
    Break(
        "ROLL's loss without d",
        replace(ROLL, factor=without(ROLL, "copies")),
        *(lambda counts: 1 / counts.copies, "1 / d"),
    ),
    Break(
        "ROLL's loss with the flag on",
        replace(ROLL, is_per_token=True),
        *(lambda counts: counts.copies * counts.context_ranks, "d · c"),
    ),
    Break(
        "NeMo-RL's loss with the flag off",
        replace(NEMO, is_per_token=False),
        *(lambda counts: 1 / (counts.copies * counts.context_ranks), "1 / (d · c)"),
    ),
    Break(
        "ROLL's loss over a gather that sums",
        replace(ROLL, gather="sum"),
        *(lambda counts: counts.context_ranks, "c"),
    ),
    Break(
        "verl's loss over a gather that sums",
        replace(VERL, gather="sum"),
        *(lambda counts: counts.context_ranks, "c"),
    ),
    Break(
        "NeMo-RL's loss over a gather that takes its part",
        replace(NEMO, gather="part"),
        *(lambda counts: 1 / counts.context_ranks, "1 / c"),
    ),
    Break(
        "train_rl's loss over a gather that takes its part",
        replace(TRAIN_RL, gather="part"),
        *(lambda counts: 1 / counts.context_ranks, "1 / c"),
    ),
    Break(
        "slime's per-token loss without c",
        replace(SLIME_PER_TOKEN, factor=lambda counts: 1.0),
        *(lambda counts: 1 / counts.context_ranks, "1 / c"),
    ),
    Break(
        "N of the microbatch in place of the batch's",
        replace(
            ROLL,
            total=of_microbatch,
            factor=lambda counts: 1.0,
        ),
        *(None, "changes with M and d"),
    ),
    Break(
        "N of the copy in place of the batch's",
        replace(
            ROLL,
            factor=lambda counts: counts.num_microbatches / counts.tokens_of_copy,
        ),
        *(None, "changes with d"),
    ),
    Break(
        "an empty microbatch counts one token",
        replace(TRAIN_RL, gradient_of="Σt / N"),
        *(None, "N / (N + number of empty microbatches)"),
    ),
    Break(
        "an empty row counts one token",
        replace(SLIME_PER_TOKEN, gradient_of="Σt / N"),
        *(
            lambda counts: counts.tokens / (counts.tokens + counts.all_rows - counts.rows),
            "N / (N + 1)",
        ),
    ),
    Break(
        "train_rl without the flag, which is off by default",
        replace(TRAIN_RL, is_per_token=False, gradient_of="Σt / N"),
        *(None, "changes with M and d"),
    ),
)


# -- What becomes of it --


def counts_of(mask: torch.Tensor, real: torch.Tensor, M: int, d: int, c: int) -> Counts:
    """Of a whole batch, [GBS, s] both."""
    has_token = (mask.sum(dim=1) > 0).sum()
    return Counts(M, d, c, float(mask.sum()), float(has_token), len(mask), float(real.sum()))


def coefficients(
    row: Row, mask: torch.Tensor, real: torch.Tensor, M: int, d: int = 1, c: int = 1
) -> torch.Tensor:
    """How much each token's loss counts in the gradient of a step, [GBS, s], float64.

    Does with the losses' gradients what a step does with those of weights: the schedule's factor, the
    sum over microbatches, the sum or mean over copies and context ranks, and the division at the end.

    Args:
        mask: float64 [GBS, s], of tokens that count; rows of the first copy come first.
        real: float64 [GBS, s], 1 for each token that is not padding, also in prompts.
    """
    counts = counts_of(mask, real, M, d, c)
    losses = torch.ones_like(mask).requires_grad_()
    gradient, num_tokens = torch.zeros_like(mask), 0.0
    for number, rows in enumerate(torch.arange(len(mask)).chunk(M * d)):
        of_copy = mask.chunk(d)[number // M].sum()
        counts = replace(counts, tokens_of_copy=float(of_copy))
        for rank in range(c):
            part = positions_of_rank(mask.size(1), rank, c) if c > 1 else slice(None)
            here = part if not row.gather else slice(None)
            one = Microbatch(
                losses[rows][:, here],
                mask[rows][:, here],
                mask[rows].sum(dim=1),
                float(real[rows].sum()),
            )
            loss, *count, _ = row.hand_over(one, counts)
            if not count:
                loss = loss * c / M
            elif not row.is_per_token:
                loss = loss / max(float(count[0]), 1.0) / M
            num_tokens += float(count[0]) if count else 0.0
            (found,) = torch.autograd.grad(loss, losses)
            if row.gather == "part" and c > 1:
                kept = torch.zeros_like(found)
                kept[:, part] = found[:, part]
                found = kept
            gradient += found
    return gradient / (max(num_tokens, 1.0) if row.is_per_token else d * c)


def formula(row: Row, mask: torch.Tensor, M: int, d: int = 1, c: int = 1) -> torch.Tensor:
    """The same of the formula that the framework states: its derivative by each token's loss."""
    losses = torch.ones_like(mask).requires_grad_()
    # Where log-probabilities are gathered, a context rank has no piece of its own.
    parts = [slice(None)]
    if c > 1 and not row.gather:
        parts = [positions_of_rank(mask.size(1), rank, c) for rank in range(c)]
    pieces = [
        (losses[rows][:, part], mask[rows][:, part])
        for rows in torch.arange(len(mask)).chunk(M * d)
        for part in parts
    ]
    return torch.autograd.grad(FORMULAS[row.gradient_of](losses, mask, pieces), losses)[0]
