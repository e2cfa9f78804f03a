"""One Mamba layer: norm, mixer, add. It has no MLP.

Counterpart: `megatron.core.ssm.mamba_layer`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.core.process_groups_config import ProcessGroupCollection, stage_of
from minimegatron.core.tracing import traced
from minimegatron.core.transformer.layer_placement import num_layers_before_chunk
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.spec_utils import ModuleSpec, build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.transformer.transformer_layer import bias_dropout_add


@dataclass
class MambaLayerSubmodules:
    """The specs of the norm and of the mixer."""

    norm: Any = None
    mixer: ModuleSpec | type | None = None


def _describe(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"layer": arguments["self"].layer_number}


class MambaLayer(MegatronModule):
    """x + mixer(norm(x)). To a block it looks like a `TransformerLayer`, whose arguments it takes."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaLayerSubmodules,
        layer_number: int = 1,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ):
        super().__init__(config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        self.layer_number = layer_number + num_layers_before_chunk(
            config, vp_stage, stage_of(pg_collection.pp)
        )
        self.hidden_dropout = config.hidden_dropout
        self.norm = build_module(
            submodules.norm, config, config.hidden_size, eps=config.layernorm_epsilon
        )
        self.mixer = build_module(
            submodules.mixer,
            config,
            d_model=config.hidden_size,
            layer_number=self.layer_number,
            pg_collection=pg_collection,
        )

    @traced("layer-forward", _describe)
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        checkpoint_core_attention: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(hidden states, context) -> both, the second as it came; the others are not used.

        Hidden states are [s, b, h]; [s/t, b, h] with sequence parallelism.
        """
        output = self.mixer(self.norm(hidden_states))
        return bias_dropout_add(output, hidden_states, self.hidden_dropout, self.training), context

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: weight gradients of the oldest microbatch that is owed."""
        self.mixer.backward_dw()
