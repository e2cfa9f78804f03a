"""What is frozen in a case of `parity`, and a low-rank part that is added beside frozen weights.

Frozen parameters keep `requires_grad=False` on every rank and in the one process. So they have no
gradient to compare; their weights are compared, and must not move.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core.tensor_parallel.initial_weights import draw_named_weight, new_weight
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear
from minimegatron.core.transformer.module_state import (
    global_parameter_name,
    named_global_parameters,
)
from minimegatron.core.transformer.transformer_config import TransformerConfig

RANK = 4
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class LowRank(torch.nn.Module):
    """A column-parallel layer, and beside it B A x with few rows of A: [s, b, h] -> [s, b, n/t].

    A is whole on every rank; B is cut as the layer is.
    """

    def __init__(self, base: ColumnParallelLinear, config: TransformerConfig, name: str):
        super().__init__()
        self.base, group = base, base.tp_group
        self.low_a = new_weight(
            (RANK, base.input_size), config.params_dtype, torch.nn.init.normal_, -1, group
        )
        # Each rank has seen part of the sequence: its gradient is one term of a sum.
        self.low_a.sequence_parallel = config.sequence_parallel
        self.low_b = ColumnParallelLinear(
            RANK,
            base.output_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            tp_group=group,
        )
        for weight, part in ((self.low_a, "low_a"), (self.low_b.weight, "low_b.weight")):
            draw_named_weight(weight, f"{name}.{part}", 5, group.rank(), group.size())

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.base(input_)
        added, _ = self.low_b(F.linear(input_, self.low_a))
        return output + added, bias

    def backward_dw(self) -> None:
        self.low_b.backward_dw()
        self.base.backward_dw()


def add_low_rank_parts(model: torch.nn.Module, config: TransformerConfig) -> None:
    """One beside each projection to queries, keys and values."""
    for name, module in list(model.named_modules()):
        if isinstance(module, ColumnParallelLinear) and name.endswith("linear_qkv"):
            parent = model.get_submodule(name.rpartition(".")[0])
            whole = global_parameter_name(model, f"{name}.weight").removesuffix(".weight")
            parent.linear_qkv = LowRank(module, config, whole)


def _only_layer(which: Callable[[int], int]) -> Callable[[str, TransformerConfig], bool]:
    def is_trained(name: str, config: TransformerConfig) -> bool:
        found = LAYER.search(name)
        return found is not None and int(found[1]) == which(config.num_layers)

    return is_trained


TRAINED: dict[str, Callable[[str, TransformerConfig], bool]] = {
    "embedding": lambda name, _: not name.startswith("embedding."),
    "all but first layer": _only_layer(lambda number: 0),
    "all but middle layer": _only_layer(lambda number: number // 2),
    "all but last layer": _only_layer(lambda number: number - 1),
    "all but experts": lambda name, _: ".experts." in name,
    "all but router": lambda name, _: ".router." in name,
    "all but norms": lambda name, _: "norm" in name,
    "all but biases": lambda name, _: name.endswith(".bias"),
    "all but output": lambda name, _: "output_layer." in name or "word_embeddings" in name,
    "all but low rank": lambda name, _: ".low_" in name,
    "all but the last norm": lambda name, _: "final_layernorm" in name and "layers" not in name,
    "all but further tokens": lambda name, _: name.startswith("mtp."),
    "everything": lambda name, _: False,
}
"""By what is frozen: (name in the whole model, config) -> whether the parameter is trained."""


def freeze(model: torch.nn.Module, config: Any, frozen: str | None) -> None:
    """Of a chunk that was just built, and is not wrapped yet."""
    if frozen is None:
        return
    if frozen == "all but low rank":
        add_low_rank_parts(model, config)
    for name, param in named_global_parameters(model):
        param.requires_grad_(TRAINED[frozen](name, config))
