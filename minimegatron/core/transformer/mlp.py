"""The feed-forward half of a layer: wide, activation, narrow again.

Counterpart: `megatron.core.transformer.mlp`.

    [s, b, h] -> fc1, column-parallel -> [s, b, f/t] -> activation -> fc2, row-parallel -> [s, b, h]

The activation is element-wise, so nothing is exchanged between the two.
"""

from typing import Any

import torch

from minimegatron.core.tensor_parallel.weight_grad_store import DelayedWgrad
from minimegatron.core.transformer import mlp_variants as variants
from minimegatron.core.transformer.layer_parts import MLPSubmodules
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.spec_utils import build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig


class MLP(DelayedWgrad, MegatronModule):
    """act(x W1 + b1) W2; with `config.gated_linear_unit`, (act(x Wg) * (x Wu)) W2.

    Wg and Wu are stacked in one weight [2f, h], gate first, each cut over the ranks by itself
    (stride 2), so that a rank holds matching pieces of both (SwiGLU: Shazeer 2020,
    https://arxiv.org/abs/2002.05202).

    Args:
        is_expert: this is an expert, or half of one; see `ColumnParallelLinear`.
        input_size: None for the config's hidden size.
        ffn_hidden_size: f; None for the config's.
        tp_group: None for `parallel_state`'s.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: Any = None,
    ):
        super().__init__(config)
        ffn_hidden_size = ffn_hidden_size or config.ffn_hidden_size
        options = {"bias": config.add_bias_linear, "is_expert": is_expert, "tp_group": tp_group}
        stacked = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            input_size or config.hidden_size,
            stacked * ffn_hidden_size,
            config=config,
            init_method=config.init_method,
            stride=stacked,
            **options,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            ffn_hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, h] -> ([s, b, h], bias to add); [s/t, b, h] each with sequence parallelism.

        `per_token_scale` multiplies the output of each token, [n] for n tokens [n, h]; here it already
        multiplies the activation, and the bias that is added is its product with it.
        """
        wide, _ = self.linear_fc1(hidden_states)
        activate, fc2, scale = self.config.activation_func, self.linear_fc2, per_token_scale
        wide = variants.gated(activate, wide) if self.config.gated_linear_unit else activate(wide)
        return fc2(wide) if scale is None else variants.scaled_output(fc2, wide, scale)
