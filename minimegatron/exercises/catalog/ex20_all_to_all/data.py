"""What each rank is given: rows to exchange, tokens and their choices, experts.

Megatron has no counterpart.
"""

import torch

from minimegatron.exercises.check import Case

WORLD = 4
HIDDEN = 64
"""Large beside counts and choices, which every rank may tell every other."""


def draw(case: Case, which: int, *shape: int) -> torch.Tensor:
    """Numbers that depend on the case and `which` only."""
    generator = torch.Generator().manual_seed(1000 * case.seed + which)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def members(case: Case, rank: int) -> list[int]:
    """The global ranks of a rank's group."""
    first = rank // case.ep * case.ep
    return list(range(first, first + case.ep))


# -- The exchange alone --


def rows_of(case: Case, rank: int) -> torch.Tensor:
    """What a rank sends: `case.matrix[i][j]` rows from the i-th of its group to the j-th."""
    return _rows(case, 100 + rank, sum(case.matrix[rank % case.ep]))


def grads_of(case: Case, rank: int) -> torch.Tensor:
    """The gradient of what a rank has got."""
    return _rows(case, 200 + rank, sum(row[rank % case.ep] for row in case.matrix))


def _rows(case: Case, which: int, num: int) -> torch.Tensor:
    """[num, *case.row]."""
    return draw(case, which, num, *case.row).to(getattr(torch, case.dtype))


# -- A layer --


class Tokens:
    """One rank's tokens [T, h], their choices [T, E] and weights, and the gradient of the output."""

    def __init__(self, case: Case, rank: int):
        self.chosen = case.chosen[rank]
        num_tokens, num_experts = len(self.chosen), case.ep * case.local
        self.hidden = draw(case, 300 + rank, num_tokens, HIDDEN)
        self.map = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
        for token, experts in enumerate(self.chosen):
            self.map[token, experts] = True
        weights = draw(case, 400 + rank, num_tokens, num_experts).abs() + 0.1
        self.probs = weights * self.map
        # A softmax may give 0 to one that was chosen all the same.
        several = [token for token, experts in enumerate(self.chosen) if len(experts) > 1]
        for token in several[:1]:
            self.probs[token, self.chosen[token][-1]] = 0.0
        self.grad = draw(case, 500 + rank, num_tokens, HIDDEN)


def expert_weight(case: Case, rank: int, expert: int) -> torch.Tensor:
    """[h, h], of an expert by its number in the layer; other groups have others."""
    return draw(case, 600 + 50 * (rank // case.ep) + expert, HIDDEN, HIDDEN) / HIDDEN**0.5


def run_expert(tokens: torch.Tensor, weight: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """[n, h] -> [n, h]; n may be 0."""
    return torch.tanh(tokens @ weight) * probs.unsqueeze(1)
