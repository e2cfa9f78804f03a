"""From command line to frozen dataclasses."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from minimegatron import training
from minimegatron.__main__ import main
from minimegatron.core.num_microbatches_calculator import _build_num_microbatches_calculator
from minimegatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from minimegatron.training import global_vars
from minimegatron.training.argument_utils import (
    ArgumentGroupFactory,
    OneLineParser,
    flag_name,
    in_flags,
)
from minimegatron.training.arguments import (
    core_transformer_config_from_args,
    parse_args,
    validate_args,
)
from minimegatron.training.checkpoint_folder import (
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
)
from minimegatron.training.config import SECTIONS, Arguments
from minimegatron.training.pipeline_schedule import pipeline_placement
from minimegatron.training.schedule_args import _NoOptimizer, samples_in, schedule_settings
from minimegatron.training.tokenizer.tokenizer import _vocab_size_with_padding, build_tokenizer
from tests.training.bad_configs import GOOD, USER_ORDERS
from tests.training.test_bad_configs import launcher_environment


def parse(flags: str = "", world_size: int = 1, **kwargs) -> Arguments:
    argv = [word for pair in GOOD.items() for word in pair] + flags.split()
    return parse_args(argv=argv, environ=launcher_environment(0, world_size), **kwargs)


def all_fields() -> list[dataclasses.Field]:
    return [field for config in SECTIONS.values() for field in dataclasses.fields(config)]


def test_no_name_occurs_twice():
    names = [field.name for field in all_fields()]
    assert len(names) == len(set(names))
    assert not set(names) & set(SECTIONS), "args.x would be a section and a field"


def test_every_flag_explains_itself():
    for config in SECTIONS.values():
        for field in dataclasses.fields(config):
            assert ArgumentGroupFactory(config).help(field).endswith("."), field.name


def test_flags_have_megatrons_names():
    names = {flag_name(field) for field in all_fields() if not field.metadata["knob"].is_derived}
    assert names >= {
        "--tensor-model-parallel-size",
        "--num-layers-per-virtual-pipeline-stage",
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "--group-query-attention",
        "--untie-embeddings-and-output-weights",
        "--disable-bias-linear",
        "--overlap-p2p-communication",
        "--DDP-impl",
        "--use-distributed-optimizer",
        "--data-path",
        "--lr-warmup-fraction",
        "--global-batch-size",
    }


def test_help_ends_well(capsys):
    with pytest.raises(SystemExit) as ending:
        parse("--help")
    assert ending.value.code == 0
    assert "--pipeline-model-parallel-size" in capsys.readouterr().out


def test_arguments_are_frozen():
    args = parse()
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.training.train_iters = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.train_iters = 5


def test_flat_names_find_their_section():
    args = parse("--seed 7")
    assert args.seed == args.rng.seed == 7
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = args.no_such_thing


def test_users_own_flags_and_defaults():
    def add(parser):
        parser.add_argument("--colour", default="red")

    args = parse("--seed 7", extra_args_provider=add, args_defaults={"seed": 5, "eval_iters": 3})
    assert (args.colour, args.extra) == ("red", {"colour": "red"})
    assert args.seed == 7  # a flag beats args_defaults
    assert parse("--clip-grad 2", args_defaults={"min_lr": 1e-4}).min_lr == 1e-4
    with pytest.raises(ValueError, match="Arguments has no field 'min_lrs'; did you mean 'min_lr'"):
        parse(args_defaults={"min_lrs": 1e-4})


def test_what_follows_from_other_arguments():
    args = parse(world_size=4)
    assert args.data_parallel_size == 4
    assert args.ffn_hidden_size == 256
    assert args.padded_vocab_size == 384
    assert args.lr_decay_iters == args.train_iters
    assert args.start_weight_decay == args.end_weight_decay == args.weight_decay
    assert args.overlap_p2p_comm is False
    assert parse("--swiglu --hidden-size 96").ffn_hidden_size == 256
    assert parse("--tensor-model-parallel-size 2", 2).padded_vocab_size == 512
    assert parse("--bf16").accumulate_allreduce_grads_in_fp32
    assert not parse("--fp16").check_for_nan_in_loss_and_grad


def test_chunks_from_either_flag():
    pp4 = "--pipeline-model-parallel-size 4"
    for flags in (
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-layers-per-virtual-pipeline-stage 1",
        "--pipeline-model-parallel-layout Et|t|t|t|t|t|t|tL",
    ):
        args = parse(f"{pp4} {flags}", 4)
        assert args.virtual_pipeline_model_parallel_size == 2, flags
        assert args.overlap_p2p_comm is True  # the default where chunks interleave
    args = parse(
        f"{pp4} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication", 4
    )
    assert args.overlap_p2p_comm is False
    one_chunk = parse(f"{pp4} --num-virtual-stages-per-pipeline-rank 1", 4)
    assert one_chunk.virtual_pipeline_model_parallel_size is None


def test_the_schedule_says_how_many_chunks_there_are():
    args = parse("--pipeline-model-parallel-size 4", 4)
    assert args.pipeline_schedule is None and pipeline_placement(args) is None
    for text, pp, chunks, name, stages in (
        (f"{USER_ORDERS}:down_and_up", 4, 2, "down-and-up", (0, 7)),
        ("down-and-up", 2, 2, "down-and-up", (0, 3)),  # as the file has registered it
        ("gpipe", 4, None, "gpipe", (0,)),
        ("1f1b", 4, None, "1f1b", (0,)),
        ("breadth-first", 4, None, "breadth-first", (0,)),
        ("breadth-first --num-virtual-stages-per-pipeline-rank 2", 4, 2, "breadth-first", (0, 4)),
        ("interleaved --num-layers-per-virtual-pipeline-stage 1", 4, 2, "interleaved", (0, 4)),
        ("no-pipelining", 1, None, "no-pipelining", (0,)),
    ):
        args = parse(f"--pipeline-model-parallel-size {pp} --pipeline-schedule {text}", pp)
        assert (args.pipeline_schedule, args.virtual_pipeline_model_parallel_size) == (name, chunks)
        assert pipeline_placement(args).stages[0] == stages
        assert core_transformer_config_from_args(args).pipeline_schedule == name
    # Groups of microbatches are a matter of interleaving alone.
    args = parse(
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
        "--global-batch-size 5 --pipeline-schedule breadth-first",
        4,
    )
    assert args.overlap_p2p_comm


def test_a_file_may_be_planned_and_then_run_by_one_process(capsys, tmp_path):
    """As a notebook does. A second file may use the same name, too."""
    other = tmp_path / "other.py"
    other.write_text(USER_ORDERS.read_text())
    for path in (USER_ORDERS, other):
        assert (
            main(["plan", "--pp", "2", "--microbatches", "4", "--user-schedule", f"{path}:fold"])
            == 0
        )
        flags = f"--pipeline-model-parallel-size 2 --pipeline-schedule {path}:fold"
        assert parse(flags, 2).pipeline_schedule == "fold"
    assert capsys.readouterr().out.count("fold, 2 stages") == 2


def test_configuration_for_core():
    config = core_transformer_config_from_args(
        parse(
            "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 4 "
            "--norm-epsilon 1e-6 --bf16 --seed 99 --calculate-per-token-loss "
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
            4,
        )
    )
    assert config.gated_linear_unit and config.activation_func is F.silu
    assert not config.add_bias_linear
    assert (config.num_query_groups, config.layernorm_epsilon, config.init_seed) == (4, 1e-6, 99)
    assert config.params_dtype is config.pipeline_dtype is torch.bfloat16
    assert config.overlap_p2p_comm and not config.batch_p2p_comm
    assert config.calculate_per_token_loss
    plain = core_transformer_config_from_args(parse())
    assert plain.activation_func is F.gelu
    assert plain.num_query_groups == plain.num_attention_heads


def test_a_vocabulary_without_text():
    args = parse(
        "--tokenizer-type NullTokenizer --vocab-size 1000 --make-vocab-size-divisible-by 8"
    )
    assert args.padded_vocab_size == 1008 == _vocab_size_with_padding(1001, args, False)
    assert build_tokenizer(args).eod == 1000


def test_a_vocabulary_of_word_pieces_is_padded_for_all_ranks():
    pytest.importorskip("tokenizers")
    word_pieces = "--tokenizer-type BertWordPieceLowerCase"
    for sentinels, world_size, rows in ((0, 1, 2048), (0, 2, 2048), (40, 1, 2176), (40, 2, 2304)):
        args = parse(
            f"{word_pieces} --vocab-extra-ids {sentinels} "
            f"--tensor-model-parallel-size {world_size}",
            world_size,
            args_defaults={"model_family": "t5" if sentinels else "bert"},
        )
        assert args.padded_vocab_size == rows


def test_checking_again_changes_nothing():
    """Programs for Megatron check what they have parsed; here parsing has."""
    args = parse()
    assert validate_args(args) is validate_args(args, {}) is args
    with pytest.raises(ValueError, match="ignore_unknown_args is True, but it is Megatron's"):
        parse(ignore_unknown_args=True)


def test_what_a_program_of_its_own_asks_for(monkeypatch):
    monkeypatch.setattr(global_vars, "_globals", global_vars._Globals())
    with pytest.raises(RuntimeError, match="args is not set yet; call pretrain or"):
        training.get_args()
    global_vars.set_args("mine")
    assert training.get_args() == "mine" and global_vars.get_train_state().iteration == 0
    with pytest.raises(RuntimeError, match="tokenizer is not set yet"):
        training.get_tokenizer()
    with pytest.raises(RuntimeError, match="called twice"):
        global_vars.set_global_variables(parse())
    writers = (
        "get_tensorboard_writer",
        "get_wandb_writer",
        "get_one_logger",
        "get_adlr_autoresume",
    )
    assert [getattr(training, name)() for name in writers] == [None] * 4


def test_where_a_checkpoint_is():
    name = get_checkpoint_name("save", 100, False, return_base_dir=True)
    assert name == "save/iter_0000100" == get_checkpoint_name("save", 100)
    assert get_checkpoint_tracker_filename("save") == "save/latest_checkpointed_iteration.txt"
    with pytest.raises(ValueError, match="release is True, but it is Megatron's"):
        get_checkpoint_name("save", 100, True)


def test_cores_words_become_flags():
    assert in_flags("num_layers 6 and hidden_size 5") == "--num-layers 6 and --hidden-size 5"
    assert in_flags("set microbatch_group_size_per_vp_stage") == (
        "set --microbatch-group-size-per-virtual-pipeline-stage"
    )
    assert in_flags("no such_name, --num-layers") == "no such_name, --num-layers"


def test_one_line_parser_never_exits():
    with pytest.raises(ValueError, match="expected one argument"):
        parser = OneLineParser()
        parser.add_argument("--x")
        parser.parse_args(["--x"])


# -- A schedule of iterations beside a batch that grows --

RAMPS = ("4 4 30", "2 2 8", "1 1 10", "8 8 0", "16 1 50", "4 4 1000000000", "15 1 7")


@pytest.mark.parametrize("ramp", RAMPS)
def test_s15_a_schedule_of_iterations_ends_at_its_iteration(ramp):
    """Was: at the samples of a batch that did not ramp up, so the last steps had not decayed."""
    args = parse(f"--rampup-batch-size {ramp}")
    sizes = (args.global_batch_size, args.micro_batch_size, args.data_parallel_size)
    calculator = _build_num_microbatches_calculator(1, args.rampup_batch_size, *sizes, False)
    consumed, schedule = 0, OptimizerParamScheduler(_NoOptimizer(), **schedule_settings(args))
    for iteration in range(20):
        assert samples_in(args, iteration) == consumed
        calculator.update(consumed, consistency_check=True)
        size = calculator.get_current_global_batch_size()
        consumed += size
        if iteration < 10:  # GOOD has 10 steps, and a linear decay to 0
            assert schedule.get_lr({"max_lr": args.lr}) > 0.0
            schedule.step(increment=size)
    assert schedule.get_lr({"max_lr": args.lr}) == 0.0


def test_s15_without_a_ramp_steps_are_iterations_times_batch():
    args = parse(
        "--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2 --lr-decay-iters 7"
    )
    found = schedule_settings(args)
    names = ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps", "wsd_decay_steps")
    assert [found[name] for name in names] == [16 * iters for iters in (2, 7, 10, 3)]
