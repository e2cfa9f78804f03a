"""Where a rank's layers are, asked without its rank; and a configuration that has other sizes."""

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.models.gpt import GPTModel
from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
)
from minimegatron.core.pipeline_parallel import get_forward_backward_func
from minimegatron.core.transformer import TransformerConfig
from minimegatron.core.transformer.transformer_block import get_num_layers_to_build
from minimegatron.core.transformer.transformer_layer import get_transformer_layer_offset
from tests.ranks import run_ranks

LAYERS = [3, 2, 2, 1]
"""Of the four stages."""


def make_config(p: int = 4, **options) -> TransformerConfig:
    return TransformerConfig(
        num_layers=sum(LAYERS),
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=p,
        **options,
    )


def ask() -> dict:
    """What this rank's stage is told, and how a configuration of one stage is refused."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    config = make_config(num_layers_in_first_pipeline_stage=3, num_layers_in_last_pipeline_stage=1)
    told = {
        "rank": parallel_state.get_pipeline_model_parallel_rank(),
        "layers": get_num_layers_to_build(config),
        "offset": get_transformer_layer_offset(config),
        "of rank 2": (
            get_num_layers_to_build(config, None, 2),
            get_transformer_layer_offset(config, None, 2),
        ),
        "spec": len(get_gpt_decoder_block_spec(config, use_transformer_engine=False).layer_specs),
        "whole": len(get_gpt_decoder_layer_specs(config, False, "RMSNorm")),
    }
    alone = make_config(1)
    with pytest.raises(ValueError, match="says pipeline_model_parallel_size=1, .* has 4 ranks"):
        GPTModel(alone, get_gpt_layer_local_spec(), 32, 4)
    stage = torch.nn.Linear(8, 8)
    stage.config = alone
    with pytest.raises(ValueError, match="says pipeline_model_parallel_size=1, .* has 4 ranks"):
        get_forward_backward_func()(
            forward_step_func=None,
            data_iterator=None,
            model=stage,
            num_microbatches=4,
            seq_length=4,
            micro_batch_size=1,
        )
    return told


def test_a_stage_asks_without_its_rank():
    for rank, told in enumerate(run_ranks(ask, 4, timeout=60)):
        assert told == {
            "rank": rank,
            "layers": LAYERS[rank],
            "offset": sum(LAYERS[:rank]),
            "of rank 2": (2, 5),
            "spec": LAYERS[rank],
            "whole": 8,
        }


def test_one_stage_needs_no_groups():
    config = make_config(1)
    assert (get_num_layers_to_build(config), get_transformer_layer_offset(config)) == (8, 0)
    assert len(get_gpt_decoder_block_spec(config).layer_specs) == 8
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        get_num_layers_to_build(make_config(4, num_layers_in_first_pipeline_stage=2))
