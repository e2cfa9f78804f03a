"""What is right, with every sum written out; and what usual mistakes give in its place.

Megatron has no counterpart.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from minimegatron.exercises.catalog.ex23_predict_two_tokens.data import SmallModel, given_batch
from minimegatron.exercises.check import Case

TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Way:
    """How a depth's loss is made; the defaults are right."""

    labels: str = "k"
    """How often labels are rolled at depth k: "k", "1" or "0" times."""
    mask: str = "k"
    """The same of the mask; "ones" for a mask that was not looked at."""
    is_masked: bool = True
    """Whether losses are multiplied by the mask."""
    counts_0: bool = True
    """Whether token 0 counts as a label."""
    factor: str = "f/K"
    """Or "f", "f/(K+1)" or "1"."""
    divisor: str = "n_k"
    """Or "n_0", or "1"."""
    n_0: str = "n_0"
    """What a loss per token is multiplied by: "1" for nothing, "all" for all tokens."""
    state: str = "k"
    """Whose hidden states are taken: depth "k"'s, "0"'s or "k-1"'s."""


def rolled(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """To the front, with 0 at the end."""
    length = tensor.size(-1)
    found = torch.zeros_like(tensor)
    for t in range(length - times):
        found[..., t] = tensor[..., t + times]
    return found


def depth_losses(
    case: Case,
    states: Sequence[torch.Tensor],
    labels: torch.Tensor,
    mask: torch.Tensor,
    token_loss: TokenLoss,
    way: Way = Way(),
) -> list[torch.Tensor]:
    """The loss that each depth attaches, as one number."""
    return [
        _depth_loss(case, k, states, labels, mask, token_loss, way) for k in range(1, case.K + 1)
    ]


def _depth_loss(
    case: Case,
    k: int,
    states: Sequence[torch.Tensor],
    labels: torch.Tensor,
    mask: torch.Tensor,
    token_loss: TokenLoss,
    way: Way,
) -> torch.Tensor:
    times = {"k": k, "1": 1, "0": 0}
    state = states[{"k": k, "0": 0, "k-1": k - 1}[way.state]]
    source = torch.ones_like(mask) if way.mask == "ones" else mask
    own_mask = rolled(source, times.get(way.mask, k))
    losses = token_loss(state, rolled(labels, times[way.labels]))
    losses = losses * own_mask if way.is_masked else losses
    losses = losses if way.counts_0 else losses * (rolled(labels, k) != 0)
    num_0, num_k = float(source.sum()), float(own_mask.sum())
    divisor = max({"n_k": num_k, "n_0": num_0, "1": 1.0}[way.divisor], 1.0)
    f, K = case.f, case.K
    factor = {"f/K": f / K, "f": f, "f/(K+1)": f / (K + 1), "1": 1.0}[way.factor]
    if case.per_token:
        factor *= {"n_0": num_0, "1": 1.0, "all": float(mask.numel())}[way.n_0]
    return factor / divisor * losses.sum()


def means(
    case: Case,
    states: Sequence[torch.Tensor],
    labels: torch.Tensor,
    mask: torch.Tensor,
    token_loss: TokenLoss,
) -> list[float]:
    """For the log."""
    found = []
    for k in range(1, case.K + 1):
        own_mask = rolled(mask, k)
        losses = token_loss(states[k], rolled(labels, k)) * own_mask
        found.append(float(losses.sum()) / max(float(own_mask.sum()), 1.0))
    return found


def wrong_ways(case: Case) -> Iterator[tuple[Way, str]]:
    """Ways that are not right, and what to say of them."""
    right = Way()
    further = "Depth k looks k places further on than the label, so everything is rolled once more"
    once = f"at every depth once. {further} from depth to depth."
    yield replace(right, labels="1", mask="1"), f"Labels and mask are rolled {once}"
    yield replace(right, labels="1"), f"Labels are rolled {once}"
    yield replace(right, mask="1"), f"The mask is rolled {once}"
    yield (
        replace(right, labels="0", mask="0"),
        "Neither labels nor mask are rolled: every depth predicts the next token again.",
    )
    yield replace(right, labels="0"), "The mask is rolled, and the labels are not."
    yield (
        replace(right, mask="0"),
        "Labels are rolled, and the mask is not. It says which labels count, so it moves with them; "
        "at the end of the sequence there is none.",
    )
    yield (
        replace(right, mask="ones"),
        "loss_mask is not in it: also labels count that the mask leaves out, as those of padding.",
    )
    yield (
        replace(right, is_masked=False),
        "It is not multiplied by the mask. Where that is 0, no label counts; at the end there is none.",
    )
    yield (
        replace(right, counts_0=False),
        "A label 0 does not count in it, but 0 is a token like others. What says which labels count?",
    )
    yield (
        replace(right, state="0"),
        "It is made of the model's own hidden states, hidden_states[0].",
    )
    yield replace(right, state="k-1"), "It is made of the hidden states of the depth before."
    yield from _wrong_factors(case)


def _wrong_factors(case: Case) -> Iterator[tuple[Way, str]]:
    """What stands in front of the sum."""
    right, K = Way(), case.K
    yield (
        replace(right, factor="f"),
        f"Each of the {K} depths counts f = {case.f:g}. All of them together count f, so each f / K.",
    )
    yield replace(right, factor="1"), "f and K are not in it."
    yield (
        replace(right, factor="f/(K+1)"),
        f"It was divided by {K + 1}. The first of the {K + 1} hidden states is the model's own: "
        f"K is {K}.",
    )
    own = "Each depth has a number of its own, the sum of its rolled mask."
    if not case.per_token:
        yield (
            replace(right, divisor="n_0"),
            f"It is divided by n_0, the tokens before rolling. {own}",
        )
        yield replace(right, divisor="1"), "It is a sum; without per_token a mean is wanted."
    else:
        yield (
            replace(right, divisor="1", n_0="1"),
            "It is the plain sum over n_k tokens. Later everything is divided by the number of all "
            "tokens, n_0, so a depth with fewer labels would count less: multiply by n_0 / n_k.",
        )
        yield (
            replace(right, n_0="1"),
            "It is a mean. With per_token a loss is a sum over n_0 tokens: later all gradients are "
            "divided by the number of tokens, also those of the depths.",
        )
        yield (
            replace(right, divisor="1"),
            "It is the sum over n_k tokens times n_0, not divided by n_k.",
        )
        yield (
            replace(right, n_0="all"),
            "n_0 is the number of labels that count, not of all tokens.",
        )


# -- A step --


class RightStep:
    """The gradients of a step's parts, of scale 1 and not divided by M, by autograd."""

    def __init__(self, case: Case, weights: dict[str, torch.Tensor]):
        self.case, self.weights = case, weights
        self.main = self._gradients(self._main)
        self.mtp = self.of_other(Way())

    def of_other(self, way: Way) -> dict[str, torch.Tensor]:
        """In place of `mtp`."""
        return self._gradients(lambda *given: self._mtp(way, *given))

    def mtp_of_first(self) -> dict[str, torch.Tensor]:
        """What the first microbatch adds to `mtp`."""
        return self._gradients(lambda *given: self._mtp(Way(), *given), 1)

    def other_main(self, **how: Any) -> dict[str, torch.Tensor]:
        """In place of `main`."""
        return self._gradients(lambda *given: self._main(*given, **how))

    def _gradients(self, loss: Callable, num: int | None = None) -> dict[str, torch.Tensor]:
        model = SmallModel(self.weights)
        total = 0
        for which in range(len(self.case.masks) if num is None else num):
            batch = given_batch(self.case, which)
            total = total + loss(model, batch)
        leaves = list(model.weights.values())
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        pairs = zip(model.weights, found, leaves, strict=True)
        return {name: torch.zeros_like(x) if g is None else g for name, g, x in pairs}

    def _main(
        self,
        model: SmallModel,
        batch: dict[str, torch.Tensor],
        has_mask: bool = True,
        divisor: str = "",
        times_rolled: int = 0,
    ) -> torch.Tensor:
        """`divisor` is "count", "all" or "1"; what is right if it is not given."""
        mask = batch["loss_mask"] if has_mask else torch.ones_like(batch["loss_mask"])
        labels = rolled(batch["labels"], times_rolled)
        losses = model.token_loss(model(batch["tokens"])[0], labels) * mask
        divisor = divisor or ("1" if self.case.per_token else "count")
        return losses.sum() / {"count": mask.sum(), "all": mask.numel(), "1": 1.0}[divisor]

    def _mtp(self, way: Way, model: SmallModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        given = (model(batch["tokens"]), batch["labels"], batch["loss_mask"], model.token_loss)
        return sum(depth_losses(self.case, *given, way))
