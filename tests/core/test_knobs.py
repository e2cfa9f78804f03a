"""One definition per knob: what a field says of itself, and which names a configuration takes."""

import dataclasses
import json
import re
from unittest import mock

import pytest

from minimegatron.convert.hugging_face import _model_arguments
from minimegatron.core import left_out_record
from minimegatron.core.distributed import DistributedDataParallelConfig
from minimegatron.core.left_out_record import LeftOut, Recorded, known_fields
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.optimizer import OptimizerConfig
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training.argument_utils import flag_name
from minimegatron.training.arguments import (
    core_transformer_config_from_args,
    ddp_config_from_args,
    optimizer_config_from_args,
)
from minimegatron.training.checkpoint_args import COMPARED, check_against_checkpoint
from minimegatron.training.config import SECTIONS, ModelConfig
from tests.training.test_arguments import parse

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
CORE = (ModelParallelConfig, TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)

# -- Unknown names --


@pytest.mark.parametrize("config", CORE)
def test_a_misspelt_field_is_refused_with_the_nearest_name(config):
    field = dataclasses.fields(config)[0].name
    words = f"{config.__name__} has no field '{field}z'; did you mean '{field}'?"
    with pytest.raises(ValueError, match=re.escape(words)):
        config(**{f"{field}z": 1})
    with pytest.raises(ValueError, match="'qqq'; remove it"):
        config(qqq=1)


def test_fields_are_taken_by_place_and_by_name():
    config = ModelParallelConfig(2, sequence_parallel=True)
    assert (config.tensor_model_parallel_size, config.sequence_parallel) == (2, True)
    config = TransformerConfig(**SIZES, normalization="RMSNorm")
    assert dataclasses.replace(config, num_layers=3).normalization == "RMSNorm"


@dataclasses.dataclass
class _OneMore(TransformerConfig):
    mine: int = 3


def test_a_subclass_has_fields_of_its_own():
    """And takes a flag that the user added, by its name."""
    assert _OneMore(**SIZES).mine == 3
    args = parse("--mine 7", extra_args_provider=lambda p: p.add_argument("--mine", type=int))
    assert core_transformer_config_from_args(args, _OneMore).mine == 7


def test_megatrons_fields_pass_with_their_defaults_only():
    made_up = {
        "core.model_parallel_config.ModelParallelConfig": Recorded((), {"fp9": LeftOut((None,))}),
        "core.transformer.transformer_config.TransformerConfig": Recorded(
            (), {"moe_glow": LeftOut((0.5,))}
        ),
    }
    with mock.patch.object(left_out_record, "record", lambda: made_up):
        config = TransformerConfig(**SIZES, fp9=None, moe_glow=0.5)
        assert (config.fp9, config.moe_glow, config.num_layers) == (None, 0.5, 2)
        assert (TransformerConfig(**SIZES).moe_glow, hasattr(config, "fp8")) == (0.5, False)
        assert known_fields(ModelParallelConfig, {"bf16": True, "fp9": None}) == {"bf16": True}
        words = "TransformerConfig: fp9 is 'e4m3', but it is Megatron's and not implemented"
        with pytest.raises(ValueError, match=words + " here; leave it at None"):
            TransformerConfig(**SIZES, fp9="e4m3")
        with pytest.raises(ValueError, match="did you mean 'moe_glow'"):
            TransformerConfig(**SIZES, moe_glo=0.5)
        with pytest.raises(ValueError, match="ModelParallelConfig has no field 'moe_glow'"):
            ModelParallelConfig(moe_glow=0.5)  # a base knows nothing of its subclass's
    assert known_fields(TransformerConfig, {"extra": 1}, also=["extra"]) == {"extra": 1}


def test_a_checkpoints_model_is_decided_likewise(tmp_path):
    common = {
        "iteration": 0,
        "train_state": {},
        "opt_param_scheduler": None,
        "optimizer": None,
        "rng": None,
        "args": {"model": {"num_layers": 8, "num_layerz": 8}},
    }
    args = parse("--finetune")
    folder = "minimegatron.training.checkpoint_args"
    with (
        mock.patch(f"{folder}.check_files"),
        mock.patch(f"{folder}.load_common_state_dict", return_value=common),
        pytest.raises(ValueError, match="no field 'num_layerz'; did you mean 'num_layers'"),
    ):
        check_against_checkpoint(args, tmp_path)
    (tmp_path / "common.json").write_text(json.dumps(common))
    with (
        mock.patch("minimegatron.convert.hugging_face.load_common_state_dict", lambda _: common),
        pytest.raises(ValueError, match="no field 'num_layerz'"),
    ):
        _model_arguments(tmp_path)


# -- Limits and choices --


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        (TransformerConfig, {**SIZES, "hidden_dropout": 1.0}, "hidden_dropout is 1.0; give less"),
        (TransformerConfig, {**SIZES, "num_layers": 0}, "num_layers is 0; give 1 or more"),
        (TransformerConfig, {**SIZES, "normalization": "x"}, "use 'LayerNorm' or 'RMSNorm'"),
        (TransformerConfig, {**SIZES, "recompute_method": "x"}, "use 'uniform' or 'block'"),
        (TransformerConfig, {**SIZES, "layernorm_epsilon": 0.0}, "give more than 0.0"),
        (OptimizerConfig, {"optimizer": "lion"}, "optimizer 'lion' is unknown; use 'adam' or"),
        (DistributedDataParallelConfig, {"bucket_size": 0}, "bucket_size is 0; give 1 or more"),
    ],
)
def test_limits_hold_in_core_as_on_the_command_line(config, given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        config(**given)


# -- One definition --


def test_every_knob_with_a_section_is_an_argument():
    flags = {field.name for config in SECTIONS.values() for field in dataclasses.fields(config)}
    for config in CORE:
        for field in dataclasses.fields(config):
            about = field.metadata.get("knob")
            if about is not None and about.section is not None:
                assert (about.dest or field.name) in flags, field.name


def test_no_field_of_core_is_written_again():
    """What is written in training.config is read by no configuration of core, under any name."""
    core = {field.name for config in CORE for field in dataclasses.fields(config)}
    for section in SECTIONS.values():
        for field in dataclasses.fields(section):
            assert "core" in field.metadata or field.name not in core, field.name


def test_arguments_reach_the_field_they_are_named_otherwise_in():
    args = parse(
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 5 --seed 7 "
        "--norm-epsilon 1e-6 --ddp-bucket-size 9 --ddp-average-in-collective "
        "--accumulate-allreduce-grads-in-fp32 --clip-grad 0.5 --fp16 --min-lr 1e-4",
        2,
    )
    config = core_transformer_config_from_args(args)
    assert config.num_layers_in_first_pipeline_stage == 5
    assert (config.init_seed, config.layernorm_epsilon, config.fp16) == (7, 1e-6, True)
    ddp = ddp_config_from_args(args)
    assert (ddp.bucket_size, ddp.average_in_collective, ddp.grad_reduce_in_fp32) == (9, True, True)
    assert not ddp.check_for_nan_in_grad  # a dynamic loss scale overflows
    assert ddp_config_from_args(parse()).check_for_nan_in_grad
    optimizer = optimizer_config_from_args(args)
    assert (optimizer.clip_grad, optimizer.fp16, optimizer.min_lr) == (0.5, True, 1e-4)


def test_what_a_checkpoint_must_have_alike():
    always = {name for name, compared in COMPARED.items() if compared is True}
    assert always == {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "group_query_attention",
        "position_embedding_type",
        "normalization",
        "norm_epsilon",
        "qk_layernorm",
        "swiglu",
        "openai_gelu",
        "add_bias_linear",
        "add_qkv_bias",
        "untie_embeddings_and_output_weights",
        "num_experts",
        "moe_layer_freq",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_router_topk",
        "moe_router_score_function",
        "moe_router_pre_softmax",
        "moe_router_topk_scaling_factor",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_enable_expert_bias",
        "mtp_num_layers",
        "bert_binary_head",
        "encoder_num_layers",
        "decoder_num_layers",
        "relative_attention_num_buckets",
        "relative_attention_max_distance",
        "hybrid_override_pattern",
        "mamba_state_dim",
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
    }
    assert {name: unless for name, unless in COMPARED.items() if unless is not True} == {
        "kv_channels": ("kv_channels", None),
        "moe_ffn_hidden_size": ("moe_ffn_hidden_size", None),
        "num_query_groups": ("group_query_attention", False),
        "max_position_embeddings": ("position_embedding_type", "rope"),
        "rotary_base": ("position_embedding_type", "learned_absolute"),
        "rotary_percent": ("position_embedding_type", "learned_absolute"),
        "tokenizer_type": ("finetune", True),
    }


def test_a_section_keeps_the_names_that_checkpoints_have():
    names = {field.name: flag_name(field) for field in dataclasses.fields(ModelConfig)}
    assert names["norm_epsilon"] == "--norm-epsilon" and "layernorm_epsilon" not in names
    assert names["add_bias_linear"] == "--disable-bias-linear"
    assert names["swiglu"] == "--swiglu"
