"""The global batch, who has which part of it, and what known mistakes make of its gradient.

Megatron has no counterpart.
"""

from collections.abc import Iterator

import torch

from minimegatron.exercises.check import Case

WORLD, LENGTH, WIDTH = 2, 8, 3
LENGTHS = (1, 5, 2, 7, 4, 3, 6, 0)
"""Tokens that count in each row; the last has none."""


def global_batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What token losses are made of, [8, 8, 3], and the mask, [8, 8]."""
    source = torch.Generator().manual_seed(case.seed)
    x = torch.randn(len(LENGTHS), LENGTH, WIDTH, generator=source, dtype=torch.float64)
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    return 1 + 0.5 * x, (mask * (0 if case.empty else 1)).double()


def part_of(case: Case, copy: int, context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One rank's microbatches."""
    found = []
    for tensor in global_batch(case):
        part = tensor.chunk(WORLD // case.c)[copy].chunk(case.c, dim=1)[context]
        found.append(part.chunk(case.M))
    return list(zip(*found, strict=True))


def of_all(case: Case) -> torch.Tensor:
    """The gradient that is asked for."""
    x, mask = global_batch(case)
    return (x * mask[..., None]).sum((0, 1)) / mask.sum().clamp(min=1)


def wrong_ways(case: Case) -> Iterator[tuple[torch.Tensor, str]]:
    """Wrong gradients, and what is said of them."""
    M, c, d = case.M, case.c, WORLD // case.c
    ranks = [part_of(case, rank // c, rank % c) for rank in range(WORLD)]
    sums = torch.stack([torch.stack([(x * m[..., None]).sum((0, 1)) for x, m in r]) for r in ranks])
    n = torch.stack([torch.stack([mask.sum() for _, mask in rank]) for rank in ranks])
    N = n.sum().clamp(min=1)
    mine, own = n.sum(1, keepdim=True).clamp(min=1), n.clamp(min=1)

    def weighed(factors: torch.Tensor) -> torch.Tensor:
        return (sums * factors[..., None]).sum((0, 1))

    if case.per_token:
        rows = torch.stack(
            [torch.stack([m.sum(1).clamp(min=1).sum() for _, m in r]) for r in ranks]
        )
        ones = torch.ones_like(n)
        scaled = (
            "The loss was divided already, and the end of the step divides again. What is left?"
        )
        yield (
            weighed(ones / own.sum()),
            "A microbatch without tokens was counted as one. Which N is it?",
        )
        yield weighed(ones / rows.sum()), "A row without tokens was counted as one. Which N is it?"
        yield weighed(1 / own) / N, scaled
        yield weighed(ones * M * d / N) / N, scaled
        yield weighed(ones / N) / N, scaled
        yield weighed(ones), "Nothing was divided at the end. What did it know of the tokens?"
        yield (
            weighed(ones / (N * M * WORLD)),
            "Each microbatch named the tokens of all. Who sums n?",
        )
        yield weighed(ones * c / N), "It is c times too large: whose losses are a context rank's?"
        yield weighed(ones / c / N), "It is c times too small: whose losses are a context rank's?"
        return
    off = torch.ones_like(n) / (M * d)
    yield weighed(off / N), "Neither M nor d was made up for. What divides after you?"
    yield weighed(off * d / N), "It is M times too small. What does the schedule do to two values?"
    yield weighed(off * M / N), "It is d times too small. What do the buffers do with the copies?"
    yield weighed(off * M * d), "It was never divided by N. With the option off, who would do it?"
    yield weighed(off), "That is a sum as for three values. With the option off, who divides it?"
    yield weighed(off * M * d * c / N), "It is c times too large. What of c is there already?"
    yield weighed(off * M * d / c / N), "It is c times too small. What of c is there already?"
    of_rank = "Each rank divided by its own tokens. What do the same tokens weigh on another rank?"
    yield weighed(off * M * d / mine), of_rank
    yield weighed(off * M / mine), of_rank
    means = (
        "Each microbatch was divided by its own tokens. Do tokens of two of them weigh the same?"
    )
    yield weighed(off * M * d / own), means
    yield weighed(off * M / own), means
    yield weighed(off / own), means
    yield (
        weighed(off * M * d / own.sum()),
        "Microbatches without tokens were counted as one token each.",
    )
