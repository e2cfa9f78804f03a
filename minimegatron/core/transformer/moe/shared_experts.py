"""The expert that sees every token.

Counterpart: `megatron.core.transformer.moe.shared_experts`.
"""

import torch
import torch.nn.functional as F

from minimegatron.core.parameter_marks import note_marks
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.initial_weights import new_weight
from minimegatron.core.transformer.mlp import MLP, MLPSubmodules
from minimegatron.core.transformer.transformer_config import TransformerConfig


class SharedExpertMLP(MLP):
    """A dense MLP of width `moe_shared_expert_intermediate_size`, cut over the tensor ranks.

    Args:
        gate: weigh the output of each token by sigmoid(x g), with a parameter g, [1, h].
        pg_collection: tp.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        gate: bool,
        pg_collection: ProcessGroupCollection,
    ):
        width, tp_group = config.moe_shared_expert_intermediate_size, pg_collection.tp
        super().__init__(config, submodules, ffn_hidden_size=width, tp_group=tp_group)
        self.gate_weight = None
        if gate:
            shape = (1, config.hidden_size)
            self.gate_weight = new_weight(
                shape, config.params_dtype, config.init_method, -1, tp_group
            )
            # Each rank sees its part of the sequence: its gradient is one term of a sum.
            self.gate_weight.sequence_parallel = config.sequence_parallel
            note_marks(self)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> [s, b, h]; [s/t, b, h] each with sequence parallelism."""
        output, _ = super().forward(hidden_states)
        if self.gate_weight is None:
            return output
        return output * torch.sigmoid(F.linear(hidden_states, self.gate_weight))
