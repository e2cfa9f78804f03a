"""Attention in one process, with all pairs there; and what usual mistakes give in its place.

Megatron has no counterpart.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minimegatron.exercises.catalog.ex22_ring_attention.data import Tokens, positions


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    visible: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse) of queries [a, q, d]; `visible` [q, k] has the pairs. Output 0 where none is."""
    scores = torch.einsum("aqd,akd->aqk", query, key) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    largest = scores.max(dim=2, keepdim=True).values.clamp(min=-1e9)
    powers = (scores - largest).exp()
    sums = powers.sum(dim=2, keepdim=True)
    return powers / sums.clamp(min=1e-300) @ value, (largest + sums.log()).squeeze(2)


class Terms(NamedTuple):
    """What a block of pairs adds to gradients: of one rank's query, of another's key and value."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class Way:
    """How a block's gradients are made; the defaults are right."""

    has_own_lse: bool = False
    """Each block's probabilities sum to 1."""
    delta: str = "whole"
    """D of the whole output; "own" for that of each block, "all" for one sum of all, "none" for 0."""
    is_scaled: bool = True
    has_scaled_scores: bool = True
    has_usual_scale: bool = False
    """d^-0.5, which is not the one that was given."""
    is_masked: bool = True
    has_own_keys: bool = False
    """The keys that came are not looked at."""


USUAL_SCALE = (
    "The scale is the root of 1/d, whatever was given. Not every model takes that one: from where does "
    "your function know which?"
)
WRONG_WAYS = {
    Way(
        has_own_lse=True
    ): "The probabilities were made with an lse of each block alone, so they sum to "
    "1 in every block. Over all keys that a query sees they sum to 1 once: lse is that of all of them.",
    Way(
        delta="own"
    ): "D was made of each block's own output. It belongs to the softmax over all keys: "
    "take dO and the whole output, once, before the first round.",
    Way(
        delta="all"
    ): "D was summed over all queries. Each query has a D of its own: sum over d only.",
    Way(
        delta="none"
    ): "D is missing. A softmax does not change if all scores of a query grow alike, so "
    "it must give no gradient for that.",
    Way(
        is_scaled=False
    ): "The scale is missing: scores were multiplied by it, so their gradients are, too.",
    Way(
        has_scaled_scores=False
    ): "The scale is not in the scores that P was made of; lse was made of scaled ones.",
    Way(has_usual_scale=True): USUAL_SCALE,
    Way(
        is_masked=False
    ): "In the block of its own keys, queries were given keys that come later than they do.",
    Way(
        has_own_keys=True
    ): "In every round it was made of this rank's own keys and values. Those that "
    "wait gives must take their place.",
}


class RightRing:
    """All ranks of one ring, worked out at once from the whole sequence."""

    def __init__(self, given: Tokens):
        self.given, self.size = given, given.size
        self.places = [positions(r, given.size, given.length) for r in range(given.size)]
        order = torch.arange(given.length)
        self.visible = order.unsqueeze(1) >= order
        self.output, self.lse = self.attention(self.visible)

    def attention(
        self, visible: torch.Tensor, scale: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the whole sequence, with other pairs or another scale."""
        one = self.given
        return plain_attention(
            one.query, one.key, one.value, one.scale if scale is None else scale, visible
        )

    def gradients(self) -> Terms:
        """Of the whole sequence, by autograd."""
        one = self.given
        leaves = [x.clone().requires_grad_() for x in (one.query, one.key, one.value)]
        output, _ = plain_attention(*leaves, one.scale, self.visible)
        return Terms(*torch.autograd.grad(output, leaves, one.grad))

    def seen(self, r: int, j: int) -> torch.Tensor:
        """[n, n]: which keys of rank j the queries of rank r see."""
        return self.visible[self.places[r]][:, self.places[j]]

    def partial(self, r: int, j: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, lse) of rank r's queries and rank j's keys alone."""
        one, rows, columns = self.given, self.places[r], self.places[j]
        return plain_attention(
            one.query[:, rows],
            one.key[:, columns],
            one.value[:, columns],
            one.scale,
            self.seen(r, j),
        )

    # -- What mistakes give --

    def wrong_outputs(self, r: int) -> Iterator[tuple[torch.Tensor, str]]:
        """Outputs of rank r."""
        rows, c = self.places[r], self.size
        everything = torch.ones_like(self.visible)
        own = self._without([j for j in range(c) if j != r])
        pairs = [
            (
                self.visible | self._pairs(r, r),
                "In the block of its own keys, queries have seen keys that come later than they do.",
            ),
            (own, "It has seen this rank's own keys only. Nothing of what came is in it."),
            (everything, "Every query has seen every key, also those that come later."),
            (self._without([r]), "This rank's own keys are not in it. They are here in round 0."),
            (
                self._without([(r + 1) % c]),
                f"The keys of rank {(r + 1) % c} of the ring are not in it: they come last, for round "
                f"{c - 1}.",
            ),
        ]
        for visible, words in pairs:
            yield self.attention(visible)[0][:, rows], words
        yield self.attention(self.visible, 1.0)[0][:, rows], "The scale is not in the scores."
        squared = self.attention(self.visible, self.given.scale**2)[0][:, rows]
        yield squared, "The scale is in the scores twice: attend multiplies by it."
        usual = self.attention(self.visible, self.given.usual_scale)[0][:, rows]
        yield usual, USUAL_SCALE
        yield (
            self._with_own_keys(r),
            "In every round it has looked at this rank's own keys and values. Those that wait gives "
            "must take their place.",
        )
        parts = [self.partial(r, j) for j in range(c)]
        total = sum(part for part, _ in parts)
        words = (
            "Each of them is divided by the sum over its own keys. A block whose scores are small must "
            "count little: merge weighs them by their lse."
        )
        yield total, f"The outputs of the blocks were added up. {words}"
        yield total / c, f"It is the mean of the blocks' outputs. {words}"
        for j, (part, _) in enumerate(parts):
            yield (
                part,
                f"It is the result of one block alone, with the keys of rank {j} of the ring.",
            )

    def _pairs(self, r: int, j: int) -> torch.Tensor:
        """[s, s], True for queries of rank r and keys of rank j."""
        found = torch.zeros_like(self.visible)
        found[self.places[r].unsqueeze(1), self.places[j]] = True
        return found

    def _with_own_keys(self, r: int) -> torch.Tensor:
        """The output of rank r if its own keys were those of all ranks."""
        query, key, value = self._of(r)
        visible = torch.cat([self.seen(r, j) for j in range(self.size)], dim=1)
        keys, values = (torch.cat([x] * self.size, dim=1) for x in (key, value))
        return plain_attention(query, keys, values, self.given.scale, visible)[0]

    def _without(self, sources: list[int]) -> torch.Tensor:
        found = self.visible.clone()
        for j in sources:
            found[:, self.places[j]] = False
        return found

    def total(self, way: "Way | None" = None) -> list[Terms]:
        """For each rank the gradients as the stub's formulas give them, or with a mistake."""
        found = [Terms(*(torch.zeros_like(x) for x in self._of(r))) for r in range(self.size)]
        for r in range(self.size):
            for j in range(self.size):
                terms = self._terms(r, j, way or Way())
                found[r].query.add_(terms.query)
                found[j].key.add_(terms.key)
                found[j].value.add_(terms.value)
        return found

    def _of(self, r: int) -> tuple[torch.Tensor, ...]:
        one, rows = self.given, self.places[r]
        return one.query[:, rows], one.key[:, rows], one.value[:, rows]

    def _terms(self, r: int, j: int, way: "Way") -> Terms:
        query, (_, key, value) = self._of(r)[0], self._of(r if way.has_own_keys else j)
        grad = self.given.grad[:, self.places[r]]
        scale = self.given.usual_scale if way.has_usual_scale else self.given.scale
        part, part_lse = self.partial(r, j)
        lse = part_lse if way.has_own_lse else self.lse[:, self.places[r]]
        products = grad * (part if way.delta == "own" else self.output[:, self.places[r]])
        D = products.sum() if way.delta == "all" else products.sum(dim=2, keepdim=True)
        D = D * (way.delta != "none")
        scores = query @ key.mT * (scale if way.has_scaled_scores else 1.0)
        is_seen = self.seen(r, j)
        if r == j and not way.is_masked:
            is_seen = torch.ones_like(is_seen)
        probs = torch.where(is_seen, (scores - lse.unsqueeze(2)).exp(), 0.0)
        of_scores = probs * (grad @ value.mT - D) * (scale if way.is_scaled else 1.0)
        return Terms(of_scores @ key, of_scores.mT @ query, probs.mT @ grad)

    def wrong_gradients(self, r: int, which: str) -> Iterator[tuple[torch.Tensor, str]]:
        """Gradients of rank r's "query", "key" or "value"."""
        for terms, words in self._wrong_formulas():
            yield getattr(terms[r], which), words
        if which == "query":
            words = "Only this rank's own keys are in it, and not those that came."
            yield self._sum(which, [(r, r)]), words
        else:
            yield from self._not_at_home(r, which)
            words = (
                "Only this rank's own queries are in it. Other ranks' queries have seen these keys, "
                "too: what they add travels with the keys."
            )
            yield self._sum(which, [(r, r)]), words
            words = (
                "It is what this rank's queries add to the keys of all ranks, put onto its own keys. "
                "A gradient belongs to the keys that were there in that round, and travels with them."
            )
            yield self._sum(which, [(r, j) for j in range(self.size)]), words

    def _wrong_formulas(self) -> Iterator[tuple[list[Terms], str]]:
        for way, words in WRONG_WAYS.items():
            yield self.total(way), words

    def _not_at_home(self, r: int, which: str) -> Iterator[tuple[torch.Tensor, str]]:
        """Complete gradients, on another rank than their keys."""
        right, c = self.total(), self.size
        for far in range(1, c):
            home = (r + far) % c
            words = (
                f"It is complete, but it belongs to rank {home} of the ring, and this is rank {r}. "
                f"Keys and values travel {c - 1} hops. Their gradients travel with them, and from the "
                f"last round's rank they are still one hop from home: {c} in all."
            )
            yield getattr(right[home], which), words

    def _sum(self, which: str, pairs: list[tuple[int, int]]) -> torch.Tensor:
        """What blocks of (rank of queries, rank of keys) give, added up."""
        return sum(getattr(self._terms(*pair, Way()), which) for pair in pairs)
