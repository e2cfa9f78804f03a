"""What is right, worked out apart from any solution: token by token, gradients by finite differences.

Megatron has no counterpart.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from minimegatron.exercises.catalog.ex19_router.data import main_loss, mix
from minimegatron.exercises.check import Case

STEP = 1e-6


def numeric_gradient(function: Callable[[torch.Tensor], float], at: torch.Tensor) -> torch.Tensor:
    """Central differences, element by element."""
    gradient = torch.zeros_like(at)
    for i in range(at.numel()):
        ends = []
        for step in (STEP, -STEP):
            moved = at.clone()
            moved.view(-1)[i] += step
            ends.append(float(function(moved)))
        gradient.view(-1)[i] = (ends[0] - ends[1]) / (2 * STEP)
    return gradient


# -- Choosing and weighing --


def right_route(
    case: Case, logits: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(probs, routing_map)."""
    probs, routing_map = torch.zeros_like(logits), torch.zeros_like(logits, dtype=torch.bool)
    for token, row in enumerate(logits):
        chosen = best(_preference(case, row, bias), case.topk)
        routing_map[token, chosen] = True
        probs[token, chosen] = _weights(case, row, chosen)
    return probs, routing_map


def _preference(case: Case, row: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if case.score != "sigmoid" or bias is None:
        return row
    return torch.sigmoid(row) + bias


def best(preference: torch.Tensor, topk: int) -> list[int]:
    """The numbers of the largest."""
    order = sorted(range(len(preference)), key=lambda expert: -float(preference[expert]))
    return sorted(order[:topk])


def _weights(case: Case, row: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    if case.score == "sigmoid":
        weights = torch.sigmoid(row)[chosen]
        weights = weights / weights.sum() if case.topk > 1 else weights
    else:
        powers = row.exp()
        weights = powers[chosen] / (powers.sum() if case.pre else powers[chosen].sum())
    return weights * (case.scaling or 1.0)


# -- The auxiliary loss --


def scores_for_loss(case: Case, logits: torch.Tensor) -> torch.Tensor:
    """Scores over all experts, that sum to 1."""
    powers = torch.sigmoid(logits) if case.score == "sigmoid" else logits.exp()
    return powers / powers.sum(dim=1, keepdim=True)


def counts_for_loss(case: Case, logits: torch.Tensor) -> torch.Tensor:
    """f_i: by plain top-k of the logits."""
    counts = torch.zeros(logits.shape[1], dtype=torch.float64)
    for row in logits:
        counts[best(row, case.topk)] += 1
    return counts


def right_loss(
    case: Case, scores: torch.Tensor, counts: torch.Tensor, coeff: float
) -> torch.Tensor:
    """The formula, expert by expert."""
    num_tokens, num_experts = scores.shape
    total = sum(counts[i] * scores[:, i].sum() for i in range(num_experts))
    return coeff * num_experts / (case.topk * num_tokens**2) * total


# -- A step of a layer --


class RightStep:
    """The gradients of a step's parts with respect to the router's weight, of scale 1 and M 1."""

    def __init__(self, case: Case, given: SimpleNamespace):
        self.case, self.given = case, given
        self.main = self._gradient(self._main)
        self.aux = self._gradient(self._aux)

    def _gradient(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Of the sum over all microbatches."""

        def total(weight: torch.Tensor) -> float:
            return float(sum(loss(x, x @ weight.t()) for x in self.given.microbatches))

        return numeric_gradient(total, self.given.weight)

    def _main(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        probs, _ = right_route(self.case, logits, self.given.bias)
        return main_loss(mix(probs, x, self.given.experts), self.given.target)

    def _aux(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        counts = counts_for_loss(self.case, logits)
        return right_loss(self.case, scores_for_loss(self.case, logits), counts, self.case.coeff)

    # -- What mistakes give in place of `aux` --

    def soft_counts(self, is_detached: bool) -> torch.Tensor:
        """f_i is the sum of scores, with a gradient of its own or without."""

        def loss(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            scores = scores_for_loss(self.case, logits)
            source = x @ self.given.weight.t() if is_detached else logits
            counts = self.case.topk * scores_for_loss(self.case, source).sum(dim=0)
            return right_loss(self.case, scores, counts, self.case.coeff)

        return self._gradient(loss)

    def sums_of_weights(self) -> torch.Tensor:
        """f_i is the sum of the chosen experts' weights; P are the scores."""

        def loss(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            probs, _ = right_route(self.case, logits, self.given.bias)
            scores = scores_for_loss(self.case, logits)
            return right_loss(self.case, scores, probs.sum(dim=0), self.case.coeff)

        return self._gradient(loss)

    def scores_of_chosen(self) -> torch.Tensor:
        """P are the layer's weights, 0 for an expert that was not chosen."""

        def loss(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            probs, _ = right_route(self.case, logits, self.given.bias)
            return right_loss(self.case, probs, counts_for_loss(self.case, logits), self.case.coeff)

        return self._gradient(loss)

    def counts_with_bias(self) -> torch.Tensor:
        """f_i are counted where the tokens went, bias and all."""

        def loss(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            _, routing_map = right_route(self.case, logits, self.given.bias)
            scores = scores_for_loss(self.case, logits)
            return right_loss(self.case, scores, routing_map.sum(dim=0), self.case.coeff)

        return self._gradient(loss)

    def counts_of(self, topk: int) -> torch.Tensor:
        """As if each token chose another number of experts."""
        case = Case(str(self.case), **(self.case.values | {"topk": topk}))

        def loss(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            counts = counts_for_loss(case, logits)
            return right_loss(case, scores_for_loss(case, logits), counts, case.coeff)

        return self._gradient(loss)
