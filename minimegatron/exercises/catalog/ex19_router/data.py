"""Numbers for the router's check, in which no two experts are nearly as good.

Megatron has no counterpart.
"""

from types import SimpleNamespace

import torch

from minimegatron.exercises.check import Case

HIDDEN = 3
LEAST_GAP = 0.01
"""Between two experts' scores for one token: finite differences must not change a choice."""


def given_logits(case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [T, E] and a bias [E], which changes what some tokens choose; None where there is none."""
    for attempt in range(10_000):
        draw = torch.Generator().manual_seed(1000 * case.seed + attempt)
        logits = 1.5 * torch.randn(case.tokens, case.experts, generator=draw, dtype=torch.float64)
        bias = given_bias(case, draw)
        if is_clear(logits, bias, case.topk):
            return _set_apart(logits) if case.is_far else logits, bias
    raise ValueError(f"no clear logits for {case}")


def _set_apart(logits: torch.Tensor) -> torch.Tensor:
    """The same order; but the first token's best is so far before all others that they weigh 0."""
    apart, best = logits.clone(), int(logits[0].argmax())
    apart[0] -= 1000.0
    apart[0, best] = logits[0, best]
    return apart


def given_bias(case: Case, draw: torch.Generator) -> torch.Tensor | None:
    """Of the size of a sigmoid."""
    bias = torch.rand(case.experts, generator=draw, dtype=torch.float64) - 0.5
    return bias if case.has_bias else None


def is_clear(logits: torch.Tensor, bias: torch.Tensor | None, topk: int) -> bool:
    """Whether no near-tie decides; and whether the bias changes some choice, but not all."""
    scores = torch.sigmoid(logits)
    biased = scores if bias is None else scores + bias
    if not (_has_gaps(scores) and _has_gaps(biased)):
        return False
    plain, other = (x.topk(topk, dim=1).indices.sort(dim=1).values for x in (scores, biased))
    changed = (plain != other).any(dim=1)
    return bias is None or bool(changed.any() and not changed.all())


def _has_gaps(scores: torch.Tensor) -> bool:
    return bool(scores.sort(dim=1).values.diff(dim=1).min() > LEAST_GAP)


def given_layer(case: Case) -> SimpleNamespace:
    """A layer's weight [E, h] and experts [E, h, h], microbatches [T, h], and the loss's target."""
    for attempt in range(10_000):
        draw = torch.Generator().manual_seed(1000 * case.seed + attempt)

        def rand(*shape: int, draw: torch.Generator = draw) -> torch.Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64)

        weight, experts = rand(case.experts, HIDDEN), rand(case.experts, HIDDEN, HIDDEN)
        microbatches = list(rand(case.M, case.tokens, HIDDEN))
        bias, target = given_bias(case, draw), rand(case.tokens, HIDDEN)
        logits = [x @ weight.t() for x in microbatches]
        # And once nobody chooses the last expert: who counts may not count on it.
        last = [x.topk(case.topk, dim=1).indices.max() for x in logits]
        if all(is_clear(x, bias, case.topk) for x in logits) and min(last) < case.experts - 1:
            return SimpleNamespace(
                weight=weight, experts=experts, microbatches=microbatches, bias=bias, target=target
            )
    raise ValueError(f"no clear numbers for {case}")


def mix(probs: torch.Tensor, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The layer's output [T, h]: its experts' outputs, weighed. An expert is tanh(x A)."""
    outputs = torch.tanh(torch.einsum("th,ehg->teg", x, experts))
    return torch.einsum("te,teg->tg", probs, outputs)


def main_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss beside which the auxiliary loss stands."""
    return (output * target).mean()
