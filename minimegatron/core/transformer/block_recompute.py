"""A block that computes activations again in backward: of whole layers, or of each one's attention.

Megatron has this in `megatron.core.transformer.transformer_block`.
"""

from dataclasses import dataclass
from functools import partial

import torch

from minimegatron.core.tensor_parallel.recompute import checkpoint
from minimegatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Recompute:
    """What one microbatch recomputes in backward."""

    granularity: str | None
    method: str | None
    num_layers: int

    @classmethod
    def of(
        cls, config: TransformerConfig, num_layers: int, whole_microbatch: bool | None
    ) -> "Recompute":
        """The config's choice, or the schedule's for this microbatch.

        Args:
            num_layers: of the chunk.
            whole_microbatch: `checkpoint_activations_microbatch`. None: as the config says. True:
                every layer. False: only what "block" says, and nothing otherwise. With
                `num_microbatches_with_partial_activation_checkpoints` the schedule says False for
                that many of the microbatches in flight, for which there is memory, and True for the
                rest (Korthikanti et al. 2022, appendix C).
        """
        chosen = cls(
            config.recompute_granularity, config.recompute_method, config.recompute_num_layers or 1
        )
        if whole_microbatch is None or chosen.method == "block" and not whole_microbatch:
            return chosen
        if not whole_microbatch:
            return cls(None, None, 0)
        if chosen.granularity is None or chosen.method == "block":
            return cls("full", "block", num_layers)
        return chosen


def recomputed_forward(
    block: torch.nn.Module,
    whole_microbatch: bool | None,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    context: torch.Tensor | None,
    context_mask: torch.Tensor | None,
    rotary_pos_emb: torch.Tensor | None,
) -> torch.Tensor:
    """The forward of all layers of a `TransformerBlock`; some of it again in backward.

    `whole_microbatch`: see `Recompute.of`. Nothing is recomputed in an evaluation.
    """
    arguments = (hidden_states, attention_mask, context, context_mask, rotary_pos_emb)
    layers = [*block.layers]
    recompute = Recompute.of(block.config, len(layers), whole_microbatch)
    if recompute.granularity == "full" and block.training:
        return _whole_layers_again(layers, recompute, *arguments)
    is_selective = recompute.granularity == "selective"
    return _run(layers, *arguments, is_selective)


def _whole_layers_again(
    layers: list[torch.nn.Module],
    recompute: Recompute,
    hidden_states: torch.Tensor,
    *arguments: torch.Tensor | None,
) -> torch.Tensor:
    """With "uniform" the input of each group of `num_layers` layers is kept.

    With "block" the input of each of the first `num_layers` layers, and everything of the others, for
    which there is room.
    """
    uniform = recompute.method == "uniform"
    step = recompute.num_layers if uniform else 1
    recomputed = len(layers) if uniform else min(recompute.num_layers, len(layers))
    for first in range(0, recomputed, step):
        group = layers[first : first + step]
        run = partial(_run, group)
        hidden_states = checkpoint(run, False, hidden_states, *arguments, modules=group)
    return _run(layers[recomputed:], hidden_states, *arguments)


def _run(
    layers: list[torch.nn.Module],
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    context: torch.Tensor | None,
    context_mask: torch.Tensor | None,
    rotary_pos_emb: torch.Tensor | None,
    checkpoint_core_attention: bool = False,
) -> torch.Tensor:
    for layer in layers:
        hidden_states, _ = layer(
            hidden_states,
            attention_mask,
            context=context,
            context_mask=context_mask,
            rotary_pos_emb=rotary_pos_emb,
            checkpoint_core_attention=checkpoint_core_attention,
        )
    return hidden_states
