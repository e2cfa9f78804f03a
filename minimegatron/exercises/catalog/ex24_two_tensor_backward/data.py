"""Stages small enough to be worked out, and what travels to them. Megatron has no counterpart."""

from dataclasses import dataclass

import torch

S_ENC, S_DEC, BATCH, HIDDEN = 5, 3, 2, 4
"""Two lengths: tensors of one shape could be mixed up and nobody would see it."""
ENCODED = "encoder's output"
GRADIENT_OF = {
    "hidden": "the gradient of the hidden",
    ENCODED: "the gradient of the encoder's output",
}
"""By what a tensor is: how a verdict names its gradient."""
"""How it is called where one reads it, beside "hidden"."""
WEIGHTS = ("query", "key", "value", "layer")


@dataclass(frozen=True)
class Kind:
    """Where a stage stands in the pipeline."""

    name: str
    begins: bool = False
    """The first stage of the encoder, or of the decoder: it reads data."""
    is_decoder: bool = True
    is_last: bool = False
    looks: bool = True
    """Whether a decoder stage looks at the encoder's output."""
    s_dec: int = S_DEC

    @property
    def input_words(self) -> list[str]:
        """What each tensor that comes in is."""
        if not self.is_decoder:
            return [] if self.begins else ["hidden"]
        return [ENCODED] if self.begins else ["hidden", ENCODED]

    @property
    def output_words(self) -> list[str]:
        """What each tensor that goes out is."""
        if self.is_last:
            return ["loss"]
        return ["hidden", ENCODED] if self.is_decoder else ["hidden"]


FIRST = Kind("the first encoder stage", begins=True, is_decoder=False)
ENCODER = Kind("an encoder stage", is_decoder=False)
FIRST_DECODER = Kind("the first decoder stage", begins=True)
DECODER = Kind("a decoder stage in the middle")
LAST = Kind("the last decoder stage", is_last=True)
ONLY_DECODER = Kind("the only decoder stage", begins=True, is_last=True)
BLIND = Kind("a decoder stage that does not look at the encoder's output", looks=False)
EVEN = Kind("a decoder stage in the middle, both lengths alike", s_dec=S_ENC)
"""A tensor in the wrong place fits here."""
KINDS = {
    kind.name: kind
    for kind in (FIRST, ENCODER, FIRST_DECODER, DECODER, LAST, ONLY_DECODER, BLIND, EVEN)
}


def draw(seed: int, which: int, *shape: int) -> torch.Tensor:
    """Numbers that depend on the two only."""
    generator = torch.Generator().manual_seed(1000 * seed + which)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def shape_of(word: str, kind: Kind) -> list[int]:
    """Of what travels: [s, b, h] with the length of its half of the model."""
    length = kind.s_dec if word == "hidden" and kind.is_decoder else S_ENC
    return [length, BATCH, HIDDEN]


def given_weights(seed: int, stage: int = 0) -> dict[str, torch.Tensor]:
    """Of one stage, [h, h] each."""
    pairs = enumerate(WEIGHTS)
    return {name: draw(seed, 10 * stage + number, HIDDEN, HIDDEN) for number, name in pairs}


class Layers:
    """What a stage computes: cross attention and a layer; on the last stage a loss of it."""

    def __init__(self, kind: Kind, weights: dict[str, torch.Tensor]):
        self.kind = kind
        self.weights = {name: x.clone().requires_grad_() for name, x in weights.items()}

    def __call__(
        self, inputs: list[torch.Tensor | None], own: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """The output of one microbatch; `own` is what a stage that begins a half has read."""
        weights, kind = self.weights, self.kind
        hidden = own if kind.begins else inputs[0]
        if kind.is_decoder and kind.looks:
            encoded = inputs[-1]
            query, key = hidden @ weights["query"], encoded @ weights["key"]
            scores = torch.einsum("qbh,kbh->bqk", query, key)
            seen = torch.einsum("bqk,kbh->qbh", scores.softmax(dim=2), encoded @ weights["value"])
            hidden = hidden + seen
        output = torch.tanh(hidden @ weights["layer"])
        return (output * target).sum() if kind.is_last else output


# -- One stage alone --


def given_inputs(seed: int, kind: Kind, microbatch: int) -> list[torch.Tensor]:
    """What comes from the stage before; nothing for the first stage."""
    return [
        draw(seed, 1000 + 10 * microbatch + place, *shape_of(word, kind))
        for place, word in enumerate(kind.input_words)
    ]


def given_grads(seed: int, kind: Kind, microbatch: int) -> list[torch.Tensor] | None:
    """What comes from the stage after; None on the last."""
    if kind.is_last:
        return None
    return [
        draw(seed, 2000 + 10 * microbatch + place, *shape_of(word, kind))
        for place, word in enumerate(kind.output_words)
    ]


def given_own(seed: int, kind: Kind, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the stage has read of a microbatch, and what its loss is made with."""
    shape = shape_of("hidden", kind)
    number = 10 * microbatch + kind.is_decoder
    return draw(seed, 3000 + number, *shape), draw(seed, 4000 + number, *shape)
