"""What GPT has for schedules that run parts of a layer: its forward in nodes, its delayed gradients.

Megatron has this in `megatron.core.models.gpt.gpt_model`.
"""

from typing import Any

import torch

from minimegatron.core.models.common import model_chunk_schedule_plan
from minimegatron.core.transformer.transformer_config import TransformerConfig


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
