"""The last part: one norm of dense and expert gradients, and what usual mistakes count.

Megatron has no counterpart.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minimegatron.exercises.bench.feedback_numbers import told_apart
from minimegatron.exercises.catalog.ex21_expert_gradients.places import WORLD, Described, Places
from minimegatron.exercises.check import Result, Wrong

EXACT, ROUNDED = 1e-6, 1e-2
"""A norm as near as the first is right, in fp32 too; one as near as the second has all its terms."""


def judge_norms(places: Places, answers: Sequence[dict[str, Any]]) -> Result:
    """Every rank's norm must be that of one process."""
    squares = _Squares(places)
    for rank, answer in enumerate(answers):
        norm = answer["norm"]
        if not isinstance(norm, int | float):
            none = " (was `return` forgotten?)" if norm is None else ""
            raise Wrong(
                f"rank {rank}: the norm is a {type(norm).__name__}{none}; a Python number is expected"
            )
        if not answer["unchanged"]:
            raise Wrong(f"rank {rank}: get_grad_norm changed gradients; it may only read them")
    expected = math.sqrt(squares.dense + squares.experts)
    for rank, answer in enumerate(answers):
        if not math.isclose(answer["norm"], expected, rel_tol=EXACT):
            norms = [float(one["norm"]) for one in answers]
            raise Wrong(squares.words(rank, norms, expected))
    parts = f"{squares.dense:.4g} dense, {squares.experts:.4g} of experts"
    return Result({"norm": f"{expected:.6f}", "squared": parts})


class _Squares:
    """The squares of the whole model's gradients, and what each rank holds of them."""

    def __init__(self, places: Places):
        self.places = places
        self.held = [
            [
                (one, float(grad.square().sum()))
                for one, grad in zip(
                    places.held(rank).values(), places.one_process(rank).values(), strict=True
                )
            ]
            for rank in range(WORLD)
        ]
        self.dense = self.over("mp", 0, self._counts_dense)
        self.experts = self.over("tp_ep_pp", 0, self._counts_experts)

    def over(self, kind: str, rank: int, counts: Callable[[int, Described], bool]) -> float:
        """The sum over a group of what each of its ranks counts."""
        return sum(self.of(other, counts) for other in self.places.group(kind, rank))

    def of(self, rank: int, counts: Callable[[int, Described], bool]) -> float:
        """What one rank counts."""
        return sum(square for one, square in self.held[rank] if counts(rank, one))

    def _counts_dense(self, rank: int, one: Described) -> bool:
        is_first = self.places.dense[rank]["tp"] == 0
        return not one.is_expert and (one.is_cut or is_first)

    def _counts_experts(self, rank: int, one: Described) -> bool:
        is_first = self.places.expert[rank]["tp"] == 0
        return one.is_expert and (one.is_cut or is_first)

    # -- Words --

    def words(self, rank: int, norms: Sequence[float], expected: float) -> str:
        """What to say of a norm that is not the expected one."""
        shown, wanted = told_apart(norms[rank], expected)
        square = norms[rank] * norms[rank]
        return (
            f"rank {rank}: the norm is {shown}, but one process finds {wanted}\n"
            f"squared: {square:.6g}, expected {self.dense:.6g} of dense parameters + "
            f"{self.experts:.6g} of experts\n{self._why(rank, norms)}"
        )

    def _why(self, rank: int, norms: Sequence[float]) -> str:
        right = self.dense + self.experts
        if math.isclose(norms[rank] ** 2, right, rel_tol=ROUNDED):
            return (
                "Everything is counted once, and the sum is not exact: it has the digits of a shorter "
                "dtype. Gradients of many ranks are added up here. In which dtype are your squares?"
            )
        for value, words in self._known(rank):
            is_right = math.isclose(value, right, rel_tol=1e-7)
            if not is_right and math.isclose(norms[rank] ** 2, value, rel_tol=1e-7):
                return words
        if any(not math.isclose(norm, norms[0], rel_tol=EXACT) for norm in norms):
            return (
                f"The ranks have different norms: {', '.join(f'{norm:.6g}' for norm in norms)}. Each "
                "would clip by a factor of its own."
            )
        what = "too often" if norms[rank] ** 2 > right else "not at all"
        return f"Something is counted {what}. Take the two parts apart: which of them is right?"

    def _known(self, rank: int) -> Iterator[tuple[float, str]]:
        """The squares that mistakes make, and their words."""
        first_dense = [place["tp"] == 0 for place in self.places.dense]

        def by_dense_rank(r: int, one: Described) -> bool:
            return one.is_expert and (one.is_cut or first_dense[r])

        def on_one_rank(r: int, one: Described) -> bool:
            return one.is_expert and first_dense[r]

        def all_dense(_: int, one: Described) -> bool:
            return not one.is_expert

        def all_experts(_: int, one: Described) -> bool:
            return one.is_expert

        experts, dense = self.experts, self.dense
        whole = self.over("tp_ep_pp", rank, all_experts)
        yield (
            dense + whole,
            f"The experts' part is {whole:.6g}: what the ranks that share an expert hold whole was "
            "counted by each of them. Which column of groups says who shares an expert?",
        )
        filtered = self.over("tp_ep_pp", rank, by_dense_rank)
        yield (
            dense + filtered,
            f"The experts' part is {filtered:.6g}. An expert's parameter that is not cut was left out "
            "on ranks that are not the first of groups.tp. But those ranks hold experts that nobody "
            "else counts: who shares an expert?",
        )
        lone = self.over("tp_ep_pp", rank, on_one_rank)
        yield (
            dense + lone,
            f"The experts' part is {lone:.6g}: only the first rank of groups.tp counted its experts.",
        )
        own = self.over("mp", rank, self._counts_experts)
        yield (
            dense + own,
            f"The experts' part is {own:.6g}: those of this rank's groups.mp alone. The others' "
            "experts belong to the same model.",
        )
        yield (
            dense + self.of(rank, all_experts),
            "The experts of this rank alone are in it.",
        )
        yield (
            dense + self.over("mp", rank, by_dense_rank),
            "Experts were counted as if they were dense, over groups.mp and by the rank in groups.tp.",
        )
        yield dense, "It is the norm of dense parameters: no expert is counted."
        yield experts, "It is the norm of the experts: nothing else is counted."
        yield from self._known_of_dense(rank, all_dense)
        yield (
            (math.sqrt(dense) + math.sqrt(experts)) ** 2,
            "It is the sum of two norms. Norms do not add up, their squares do.",
        )
        yield (dense + experts) ** 2, "It is the square of the norm: the root is missing."
        yield (
            self.over("mp", rank, all_dense) + self.over("tp_ep_pp", rank, all_experts),
            "What the ranks of a tensor group hold whole is counted by each of them.",
        )

    def _known_of_dense(
        self, rank: int, all_dense: Callable[[int, Described], bool]
    ) -> Iterator[tuple[float, str]]:
        often = self.over("tp_ep_pp", rank, self._counts_dense)
        yield (
            often + self.experts,
            f"The dense part is {often:.6g}: it was summed over groups.tp_ep_pp, whose ranks hold the "
            "same dense parameters.",
        )
        whole = self.over("mp", rank, all_dense)
        yield (
            whole + self.experts,
            f"The dense part is {whole:.6g}: what tensor-parallel ranks hold whole was counted by each "
            "of them.",
        )
        world = sum(self.of(r, self._counts_dense) for r in range(WORLD))
        of_experts = sum(self.of(r, self._counts_experts) for r in range(WORLD))
        yield (
            world + of_experts,
            "It was summed over all ranks: copies of the model, and of an expert, were counted each.",
        )
