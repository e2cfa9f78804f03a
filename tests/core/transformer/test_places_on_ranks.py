"""Where a rank's layers are, asked without its rank; and a configuration that has other sizes."""

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.models.bert import BertModel
from minimegatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from minimegatron.core.models.gpt import GPTModel
from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from minimegatron.core.models.mamba.mamba_layer_specs import get_mamba_stack_spec
from minimegatron.core.models.mamba.mamba_model import MambaModel
from minimegatron.core.models.T5.stack_split import StackSplit
from minimegatron.core.models.T5.t5_model import T5Model
from minimegatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
)
from minimegatron.core.pipeline_parallel import get_forward_backward_func
from minimegatron.core.ssm.mamba_layer import MambaLayer
from minimegatron.core.ssm.mlp_layer import MLPLayer
from minimegatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from minimegatron.core.tensor_parallel.sharding import param_is_not_tensor_parallel_duplicate
from minimegatron.core.transformer import TransformerConfig
from minimegatron.core.transformer.multi_token_prediction import (
    get_mtp_num_layers_to_build,
    mtp_on_this_rank,
)
from minimegatron.core.transformer.transformer_block import (
    TransformerBlock,
    get_num_layers_to_build,
)
from minimegatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from tests.groups import PretendGroup, pretend_groups
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


# -- Places set by hand --


@pytest.fixture
def by_hand():
    yield parallel_state
    parallel_state.destroy_model_parallel()


def test_f1_layers_are_placed_by_the_rank_set_by_hand(by_hand):
    """As a program does that converts checkpoints: one process asks for each stage."""
    config = TransformerConfig(
        num_layers=24, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=4
    )
    told = []
    for rank in range(4):
        by_hand.set_pipeline_model_parallel_rank(rank)
        spec = get_gpt_decoder_block_spec(config)
        told.append((get_transformer_layer_offset(config), len(spec.layer_specs)))
    assert told == [(0, 6), (6, 6), (12, 6), (18, 6)]


def test_f1_further_tokens_are_placed_by_the_rank_set_by_hand(by_hand):
    config = make_config(mtp_num_layers=2)
    for rank in range(4):
        by_hand.set_pipeline_model_parallel_rank(rank)
        found = get_mtp_num_layers_to_build(config), mtp_on_this_rank(config)
        assert found == ((2, True) if rank == 3 else (0, False))


def test_f1_a_rank_set_by_hand_that_no_stage_has(by_hand):
    by_hand.set_pipeline_model_parallel_rank(7)
    with pytest.raises(ValueError, match="pipeline rank 7 is not one of the 4"):
        get_transformer_layer_offset(make_config())


def test_f1_seeds_and_duplicates_follow_the_tensor_rank_set_by_hand(by_hand):
    states = []
    for rank in (0, 1):
        by_hand.set_tensor_model_parallel_rank(rank)
        model_parallel_cuda_manual_seed(5)
        states.append(get_cuda_rng_tracker().get_states()["model-parallel-rng"])
        model_parallel_cuda_manual_seed(5, tp_rank=rank)
        assert torch.equal(states[rank], get_cuda_rng_tracker().get_states()["model-parallel-rng"])
        assert param_is_not_tensor_parallel_duplicate(torch.zeros(1)) == (rank == 0)
    get_cuda_rng_tracker().reset()
    assert not torch.equal(*states)


def layer_numbers(model: torch.nn.Module) -> list[int]:
    names = (TransformerLayer, MambaLayer, MLPLayer)
    return [layer.layer_number for layer in model.modules() if isinstance(layer, names)]


def build_stage(family: str, rank: int) -> torch.nn.Module:
    """Stage `rank` of four, by `parallel_state`'s groups."""
    ends = {"pre_process": rank == 0, "post_process": rank == 3}
    if family == "mamba":
        config = make_config(mamba_state_dim=8, mamba_head_dim=4, mamba_num_groups=1)
        return MambaModel(config, get_mamba_stack_spec(), 32, 4, **ends)
    if family == "bert":
        return BertModel(make_config(), 2, bert_layer_local_spec, 32, 4, **ends)
    if family == "t5":
        split, config = StackSplit(4, 2), make_config()
        return T5Model(
            config,
            split.encoder_config(config, 8),
            encoder_model_with_local_spec(),
            decoder_model_with_local_spec(),
            32,
            4,
            pre_process=split.begins(rank),
            post_process=split.ends(rank),
            add_encoder=split.has_encoder(rank),
            add_decoder=split.has_decoder(rank),
        )
    options = {"mtp_num_layers": 1} if family == "mtp" else {}
    config, spec = make_config(**options), get_gpt_layer_local_spec()
    further = get_gpt_mtp_block_spec(config, spec)
    positions = {"position_embedding_type": "rope", "mtp_block_spec": further}
    return GPTModel(config, spec, 32, 4, **ends, **positions)


def build_every_stage() -> dict[str, list[list[int]]]:
    """In one process, with groups of one: the numbers of each stage's layers."""
    parallel_state.initialize_model_parallel()
    parallel_state.set_pipeline_model_parallel_world_size(4)
    found = {}
    for family in ("gpt", "mtp", "bert", "t5", "mamba"):
        found[family] = []
        for rank in range(4):
            parallel_state.set_pipeline_model_parallel_rank(rank)
            found[family].append(layer_numbers(build_stage(family, rank)))
    parallel_state.set_pipeline_model_parallel_rank(3)
    for ask in (
        parallel_state.get_pipeline_model_parallel_last_rank,
        parallel_state.get_pipeline_model_parallel_prev_rank,
    ):
        with pytest.raises(RuntimeError, match="of a pipeline of 4, as set by hand, has no rank"):
            ask()
    assert parallel_state.get_pipeline_model_parallel_next_rank() == 0
    parallel_state.set_pipeline_model_parallel_world_size(None)
    with pytest.raises(ValueError, match="says pipeline_model_parallel_size=4, .* has 1 ranks"):
        build_stage("gpt", 3)
    return found


def test_f1_models_are_built_for_the_stage_set_by_hand():
    (found,) = run_ranks(build_every_stage, 1)
    pairs = [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert found == {
        "gpt": pairs,
        "mtp": [*pairs[:3], [7, 8, 9]],
        "bert": pairs,
        "t5": [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [5, 6, 7, 8]],
        "mamba": pairs,
    }


def test_f1_groups_that_are_given_go_before_what_is_set_by_hand(by_hand):
    by_hand.set_pipeline_model_parallel_rank(3)
    groups = pretend_groups(pp_rank=1, pp_size=4, cp=PretendGroup())
    spec = get_gpt_layer_local_spec()
    block = TransformerBlock(make_config(), spec, pre_process=False, pg_collection=groups)
    assert layer_numbers(block) == [3, 4]
