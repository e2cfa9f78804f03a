"""The experts of one rank, one after the other.

Counterpart: `megatron.core.transformer.moe.experts`.
"""

from typing import Any

import torch

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tracing import traced
from minimegatron.core.transformer.mlp import MLP, MLPSubmodules
from minimegatron.core.transformer.module import MegatronModule, PartOfModuleList
from minimegatron.core.transformer.transformer_config import TransformerConfig


def _describe(arguments: dict[str, Any]) -> dict[str, Any]:
    counts = arguments["tokens_per_expert"]
    return {"layer": arguments["self"].layer_number, "tokens_per_expert": counts.tolist()}


class SequentialMLP(MegatronModule):
    """One MLP per expert of this rank, each with its own tokens.

    Args:
        num_local_experts: experts of this rank, E/e.
        submodules: the specs of each expert's two projections.
        pg_collection: ep, expt_tp.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config)
        self.num_local_experts = num_local_experts
        self.layer_number: int | None = None
        experts = (
            MLP(
                config,
                submodules,
                is_expert=True,
                ffn_hidden_size=config.moe_ffn_hidden_size,
                tp_group=pg_collection.expt_tp,
            )
            for _ in range(num_local_experts)
        )
        first = pg_collection.ep.rank() * num_local_experts
        self.local_experts = PartOfModuleList(experts, first)

    @traced("expert-compute", _describe)
    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """[n, h] -> ([n, h], None), each token's output times its probability, of shape [n].

        The tokens are in the experts' order; `tokens_per_expert`, int64 [E/e] on the CPU, says how many
        each has. With expert tensor parallelism the result is one term of a sum. An expert without
        tokens runs too: its parameters then have a gradient of zero, and their hooks run as on every
        other rank.
        """
        if self.config.moe_apply_probs_on_input:
            weighed = permuted_local_hidden_states * permuted_probs.unsqueeze(-1)
            permuted_local_hidden_states = weighed.to(permuted_local_hidden_states.dtype)
            permuted_probs = torch.ones_like(permuted_probs)
        counts = tokens_per_expert.tolist()
        tokens, probs = permuted_local_hidden_states.split(counts), permuted_probs.split(counts)
        outputs = [
            expert(*mine)[0]
            for expert, *mine in zip(self.local_experts, tokens, probs, strict=True)
        ]
        return torch.cat(outputs), None

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: weight gradients of the oldest microbatch that is owed."""
        for expert in reversed(self.local_experts):
            expert.backward_dw()
