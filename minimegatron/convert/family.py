"""What a family of models calls its weights and sizes, on both sides.

Megatron keeps such tables in its `tools/checkpoint` and in Megatron-Bridge.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]


class Same:
    """One tensor, the same on both sides. Base of the other ways from one side to the other."""

    def to_ours(self, tensors: Tensors) -> Tensors:
        """Their tensors to a list of our one."""
        return tensors

    def to_theirs(self, tensors: Tensors) -> Tensors:
        """A list of our one to theirs."""
        return tensors


class Transposed(Same):
    """GPT-2's linear layers keep [in, out] where torch's keep [out, in]."""

    def to_ours(self, tensors: Tensors) -> Tensors:
        return [tensor.t() for tensor in tensors]

    to_theirs = to_ours


@dataclass(frozen=True)
class Weight:
    """One weight of ours, and the one or several of theirs that it is made of."""

    ours: str
    theirs: tuple[str, ...]
    way: Same = Same()


@dataclass(frozen=True)
class ConvertedFamily:
    """A family of models that Hugging Face calls by `model_type`."""

    model_type: str
    arguments: Callable[[dict[str, Any]], dict[str, Any]]
    """Their config.json to our model arguments. Raises ValueError for what we cannot compute."""
    config: Callable[[dict[str, Any]], dict[str, Any]]
    """Our model arguments to their config.json, without the size of the vocabulary."""
    weights: Callable[[dict[str, Any]], list[Weight]]
    """Every weight of a model with these arguments."""
    needs: Callable[[dict[str, Any]], dict[str, Any]]
    """The values that some of our model arguments must have, for one of theirs to compute the same."""
    model_family: str = "gpt"
    """What trains it here: `pretrain_gpt`, ..."""
    auto_class: str = "AutoModelForCausalLM"
    """What loads it there."""
    vocabulary: tuple[str, ...] = ("embedding.word_embeddings.weight", "output_layer.weight")
    """Our weights with a row per token."""


def refuse(model_type: str, problems: dict[str, bool]) -> None:
    """Raises ValueError naming the first problem that is True."""
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(f"this {model_type} model has {problem}, which is not supported")


@dataclass(frozen=True)
class QKV(Same):
    """Queries, keys and values: one matrix of ours, laid out by group, and theirs by kind.

    ours: for each of g groups, the rows of its a/g query heads, of its key, of its value
    theirs: all queries [a d, ...], all keys [g d, ...], all values [g d, ...]
    """

    num_heads: int
    num_groups: int
    width: int

    def to_ours(self, tensors: Tensors) -> Tensors:
        """[q, k, v] to one; matrices and biases alike."""
        rest = tensors[0].shape[1:]
        by_group = [tensor.reshape(self.num_groups, -1, *rest) for tensor in tensors]
        return [torch.cat(by_group, dim=1).reshape(-1, *rest)]

    def to_theirs(self, tensors: Tensors) -> Tensors:
        """One to [q, k, v]."""
        rest = tensors[0].shape[1:]
        by_group = tensors[0].reshape(self.num_groups, -1, *rest)
        queries = self.num_heads // self.num_groups * self.width
        parts = by_group.split([queries, self.width, self.width], dim=1)
        return [part.reshape(-1, *rest) for part in parts]


def norms(ours: str, theirs: str) -> list[Weight]:
    """Weight and bias of a LayerNorm, or of a linear layer that is the same on both sides."""
    return [Weight(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in ("weight", "bias")]


class Stacked(Same):
    """Matrices of theirs that are one of ours, above each other: SwiGLU's gate and up."""

    def to_ours(self, tensors: Tensors) -> Tensors:
        return [torch.cat(list(tensors))]

    def to_theirs(self, tensors: Tensors) -> Tensors:
        return tensors[0].chunk(2)
