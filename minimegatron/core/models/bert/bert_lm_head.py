"""One more layer for each token, between BERT's last layer and its output layer.

Counterpart: `megatron.core.models.bert.bert_lm_head`.
"""

from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.torch_norm import WrappedTorchNorm
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.transformer.utils import get_linear_layer


class BertLMHead(MegatronModule):
    """norm(gelu(dense(x))), whole on every tensor-parallel rank.

    Under sequence parallelism a rank sees its own tokens only. Then its gradients of all four
    parameters are terms of a sum, and are marked so.

    Args:
        hidden_size: h.
        tp_group: None for `parallel_state`'s.
    """

    def __init__(self, hidden_size: int, config: TransformerConfig, *, tp_group: Any = None):
        super().__init__(config)
        self.dense = get_linear_layer(
            hidden_size,
            hidden_size,
            config.init_method,
            dtype=config.params_dtype,
            gradient_is_partial=config.sequence_parallel,
            tp_group=tp_group,
        )
        self.layer_norm = WrappedTorchNorm(config, hidden_size, eps=config.layernorm_epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> [s, b, h]; [s/t, b, h] each with sequence parallelism."""
        return self.layer_norm(F.gelu(self.dense(hidden_states)))
