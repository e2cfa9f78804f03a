"""Where a rank stands, which parameters it holds, and what backward has left in their gradients.

Megatron has no counterpart.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from minimegatron.core.rank_generator import all_groups, make_grids
from minimegatron.exercises.check import Case

WORLD = 4
NUM_EXPERTS = 4


class Described(NamedTuple):
    """One parameter of the whole model."""

    shape: tuple[int, ...]
    is_expert: bool
    is_cut: bool
    """Over its tensor group, along the first axis."""


class Places:
    """All ranks of a case."""

    def __init__(self, case: Case):
        self.case = case
        sizes = {name: case.values[name] for name in ("tp", "pp", "cp", "ep", "etp")}
        dense, expert = make_grids(WORLD, **sizes)
        self.groups = all_groups(WORLD, **sizes)
        self.dense = [dense.coordinates(rank) for rank in range(WORLD)]
        self.expert = [expert.coordinates(rank) for rank in range(WORLD)]
        self.num_losses = dense.dp * dense.cp
        self.num_copies = expert.dp
        # Experts that are cut as dense layers are have the same mark, and so cut parameters only.
        self.has_biases = case.ep > 1 or case.etp != case.tp or case.tp == 1

    def group(self, kind: str, rank: int) -> list[int]:
        """The rank's group of a kind, as global ranks."""
        return next(group for group in self.groups[kind] if rank in group)

    def held(self, rank: int) -> dict[str, Described]:
        """What the rank holds, whole shapes, in the model's order; experts by their global number."""
        case, stage = self.case, self.dense[rank]["pp"]
        described = {
            f"layer{stage}.norm": Described((3,), False, False),
            f"layer{stage}.attention": Described((4, 2), False, True),
        }
        if stage == case.pp - 1:
            per_rank = NUM_EXPERTS // case.ep
            first = self.expert[rank]["ep"] * per_rank
            described["router"] = Described((NUM_EXPERTS, 2), False, False)
            for number in range(first, first + per_rank):
                described[f"expert{number}.fc1"] = Described((4, 3), True, case.etp > 1)
                # Not cut, also where experts are: the ranks of expt_tp each hold all of it.
                if self.has_biases:
                    described[f"expert{number}.bias"] = Described((2,), True, False)
        return described

    def piece(self, rank: int, one: Described, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the whole model."""
        if not one.is_cut:
            return whole.clone()
        place = self.expert[rank]["tp"] if one.is_expert else self.dense[rank]["tp"]
        return whole.chunk(self.case.etp if one.is_expert else self.case.tp)[place].clone()

    def stage(self, rank: int) -> list[int]:
        """The ranks of this rank's stage: each has tokens of its own."""
        return [r for r in range(WORLD) if self.dense[r]["pp"] == self.dense[rank]["pp"]]

    # -- Gradients --

    def of_tokens(self, name: str, shape: tuple[int, ...], rank: int) -> torch.Tensor:
        """What the tokens of `rank` contribute to the gradient of a whole parameter."""
        number = sum(31**i * ord(letter) for i, letter in enumerate(name)) % 1_000_003
        draw = torch.Generator().manual_seed(1_000_003 * (10 * self.case.seed + rank) + number)
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def left_by_backward(self, rank: int) -> dict[str, torch.Tensor]:
        """The gradients on a rank when the last backward is over."""
        return {
            name: self.piece(rank, one, self._sum(name, one, self.seen_by(rank, one)))
            for name, one in self.held(rank).items()
        }

    def seen_by(self, rank: int, one: Described) -> list[int]:
        """The ranks whose tokens have come to this parameter on `rank`."""
        if one.is_expert:
            return self.group("tp_ep", rank)
        return self.group("tp", rank) if one.is_cut else [rank]

    def one_process(self, rank: int) -> dict[str, torch.Tensor]:
        """The gradients of the mean of all losses, a rank's pieces of them."""
        return {
            name: self.piece(rank, one, self._sum(name, one, self.stage(rank)) / self.num_losses)
            for name, one in self.held(rank).items()
        }

    def _sum(self, name: str, one: Described, ranks: list[int]) -> torch.Tensor:
        return sum(self.of_tokens(name, one.shape, rank) for rank in ranks)

    def summed(
        self, kind: str, rank: int, index: int, left: Callable[[int], list[torch.Tensor]]
    ) -> torch.Tensor | None:
        """What an all-reduce over a group makes of the rank's `index`-th gradient; None if none could.

        `left(rank)` are a rank's gradients. Ranks add what stands at the same place, whatever it is.
        """
        found = [left(other)[index] for other in self.group(kind, rank)]
        return sum(found) if len({one.shape for one in found}) == 1 else None
