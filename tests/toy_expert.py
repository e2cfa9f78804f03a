"""A model with a second kind of parameter, in 150 lines: dense layers, each followed by toy experts.

Every expert sees every token, weighed by a router: nothing to send by hand but a gather and a
reduce-scatter. Each parameter of an expert is marked, and its name is asked of the list that holds
it. That is all that the rest of the package is told.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core.tensor_parallel.initial_weights import new_weight, weights_drawn_later
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from minimegatron.core.transformer.module import MegatronModule, PartOfModuleList
from minimegatron.core.transformer.torch_norm import WrappedTorchNorm
from minimegatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, LAYERS, EXPERTS = 6, 2, 4
SECTIONS = (8, 8, 4)
"""An expert's wide features: gate, up, and some that pass by: each is cut by itself."""


def make_config(tp: int) -> TransformerConfig:
    """For `tp` ranks that share a weight, each with its own tokens."""
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        params_dtype=torch.float64,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        init_seed=3,
    )


def init(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, std=0.3)


class Linears(MegatronModule):
    """Wide and narrow again, over the ranks of `group`; `sizes` are those of the wide sections."""

    def __init__(self, config: TransformerConfig, sizes: tuple[int, ...], bias: bool, group: Any):
        super().__init__(config)
        self.sizes = [size // group.size() for size in sizes]
        options = {"config": config, "init_method": init, "tp_group": group, "bias": bias}
        self.linear_fc1 = ColumnParallelLinear(
            HIDDEN, sum(sizes), partition_sizes=self.sizes, **options
        )
        # The gate is gone after the first.
        self.linear_fc2 = RowParallelLinear(
            sum(sizes[1:]), HIDDEN, input_is_parallel=True, skip_bias_add=False, **options
        )
        self.linear_fc2.weight.partition_sizes = self.sizes[1:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, *rest = self.linear_fc1(x)[0].split(self.sizes, dim=-1)
        wide = torch.cat([F.silu(gate) * up, *(torch.tanh(more) for more in rest)], dim=-1)
        return self.linear_fc2(wide)[0]


class ToyExperts(MegatronModule):
    """sum over experts e of probability_e * expert_e(scale * x), [s, b, h] -> [s, b, h]."""

    def __init__(self, config: TransformerConfig, groups: Any, mark: dict[str, Any]):
        super().__init__(config)
        self.ep, self.expt_tp = groups.ep, groups.expt_tp
        self.router = new_weight((EXPERTS, HIDDEN), torch.float64, init, -1, groups.tp)
        self.router.sequence_parallel = config.sequence_parallel
        # The ranks that share an expert have other tokens each, whatever the dense layers do.
        etp = self.expt_tp.size()
        mine = dataclasses.replace(
            config, tensor_model_parallel_size=etp, sequence_parallel=etp > 1
        )
        number = EXPERTS // self.ep.size()
        self.local_experts = PartOfModuleList(
            [Linears(mine, SECTIONS, False, self.expt_tp) for _ in range(number)],
            first=self.ep.rank() * number,
        )
        # Whole on every rank that shares the experts: the one parameter that has replicas there.
        for expert in self.local_experts:
            expert.scale = new_weight((HIDDEN,), torch.float64, init, -1, self.expt_tp)
        for param in self.local_experts.parameters():
            for name, value in mark.items():
                setattr(param, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs = F.softmax(x @ self.router.t(), dim=-1)
        # The first feature reaches no expert: gradients that are zero, to be counted.
        x = x * torch.tensor([0.0] + [1.0] * (HIDDEN - 1), dtype=x.dtype)
        x, probs = (gather_from_sequence_parallel_region(t, group=self.ep) for t in (x, probs))
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.local_experts, self.local_experts.first):
            # Each rank has the gradient of its own tokens; the sum over those that share it is it.
            scale = copy_to_tensor_model_parallel_region(expert.scale, group=self.expt_tp)
            total = total + probs[..., number : number + 1] * expert(scale * x)
        return reduce_scatter_to_sequence_parallel_region(total, group=self.ep)


class ToyLayer(MegatronModule):
    """x + dense(norm(x)), then x + experts(x)."""

    def __init__(self, config: TransformerConfig, groups: Any, mark: dict[str, Any]):
        super().__init__(config)
        self.norm = WrappedTorchNorm(config, HIDDEN)
        self.dense = Linears(config, (6, 6), True, groups.tp)
        self.experts = ToyExperts(config, groups, mark)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dense(self.norm(x))
        return x + self.experts(x)


class ToyModel(MegatronModule):
    """Layers in a list that is not called `decoder.layers`."""

    def __init__(self, groups: Any, mark: dict[str, Any]):
        super().__init__(make_config(groups.tp.size()))
        with weights_drawn_later():
            self.stack = PartOfModuleList(
                ToyLayer(self.config, groups, mark) for _ in range(LAYERS)
            )
        self.initialize_weights(groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.stack:
            x = layer(x)
        return x
