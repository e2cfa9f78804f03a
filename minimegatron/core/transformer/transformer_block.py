"""The layers of one chunk, in order.

Counterpart: `megatron.core.transformer.transformer_block`.
"""

import contextlib
from typing import Any

import torch

from minimegatron.core.process_groups_config import ProcessGroupCollection, num_stages_of, stage_of
from minimegatron.core.schedule_of_config import check_num_stages
from minimegatron.core.tensor_parallel.random import get_cuda_rng_tracker
from minimegatron.core.tensor_parallel.weight_grad_store import DelayedWgrad
from minimegatron.core.transformer import block_recompute as recompute
from minimegatron.core.transformer import layer_parts, transformer_block_checks
from minimegatron.core.transformer.layer_placement import num_layers_before_chunk
from minimegatron.core.transformer.module import MegatronModule, PartOfModuleList
from minimegatron.core.transformer.spec_utils import build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.exports import all_of

# Megatron has them here.
__getattr__, __dir__ = all_of(__name__, "minimegatron.core.transformer.layer_parts")


def dropout_rng(config: TransformerConfig, is_training: bool) -> Any:
    """Around layers: with sequence parallelism each rank drops its tokens by its own stream."""
    drops = config.hidden_dropout > 0.0 or config.attention_dropout > 0.0
    if config.sequence_parallel and is_training and drops:
        return get_cuda_rng_tracker().fork()
    return contextlib.nullcontext()


class TransformerBlock(DelayedWgrad, MegatronModule):
    """One chunk's layers, and the final norm if it is the last chunk.

    Where further tokens are predicted, the final norm is with the model's last layer, wherever that is:
    they begin with what the norm returns.

    Args:
        spec: a layer's `ModuleSpec`, used for every layer, or `TransformerBlockSubmodules`.
        post_layer_norm: have a final norm, on its chunk.
        pre_process: this is the first chunk, whose input `forward` gets from the embedding.
        post_process: this is the last chunk.
        pg_collection: tp and pp; None for `parallel_state`'s.
        vp_stage: the chunk, with virtual stages.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: Any,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ):
        super().__init__(config)
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        stage, num_stages = stage_of(pg_collection.pp), num_stages_of(pg_collection.pp)
        check_num_stages(config, num_stages)
        self.pre_process, self.post_process = pre_process, post_process
        self.vp_stage = vp_stage
        self.input_tensor: torch.Tensor | None = None
        submodules = layer_parts.get_block_submodules(config, spec, vp_stage, stage)
        options = {"config": config, "pg_collection": pg_collection, "vp_stage": vp_stage}
        layers = (
            build_module(layer_spec, layer_number=number, **options)
            for number, layer_spec in enumerate(submodules.layer_specs, start=1)
        )
        first = num_layers_before_chunk(config, vp_stage, stage)
        self.layers = PartOfModuleList(layers, first)
        self.num_layers_per_pipeline_rank = len(self.layers)
        self.final_layernorm = None
        has_last_layer = 0 < len(self.layers) == config.num_layers - first
        is_last = post_process if config.mtp_num_layers is None else has_last_layer
        if is_last and post_layer_norm:
            self.final_layernorm = build_module(
                submodules.layer_norm, config, config.hidden_size, eps=config.layernorm_epsilon
            )

    def set_input_tensor(self, input_tensor: torch.Tensor | None) -> None:
        """What the previous stage sent; `forward` uses it unless this is the first chunk."""
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        *,
        rotary_pos_emb: torch.Tensor | None = None,
        checkpoint_activations_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """[s, b, h] -> [s, b, h], [s/t, b, h] each with sequence parallelism; never a view.

        Args:
            hidden_states: read on the first chunk only; others use `set_input_tensor`.
            attention_mask: see `DotProductAttention`.
            context, context_mask: what layers with cross attention attend to; the same for all.
            rotary_pos_emb: angles [s, 1, 1, d'], or None.
            checkpoint_activations_microbatch: see `Recompute.of`.
        """
        asked, mask = checkpoint_activations_microbatch, attention_mask
        hidden_states = self.first_input(hidden_states)
        rest = {"context": context, "context_mask": context_mask, "rotary_pos_emb": rotary_pos_emb}
        with dropout_rng(self.config, self.training):
            if asked or self.config.recompute_granularity is not None:
                hidden_states = recompute.recomputed_forward(
                    self, asked, hidden_states, mask, **rest
                )
            else:
                for layer in self.layers:
                    hidden_states, _ = layer(hidden_states, mask, **rest)
        if self.final_layernorm is None:
            return hidden_states
        return self.final_layernorm(hidden_states)

    def first_input(self, hidden_states: torch.Tensor | None) -> torch.Tensor:
        """What the first layer gets. Raises ValueError if nothing is there."""
        hidden_states = hidden_states if self.pre_process else self.input_tensor
        if hidden_states is None:
            transformer_block_checks.refuse_no_input()
        # A chunk without layers must not hand on its input itself: sent on and then freed, it
        # would take the tensor away from under the stage's own backward.
        return hidden_states if len(self.layers) else hidden_states.clone()
