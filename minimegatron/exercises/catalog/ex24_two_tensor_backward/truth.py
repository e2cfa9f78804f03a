"""What the gradients of one stage are, by autograd; and what usual mistakes give in their place.

Megatron has no counterpart.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from minimegatron.exercises.catalog.ex24_two_tensor_backward.data import (
    ENCODED,
    WEIGHTS,
    Kind,
    Layers,
    given_grads,
    given_inputs,
    given_own,
    given_weights,
)
from minimegatron.exercises.check import Case

Known = Iterator[tuple[torch.Tensor, str]]


class Own(NamedTuple):
    """What this stage alone gives, for one microbatch."""

    inputs: list[torch.Tensor]
    weights: dict[str, torch.Tensor]


class RightStage:
    """One stage's gradients, worked out apart for each microbatch."""

    def __init__(self, case: Case, kind: Kind):
        self.case, self.kind = case, kind
        self.own = [self._own(i) for i in range(case.M)]

    def _own(self, microbatch: int) -> Own:
        layers = Layers(self.kind, given_weights(self.case.seed))
        inputs = [x.requires_grad_() for x in given_inputs(self.case.seed, self.kind, microbatch)]
        output = layers(inputs, *given_own(self.case.seed, self.kind, microbatch))
        grads = given_grads(self.case.seed, self.kind, microbatch)
        leaves = [*inputs, *layers.weights.values()]
        found = torch.autograd.grad(
            output, leaves, None if grads is None else grads[0], allow_unused=True
        )
        whole = [
            torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)
        ]
        return Own(whole[: len(inputs)], dict(zip(WEIGHTS, whole[len(inputs) :], strict=True)))

    def behind(self, microbatch: int) -> torch.Tensor | None:
        """The gradient of the encoder's output that came from the stage after."""
        grads = given_grads(self.case.seed, self.kind, microbatch)
        return grads[1] if grads is not None and len(grads) > 1 else None

    def input_grads(self, microbatch: int) -> list[torch.Tensor]:
        """What is to be sent back."""
        found = list(self.own[microbatch].inputs)
        behind = self.behind(microbatch)
        if behind is not None:
            found[-1] = found[-1] + behind
        return found

    def weight_grad(self, name: str, num: int | None = None) -> torch.Tensor:
        """The sum over the first `num` microbatches; over all."""
        return sum(own.weights[name] for own in self.own[:num])

    # -- What mistakes give --

    def known_inputs(self, microbatch: int, place: int) -> Known:
        """Wrong gradients of one input."""
        if self.kind.input_words[place] == ENCODED:
            yield from self._known_encoded(microbatch, place)
        else:
            yield from self._known_hidden(microbatch, place)
        right = [self.input_grads(i)[place] for i in range(microbatch + 1)]
        yield (
            sum(right),
            "It has the gradients of the microbatches before in it. Each microbatch has tensors of its "
            "own, and so have their gradients; only gradients of weights add up.",
        )

    def _known_encoded(self, microbatch: int, place: int) -> Known:
        own, behind = self.own[microbatch].inputs[place], self.behind(microbatch)
        if behind is None:
            yield (
                torch.zeros_like(own),
                "It is 0. Nobody stands after the last stage, but its own cross attention has looked "
                "at the encoder's output.",
            )
            return
        yield (
            own,
            "It has only what this stage's own cross attention gives. The stages after have looked at "
            "the same tensor. What they give has arrived, as the second of output_grads: add it.",
        )
        yield (
            behind,
            "It is only what came from the stage after. This stage's own cross attention has looked at "
            "the tensor, too: autograd has left its part in the `.grad` of the input.",
        )
        yield own + 2 * behind, "What came from the stage after is in it twice."
        yield 2 * own + behind, "What this stage's own cross attention gives is in it twice."
        yield 2 * (own + behind), "It is there twice."
        yield (
            (own + behind) / 2,
            "It is the mean of the two parts. Two readers of one tensor: their gradients add up.",
        )
        for other in range(self.case.M):
            if other != microbatch:
                yield (
                    own + self.behind(other),
                    f"What came from the stage after is that of microbatch {other}.",
                )

    def _known_hidden(self, microbatch: int, place: int) -> Known:
        own, grads = (
            self.own[microbatch].inputs[place],
            given_grads(self.case.seed, self.kind, microbatch),
        )
        if grads is None:
            return
        yield (
            own + grads[0],
            "The gradient of the output was added to it. Hidden states are not handed on: what came "
            "from the stage after for the output has gone through the layers already.",
        )
        yield grads[0], "It is the gradient of the output. It must go through the layers first."

    def known_weights(self, name: str) -> Known:
        """Wrong gradients of one weight."""
        yield (
            self.own[-1].weights[name],
            "Only the last microbatch is in it. Gradients of weights add up over a step: nobody "
            "clears them in between.",
        )
        yield self.weight_grad(name, 1), "Only the first microbatch is in it."
        yield 2 * self.weight_grad(name), "Backward ran twice for each microbatch."
