"""Tokens, labels and masks, and a model small enough to be worked out. Megatron has no counterpart."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from minimegatron.exercises.check import Case

VOCAB, HIDDEN = 7, 3


def draw(case: Case, which: int, *shape: int) -> torch.Tensor:
    """Numbers that depend on the case and `which` only."""
    generator = torch.Generator().manual_seed(1000 * case.seed + which)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def given_batch(case: Case, which: int) -> dict[str, torch.Tensor]:
    """Microbatch `which`: "tokens" and "labels" [b, s], and the mask that the case says."""
    mask = torch.tensor(case.masks[which], dtype=torch.float64)
    generator = torch.Generator().manual_seed(1000 * case.seed + 500 + which)
    text = torch.randint(1, VOCAB, (len(mask), mask.size(1) + 1), generator=generator)
    # 0 is a token, too, and here a label that counts.
    text[-1, 3] = 0
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}


def given_states(case: Case) -> list[torch.Tensor]:
    """K + 1 hidden states [s, b, h]."""
    b, s = len(case.masks[0]), len(case.masks[0][0])
    return [draw(case, 10 + k, s, b, HIDDEN) for k in range(case.K + 1)]


def given_weights(case: Case) -> dict[str, torch.Tensor]:
    """The table of tokens [V, h], and the depths' layers [K, h, h]."""
    return {"table": draw(case, 1, VOCAB, HIDDEN), "depths": draw(case, 2, case.K, HIDDEN, HIDDEN)}


def token_loss_of(
    table: torch.Tensor,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The function that gives a loss for each token, [s, b, h] and [b, s] -> [b, s]."""

    def token_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = (hidden @ table.t()).permute(1, 2, 0)
        return F.cross_entropy(logits, labels, reduction="none")

    return token_loss


class SmallModel:
    """Hidden states of its own and of K depths. Its table is the output layer, too."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        self.weights = {name: x.clone().requires_grad_() for name, x in weights.items()}
        self.token_loss = token_loss_of(self.weights["table"])
        self.num_forwards = 0
        self.attach: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden
        """What the model itself does with its own hidden states before it hands them out."""

    def __call__(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """[b, s] -> K + 1 tensors [s, b, h]; a token knows those before it."""
        self.num_forwards += 1
        embedded = self.weights["table"][tokens.t()]
        states = [self.attach(torch.tanh(embedded.cumsum(dim=0)))]
        for weight in self.weights["depths"]:
            states.append(torch.tanh(states[-1] @ weight))
        return states
