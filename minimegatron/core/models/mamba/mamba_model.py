"""A language model of Mamba layers, or of those, attention and MLPs: or the chunk that one stage holds.

Counterpart: `megatron.core.models.mamba.mamba_model`.

Between stages goes [s, b, h] as in any other model. What differs from GPT is the block of layers.
"""

import dataclasses
from typing import Any

from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.ssm.mamba_config import check_mamba_model
from minimegatron.core.transformer.spec_utils import ModuleSpec, build_module
from minimegatron.core.transformer.transformer_block import TransformerBlock
from minimegatron.core.transformer.transformer_config import TransformerConfig


class MambaModel(GPTModel):
    """A `GPTModel` whose layers are those of a `MambaStack`.

    Args:
        mamba_stack_spec: of the `MambaStack`.
        hybrid_override_pattern: a letter for each layer: M Mamba, * attention, - MLP; None for M.
        position_embedding_type: by default "none": the order of tokens is in the state.
        others: as GPT's.

    Raises:
        ValueError: as GPT, and for experts and further tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mamba_stack_spec: ModuleSpec,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        *,
        hybrid_override_pattern: str | None = None,
        post_process: bool = True,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "none",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ):
        check_mamba_model(config)
        pattern = {"hybrid_override_pattern": hybrid_override_pattern}
        super().__init__(
            config,
            dataclasses.replace(mamba_stack_spec, params={**mamba_stack_spec.params, **pattern}),
            vocab_size,
            max_sequence_length,
            pre_process,
            post_process,
            parallel_output=parallel_output,
            share_embeddings_and_output_weights=share_embeddings_and_output_weights,
            position_embedding_type=position_embedding_type,
            rotary_percent=rotary_percent,
            rotary_base=rotary_base,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )

    def _build_decoder(self, spec: Any, **options: Any) -> TransformerBlock:
        return build_module(spec, self.config, **options)
