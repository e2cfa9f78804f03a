"""Why a gradient norm is wrong: the difference of the squares, held against what known mistakes make.

Squares add up over parameters and ranks, so whatever was counted too often, or not at all, is a
term of the difference.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from minimegatron.exercises.bench.feedback_numbers import told_apart
from minimegatron.exercises.bench.gpt_step_judge import Reference

EMBEDDING = "embedding.word_embeddings.weight"
ROUNDING = 1e-5
"""Relative; a float32 sum is off by less."""


def differ(norms: Sequence[float]) -> bool:
    """Whether some ranks have another norm than the first one has."""
    return any(not math.isclose(norm, norms[0], rel_tol=1e-9) for norm in norms)


def rounding_words(norm: float, expected: float) -> str:
    """What to say of a norm that is off by no more than float32 is; "" for another one."""
    if not math.isclose(norm, expected, rel_tol=ROUNDING):
        return ""
    return (
        f"The two are equal up to rounding: {norm:.12g} and {expected:.12g}. Is your total float32, or "
        "what you add to it?"
    )


class Squares:
    """The squares of a step's gradients, by what ranks hold of them."""

    def __init__(self, reference: Reference, gradients: Mapping[str, torch.Tensor]):
        self.reference, self.case = reference, reference.case
        self.of_name = {name: _square(grad) for name, grad in gradients.items()}
        self.is_cut = {
            name: bool(param.tensor_model_parallel) for name, param in reference.step.parameters()
        }
        self.of_pieces = [
            {name: _square(grad) for name, grad in reference.pieces(rank, gradients).items()}
            for rank in range(len(reference.places))
        ]

    def words(self, rank: int, norms: Sequence[float], expected: float) -> str:
        """What to say of a rank's norm that is not the expected one; `norms` are all ranks'."""
        norm = norms[rank]
        found, wanted = norm * norm, expected * expected
        shown, one_process = told_apart(norm, expected)
        square, right = told_apart(found, wanted)
        return (
            f"rank {self.reference.who(rank)}: the norm is {shown}, but one process finds "
            f"{one_process}\nsquared: {square}, expected {right}, difference "
            f"{found - wanted:+.6g}\n{self._why(rank, norms, expected)}"
        )

    def _why(self, rank: int, norms: Sequence[float], expected: float) -> str:
        found, wanted = norms[rank] * norms[rank], expected * expected
        if not any(norms):
            return "Nothing is counted on any rank. Which gradients does this rank hold?"
        if not math.isfinite(found):
            return "It is not a finite number: 0 / 0, or memory that was never written."
        is_sharded, dp = self.case.distributed_optimizer, self.reference.dp
        own = sum(self.of_pieces[rank].values())
        # Where all have one number, it came from an exchange, whatever was counted in it.
        if not is_sharded and differ(norms) and math.isclose(found, own, rel_tol=1e-6):
            return (
                "That is the norm of this rank's own gradients. Every rank would clip by a factor of "
                "its own, and their weights would drift apart. Which argument says whom else to ask?"
            )
        if words := self._known(found - wanted):
            return words
        if words := rounding_words(norms[rank], expected):
            return words
        if not is_sharded and dp > 1:
            over_replicas = (
                f"The sum also ran over the {dp} data-parallel ranks, which hold the same gradients: "
                f"that makes {dp} times the square. Over which ranks were you asked to sum?"
            )
            if math.isclose(found, dp * wanted, rel_tol=1e-6):
                return over_replicas
            if words := self._known(found / dp - wanted):
                return f"{over_replicas}\nAnd in the square divided by {dp}: {words}"
        return self._scaled(found / wanted) or self._else(found > wanted)

    def _scaled(self, ratio: float) -> str:
        for k in range(2, 17):
            if math.isclose(ratio, k, rel_tol=1e-6):
                return (
                    f"The square is {k} times the right one: all gradients were counted too often. "
                    "Was a group summed over twice, or another one than was given?"
                )
            if math.isclose(ratio, 1 / k, rel_tol=1e-6):
                return (
                    f"The square is 1/{k} of the right one. Squares are added, not averaged, and "
                    "gradients are counted as they are, not scaled."
                )
        return ""

    def _else(self, is_too_large: bool) -> str:
        if self.case.distributed_optimizer and not is_too_large:
            return (
                "With ZeRO-1 data-parallel ranks hold shards, and model-parallel ranks parts of the "
                "model. How many groups are in grad_stats_parallel_group, and over how many do you sum?"
            )
        what = "Some are counted too often." if is_too_large else "Some are left out."
        return (
            f"Each gradient of the model must be counted on exactly one rank of the group. {what}"
        )

    def _known(self, difference: float) -> str:
        for known, words in self._differences():
            if known and math.isclose(difference, known, rel_tol=1e-6):
                return words
        return ""

    def _differences(self) -> Iterator[tuple[float, str]]:
        """What a mistake adds to the right square, and its words."""
        case = self.case
        t, is_tied = case.tp, case.tied and case.pp > 1
        tied = self.of_name[EMBEDDING] if is_tied else 0.0
        whole = sum(x for name, x in self.of_name.items() if not self.is_cut[name])
        yield (
            tied,
            f"{tied:.6g} is the square of the tied embedding's gradient: it lies on the first stage "
            "and on the last, and both counted it. One vector has it once: by what can a stage tell "
            "that it has the copy?",
        )
        often = (t - 1) * whole
        yield (
            often,
            f"{often:.6g} is {t - 1} x the squares of what the {t} tensor-parallel ranks hold whole "
            "(layer norms, some biases, position embeddings): each of them counted it. One of them "
            "is to: by what does a rank know whether it is the one?",
        )
        yield (
            often + tied,
            "Both kinds of copies are counted too often: the tied embedding by two stages, and what "
            f"tensor-parallel ranks hold whole by {t} ranks.",
        )
        yield (
            -tied,
            "The tied embedding is not counted at all, on neither stage. Which of the two is no copy?",
        )
        yield (
            -whole,
            "What all tensor-parallel ranks hold whole is not counted at all. Which of them would your "
            "rule have count it?",
        )
        yield from self._differences_of_pieces(is_tied)
        for name, square in self.of_name.items():
            yield square, f"{square:.6g} is the square of the gradient of {name}: counted twice."
            yield (
                -square,
                f"{square:.6g} is the square of the gradient of {name}: not counted at all.",
            )

    def _differences_of_pieces(self, is_tied: bool) -> Iterator[tuple[float, str]]:
        """Mistakes with what tensor-parallel ranks hold pieces of."""
        cut = sum(x for name, x in self.of_name.items() if self.is_cut[name])
        yield (
            -cut,
            "What is marked `tensor_model_parallel` is not counted at all. Do two ranks hold the same "
            "numbers of it?",
        )
        on_rank_0 = 0.0
        for place, pieces in zip(self.reference.places, self.of_pieces, strict=True):
            is_first_copy = is_tied and place["pp"] == 0
            if is_first_copy and place["dp"] == 0 and self.case.tp > 1:
                yield (
                    pieces[EMBEDDING],
                    f"{pieces[EMBEDDING]:.6g} is the square of tensor rank {place['tp']}'s piece of "
                    "the tied embedding's gradient: both stages counted it. On which tensor-parallel "
                    "ranks does your rule leave the copy out?",
                )
            if place["tp"] == 0 and place["dp"] == 0:
                on_rank_0 += sum(
                    x
                    for name, x in pieces.items()
                    if self.is_cut[name] and not (is_tied and place["pp"] and name == EMBEDDING)
                )
        yield (
            on_rank_0 - cut,
            "Only tensor rank 0 counted its pieces of what is marked `tensor_model_parallel`. Does it "
            "hold the numbers of the others, too?",
        )


def _square(grad: torch.Tensor) -> float:
    return grad.square().sum().item()
