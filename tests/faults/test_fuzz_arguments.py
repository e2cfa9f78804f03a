"""Any command line either works or ends in one line that names a flag: never in a traceback.

Hypothesis draws flags and values, sensible and not; the same ones in every run. What is accepted is
then held to its word: all that needs no processes is built from it, the first and last stage of the
model too.
"""

import dataclasses
import os
import typing
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.core.distributed import DistributedDataParallelConfig
from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from minimegatron.core.optimizer import OptimizerConfig
from minimegatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training.argument_utils import _without_none, flag_name, flags_by_name
from minimegatron.training.arguments import (
    core_transformer_config_from_args,
    ddp_config_from_args,
    optimizer_config_from_args,
    parse_args,
)
from minimegatron.training.config import SECTIONS, Arguments
from minimegatron.training.schedule_args import _NoOptimizer, schedule_settings
from tests.groups import PretendGroup, pretend_groups
from tests.training.bad_configs import BAD_CONFIGS, GOOD
from tests.training.test_bad_configs import launcher_environment

# -- Any flag with any value --

INTEGERS = ["1", "2", "3", "4", "8", "16", "0", "-1", "x", "1.5", "99999999999"]
FLOATS = ["0", "0.1", "0.5", "1", "1e-4", "1e9", "-1", "nan", "inf", "x"]
WORDS = ["", "x", "949,50,1", "1", "Et*4|t*4L", "{folder}", "/proc/x", "-", "é|t"]


def _values(annotation: typing.Any, nargs: int | str | None) -> st.SearchStrategy[list[str]]:
    if typing.get_origin(annotation) is list:
        of_one = INTEGERS if typing.get_args(annotation)[0] is int else WORDS
        size = {"min_size": nargs, "max_size": nargs} if nargs == 3 else {"max_size": 4}
        return st.lists(st.sampled_from(of_one), **size)
    if typing.get_origin(annotation) is typing.Literal:
        choices = [str(choice) for choice in typing.get_args(annotation)]
    else:
        choices = {int: INTEGERS, float: FLOATS, str: WORDS}[annotation]
    return st.sampled_from([*choices, *choices, "nonsense"]).map(lambda word: [word])


def _flags() -> list[st.SearchStrategy[list[str]]]:
    """For every field of the configuration, its flag with some value."""
    strategies = []
    for config in SECTIONS.values():
        types = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if field.metadata["knob"].is_derived:
                continue
            annotation = _without_none(types[field.name])
            flag = flag_name(field)
            if annotation is bool:
                spellings = (
                    [flag, flag.replace("--", "--no-", 1)] if field.default is None else [flag]
                )
                strategies.append(st.sampled_from([[spelling] for spelling in spellings]))
            else:
                values = _values(annotation, field.metadata["knob"].nargs)
                strategies.append(values.map(lambda words, flag=flag: [flag, *words]))
    return strategies


ANY_FLAG = st.one_of(_flags())
MISSPELT = ANY_FLAG.map(lambda words: [words[0][:-1], *words[1:]])
FROM_A_BAD_ROW = st.sampled_from(BAD_CONFIGS).map(lambda row: row.flags.split())


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[list[str], int]:
    """`GOOD` with up to five flags more, and a number of processes."""
    flags = draw(st.lists(ANY_FLAG, min_size=1, max_size=5))
    if draw(st.integers(0, 9)) == 0:
        flags.append(draw(st.one_of(MISSPELT, FROM_A_BAD_ROW)))
    argv = [word for pair in GOOD.items() for word in pair]
    return argv + [word for words in flags for word in words], draw(st.sampled_from([1, 2, 4, 8]))


# -- What must become of it --


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory):
    """Folders named by accident are made there."""
    before, folder = os.getcwd(), tmp_path_factory.mktemp("fuzz")
    os.chdir(folder)
    yield
    os.chdir(before)


def check_refusal(message: str) -> None:
    lines = message.splitlines()
    assert len(lines) == 1 or ("pipeline-model-parallel-layout" in lines[0] and len(lines) == 3)
    assert "--" in lines[0], "no flag is named"
    for name, flag in flags_by_name().items():
        if "_" in name and name not in flag:
            assert f" {name} " not in lines[0], "a field is named instead of its flag"


def check_promise(args: Arguments) -> None:
    """Nothing that is made of accepted arguments refuses them later."""
    assert isinstance(ddp_config_from_args(args), DistributedDataParallelConfig)
    assert isinstance(optimizer_config_from_args(args), OptimizerConfig)
    OptimizerParamScheduler(_NoOptimizer(), **schedule_settings(args))
    sizes = (args.global_batch_size, args.micro_batch_size, args.data_parallel_size)
    init_num_microbatches_calculator(1, args.rampup_batch_size, *sizes)
    assert get_num_microbatches() >= 1
    unset_num_microbatches_calculator()
    config = core_transformer_config_from_args(args)
    v, p = args.virtual_pipeline_model_parallel_size, args.pipeline_model_parallel_size
    with torch.device("meta"):
        for chunk, rank in {(0, 0), ((v or 1) - 1, p - 1)}:
            vp_stage = None if v is None else chunk
            first, last = (chunk, rank) == (0, 0), (chunk, rank) == ((v or 1) - 1, p - 1)
            spec = get_gpt_decoder_block_spec(config, vp_stage=vp_stage, pp_rank=rank)
            GPTModel(
                config,
                spec,
                args.padded_vocab_size,
                args.max_position_embeddings,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                rotary_percent=args.rotary_percent,
                rotary_base=args.rotary_base,
                mtp_block_spec=get_gpt_mtp_block_spec(
                    config, spec, vp_stage=vp_stage, pp_rank=rank
                ),
                vp_stage=vp_stage,
                pg_collection=pretend_groups(
                    0, args.tensor_model_parallel_size, rank, p, **other_groups(config)
                ),
            )


def other_groups(config: TransformerConfig) -> dict[str, PretendGroup]:
    """What experts, shared sequences and further tokens ask for; else tp and pp are enough."""
    c, ep, etp = (
        config.context_parallel_size,
        config.expert_model_parallel_size,
        config.expert_tensor_parallel_size,
    )
    if config.num_moe_experts is None and config.mtp_num_layers is None and c == 1:
        return {}
    sizes = {"ep": ep, "expt_tp": etp, "tp_ep": ep * etp, "cp": c, "dp_cp": c}
    sizes |= dict.fromkeys(("dp", "expt_dp"), 1)
    sizes |= dict.fromkeys(("tp_cp", "tp_dp_cp"), c * config.tensor_model_parallel_size)
    return {name: PretendGroup(0, size) for name, size in sizes.items()}


def test_works_or_is_refused_in_one_line():
    met = Counter(accepted=0, refused=0)

    @given(command_lines())
    @settings(max_examples=200, deadline=None)
    def try_one(case):
        argv, world_size = case
        argv = [word.format(folder=os.getcwd()) for word in argv]
        try:
            args = parse_args(argv=argv, environ=launcher_environment(0, world_size))
        except ValueError as refusal:
            met["refused"] += 1
            check_refusal(str(refusal))
        else:
            met["accepted"] += 1
            check_promise(args)

    try_one()
    assert min(met.values()) > 20, met
