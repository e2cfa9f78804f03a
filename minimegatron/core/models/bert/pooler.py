"""One vector for a whole sequence: what the binary head reads.

Counterpart: `megatron.core.models.bert.pooler`.
"""

from typing import Any

import torch

from minimegatron.core.tensor_parallel.layers import InitMethod
from minimegatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.transformer.utils import get_linear_layer


class Pooler(MegatronModule):
    """tanh(dense(x[i])) for one token i, the same on every tensor-parallel rank.

    Under sequence parallelism the token is on one rank, so the sequence is gathered first. Then every
    rank computes the same from it: each has the whole gradient of `dense`, and nothing is to be
    summed, unlike in the head for tokens.

    Args:
        hidden_size: h.
        init_method: of `dense.weight` [h, h].
        sequence_parallel: `forward` gets a rank's part of the sequence.
        tp_group: None for `parallel_state`'s.
    """

    def __init__(
        self,
        hidden_size: int,
        init_method: InitMethod,
        config: TransformerConfig,
        sequence_parallel: bool = False,
        *,
        tp_group: Any = None,
    ):
        super().__init__(config)
        self.sequence_parallel = sequence_parallel
        self.tp_group = tp_group
        self.dense = get_linear_layer(
            hidden_size, hidden_size, init_method, dtype=config.params_dtype, tp_group=tp_group
        )

    def forward(self, hidden_states: torch.Tensor, sequence_index: int = 0) -> torch.Tensor:
        """[s, b, h], or [s/t, b, h] with sequence parallelism -> [b, h], of one token."""
        if self.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return torch.tanh(self.dense(hidden_states[sequence_index]))
