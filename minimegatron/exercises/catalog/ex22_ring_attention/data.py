"""Sequences, and which of their tokens a rank has. Megatron has no counterpart."""

import torch

from minimegatron.exercises.check import Case

WORLD = 4


class Tokens:
    """One ring's whole sequence: query, key, value and the output's gradient, each [a, s, d]."""

    def __init__(self, case: Case, rank: int):
        self.size = case.cp
        self.ring, self.place = rank // case.cp, rank % case.cp
        draw = torch.Generator().manual_seed(100 * case.seed + self.ring)
        self.length = 2 * case.cp * case.chunk
        shape = (case.heads, self.length, case.width)
        self.query, self.key, self.value, self.grad = torch.randn(
            4, *shape, generator=draw, dtype=torch.float64
        )
        self.query = self.query * case.size_of_scores
        self.scale, self.usual_scale = case.scale, case.width**-0.5

    @property
    def own(self) -> torch.Tensor:
        """Positions of this rank's tokens."""
        return positions(self.place, self.size, self.length)


def positions(place: int, size: int, length: int) -> torch.Tensor:
    """Which tokens a rank has: two chunks of 2 x size, from the front and from the back."""
    chunks = torch.arange(length).view(2 * size, -1)
    return torch.cat([chunks[place], chunks[2 * size - 1 - place]])
