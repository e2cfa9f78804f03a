"""What a GPT has for second subjects: layers for further tokens, and a forward in nodes.

Counterpart: `megatron.core.models.gpt.gpt_layer_specs`, and two methods of
`megatron.core.models.gpt.gpt_model`.
"""

from typing import Any

import torch

from minimegatron.core.models.common import model_chunk_schedule_plan
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from minimegatron.core.transformer import multi_token_prediction as mtp
from minimegatron.core.transformer.spec_utils import ModuleSpec
from minimegatron.core.transformer.transformer_block import TransformerBlockSubmodules
from minimegatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["get_gpt_mtp_block_spec"]


# -- Further tokens --


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    use_transformer_engine: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> "mtp.MultiTokenPredictionBlockSubmodules | None":
    """The layers for further tokens of one chunk; None for a chunk that predicts none.

    Args:
        spec: a layer's, or `get_gpt_decoder_block_spec(...)` for the chunk. Each further layer is of
            the kind of its last one; on a chunk without layers, of the model's last one.
        use_transformer_engine: must be False.
        vp_stage, pp_rank: as for `get_gpt_decoder_block_spec`.
    """
    if config.mtp_num_layers is None:
        return None
    num_layers = mtp.get_mtp_num_layers_to_build(config, vp_stage, pp_rank)
    if num_layers == 0:
        return None
    if isinstance(spec, TransformerBlockSubmodules):
        spec = (spec.layer_specs or get_gpt_decoder_layer_specs(config))[-1]
    layer_spec = mtp.get_mtp_layer_spec(spec, use_transformer_engine)
    return mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[layer_spec] * num_layers)


def build_mtp_block_of(model: Any, spec: Any) -> "mtp.MultiTokenPredictionBlock | None":
    """The layers for further tokens of the chunk `model`, a `GPTModel`; None without any.

    Raises as `build_mtp_block`, also for a model that predicts them and has no `spec`.
    """
    if spec is None and model.config.mtp_num_layers is None:
        return None
    return mtp.build_mtp_block(model, spec)


# -- For schedules that run parts of a layer --


class PlannedGPT:
    """The part of `GPTModel` that only such schedules call."""

    config: TransformerConfig
    decoder: Any
    mtp: Any
    embedding_activation_buffer: list[torch.Tensor] | None = None
    grad_output_buffer: list[torch.Tensor] | None = None

    def build_schedule_plan(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        decoder_input: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        runtime_gather_output: bool | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> "model_chunk_schedule_plan.TransformerModelChunkSchedulePlan":
        """The same forward in nodes, for combined 1F1B. Arguments as `GPTModel.forward`.

        It computes nothing. Nodes call parts of layers; forward hooks of a whole layer, or of the
        model, do not run. Raises ValueError for a model that predicts further tokens: their layers have
        no nodes.
        """
        if self.config.mtp_num_layers is not None:
            raise ValueError(
                f"build_schedule_plan: mtp_num_layers is {self.config.mtp_num_layers}, and layers for "
                "further tokens have no nodes; run the model's forward, or leave them out"
            )
        return model_chunk_schedule_plan.TransformerModelChunkSchedulePlan(
            self,
            input_ids,
            position_ids,
            attention_mask,
            decoder_input,
            labels,
            runtime_gather_output=runtime_gather_output,
            loss_mask=loss_mask,
        )

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: the layers' weight gradients of the oldest microbatch owed.

        Norms, biases, the embedding and the output layer have theirs from backward.
        """
        if self.mtp is not None:
            self.mtp.backward_dw()
        self.decoder.backward_dw()
