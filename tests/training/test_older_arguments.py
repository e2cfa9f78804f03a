"""Flags and arguments that texts about Megatron name: taken, or refused with what to do today."""

import re
from functools import partial
from unittest import mock

import pytest
import torch

from minimegatron import pretrain_gpt
from minimegatron.core import parallel_state
from minimegatron.training import devices, training
from minimegatron.training.argument_utils import flags_by_name
from minimegatron.training.arguments import (
    core_transformer_config_from_args,
    parse_args,
)
from minimegatron.training.config import SECTIONS
from minimegatron.training.evaluation import evaluate, evaluate_and_print_results
from minimegatron.training.global_vars import destroy_global_vars
from minimegatron.training.initialize import initialize_megatron
from minimegatron.training.model_setup import get_model
from minimegatron.training.older_arguments import OLDER_ARGUMENTS, VALUES, print_old_flags
from minimegatron.training.params_norm import calc_params_l2_norm
from minimegatron.training.schedule_args import samples_in
from tests.ranks import run_ranks
from tests.training.test_arguments import parse

OF_THE_TEXTS = (
    *("use_cpu_initialization", "mmap_warmup", "no_persist_layer_norm"),
    *("activations_checkpoint_method", "distribute_checkpointed_activations", "adlr_autoresume"),
    *("use_contiguous_buffers_in_local_ddp", "fp16_lm_cross_entropy", "layernorm_epsilon"),
)


def test_names_of_the_texts_are_known():
    assert set(OF_THE_TEXTS) <= OLDER_ARGUMENTS.keys()


@pytest.mark.parametrize("name", OLDER_ARGUMENTS)
def test_an_older_flag_says_what_to_do_today(name):
    flag, advice = f"--{name.replace('_', '-')}", OLDER_ARGUMENTS[name]
    assert name not in {field for config in SECTIONS.values() for field in config.__annotations__}
    for words in (flag, f"{flag} 7", f"{flag}=7"):
        with pytest.raises(ValueError) as refused:
            parse(words)
        assert str(refused.value) == f"{flag}: {advice}"
    if name in VALUES:
        assert getattr(parse(), name) == VALUES[name]
        return
    with pytest.raises(
        AttributeError, match=re.escape(f"no argument is called '{name}'; {advice}")
    ):
        getattr(parse(), name)


def test_advice_names_flags_that_are_there():
    known = set(flags_by_name().values())
    advised = {
        flag for advice in OLDER_ARGUMENTS.values() for flag in re.findall(r"--[\w-]+", advice)
    }
    assert len(advised) > 5 and advised <= known, advised - known


@pytest.mark.parametrize("name", ["iteration", "consumed_train_samples", "skipped_train_samples"])
def test_what_changes_during_a_run_is_pointed_to(name):
    with pytest.raises(AttributeError, match=rf"'{name}'; .*get_train_state\(\)\.{name}"):
        getattr(parse(), name)


def test_a_signal_handler_is_always_there(capsys):
    args = parse("--exit-signal-handler")
    print_old_flags(args)
    assert capsys.readouterr().out.startswith("--exit-signal-handler: SIGTERM saves and ends a run")
    print_old_flags(parse())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--bert-binary-head", "it is on, unless --bert-no-binary-head is given; drop it"),
        (
            "--check-for-nan-in-loss-and-grad",
            "it is on, unless --no-check-for-nan-in-loss-and-grad is given; drop it",
        ),
        ("--virtual-pipeline-model-parallel-size", "today --num-virtual-stages-per-pipeline-rank"),
    ],
)
def test_a_flag_of_an_arguments_name(flag, words):
    with pytest.raises(ValueError) as refused:
        parse(f"{flag} 2")
    assert str(refused.value) == f"{flag}: {words}"


def test_what_a_script_gives_is_read():
    assert (parse().exit_signal_handler, parse().data_impl) == (True, "mmap")
    args = parse("--exit-signal-handler --data-impl mmap")
    assert (args.exit_signal_handler, args.data_impl) == (True, "mmap")


# -- A run's length in samples --


def length(*flags: str) -> tuple[int, int]:
    args = parse_args(argv=[*WITHOUT_LENGTH, *flags])
    return args.train_iters, samples_in(args, args.train_iters)


WITHOUT_LENGTH = [
    word
    for flag in (
        *("--num-layers 2", "--hidden-size 16", "--num-attention-heads 2", "--seq-length 8"),
        *("--max-position-embeddings 8", "--micro-batch-size 2", "--lr 1e-3"),
        "--global-batch-size 8",
    )
    for word in flag.split()
]


@pytest.mark.parametrize(("samples", "iterations"), [(8, 1), (15, 1), (16, 2), (803, 100)])
def test_samples_are_as_many_whole_steps(samples, iterations):
    assert length("--train-samples", str(samples)) == (iterations, 8 * iterations)


@pytest.mark.parametrize("samples", [2, 3, 11, 12, 20, 100])
def test_samples_with_a_ramp_up(samples):
    ramp = ("--rampup-batch-size", "2", "2", "12")
    iterations, used = length("--train-samples", str(samples), *ramp)
    args = parse_args(argv=[*WITHOUT_LENGTH, *ramp, "--train-iters", str(iterations)])
    assert used <= samples < samples_in(args, iterations + 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "--train-iters is missing; give --train-iters and a number, or --train-samples"),
        ("--train-samples 7", "--train-samples 7 is less than one step: its global batch has 8"),
        ("--train-samples 80 --train-iters 9", "--train-samples 80, which are 10 iterations"),
        ("--train-samples 0", "--train-samples is 0"),
    ],
)
def test_a_length_that_cannot_be(flags, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        length(*flags.split())


def test_samples_and_iterations_may_agree():
    assert length("--train-samples", "80", "--train-iters", "10") == (10, 80)


# -- Memory that no tensor uses --


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("is_gpu", [False, True])
def test_unused_memory_is_given_back(level, is_gpu):
    config = core_transformer_config_from_args(parse(f"--empty-unused-memory-level {level}"))
    with (
        mock.patch.object(devices, "device_is_asynchronous", lambda: is_gpu),
        mock.patch.object(torch.cuda, "empty_cache") as empty,
    ):
        for function in config.after_grads_funcs:
            function([], None)
        assert empty.call_count == is_gpu * (level >= 1)
        for function in config.before_step_funcs:
            function([], None)
        assert empty.call_count == is_gpu * level


# -- The norm of all weights --

LAYOUTS = {
    "p=2": "--pipeline-model-parallel-size 2",
    "t=2": "--tensor-model-parallel-size 2",
    "d=2": "--use-distributed-optimizer",
    "two chunks": (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--untie-embeddings-and-output-weights"
    ),
    "experts": "--num-experts 2 --expert-model-parallel-size 2",
}
SERIAL = {"two chunks": "--untie-embeddings-and-output-weights", "experts": "--num-experts 2"}


def norms(layouts):
    """In a rank: the norm by layout, and that of the weights as they lie here."""
    return {layout: _norm(flags) for layout, flags in layouts.items()}


def _norm(flags):
    words = [*WITHOUT_LENGTH, "--train-iters", "1", "--padded-vocab-size", "512", *flags.split()]
    words[words.index("--num-layers") + 1] = "4"
    try:
        with mock.patch("sys.argv", ["program", *words]):
            initialize_megatron(get_embedding_ranks=pretrain_gpt.get_embedding_ranks)
        model = get_model(pretrain_gpt.model_provider)
        here = torch.stack(
            [p.detach().norm() for chunk in model for p in chunk.parameters()]
        ).norm()
        return calc_params_l2_norm(model), here.item()
    finally:
        destroy_global_vars()
        parallel_state.destroy_model_parallel()


def test_the_norm_counts_each_weight_once_in_each_layout():
    (alone,) = run_ranks(norms, 1, {layout: SERIAL.get(layout, "") for layout in LAYOUTS})
    first, second = run_ranks(norms, 2, LAYOUTS)
    for layout in LAYOUTS:
        norm, here = alone[layout]
        assert norm == pytest.approx(here, rel=1e-6) and norm > 1
        assert first[layout][0] == second[layout][0] == pytest.approx(norm, rel=1e-6), layout
        if layout != "d=2":
            assert first[layout][1] != pytest.approx(norm, rel=1e-3), layout


def test_the_norm_is_in_the_log_if_it_is_asked_for():
    for flag in ("", "--log-params-norm"):
        functions = core_transformer_config_from_args(parse(flag)).log_funcs
        assert len(functions) == bool(flag)


# -- Arguments that are left out --

NOTHING = (None,) * 8


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            partial(training.pretrain, *NOTHING[:4], None, None, {}, None, None, None, object()),
            "store is <object",
        ),
        (
            partial(training.pretrain, *NOTHING[:4], inprocess_call_wrapper="mine"),
            "inprocess_call_wrapper is 'mine'",
        ),
        (
            partial(training.train, *NOTHING, {"cache": 1}, None),
            "checkpointing_context is {'cache'",
        ),
        (partial(training.train, *NOTHING, None, None, "other"), "inference_model is 'other'"),
        (partial(evaluate, *NOTHING[:5], False, None, 7), "eval_iters is 7"),
        (partial(initialize_megatron, None, {}, True), "ignore_unknown_args is True"),
    ],
)
def test_a_value_that_is_not_taken_is_one_sentence(call, words):
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        call()
    assert "is Megatron's and not implemented here; leave it at" in str(refused.value)


def test_places_are_megatrons():
    """What the texts' calls give by position arrives under the right name."""
    begun = mock.patch.object(training, "initialize_megatron", side_effect=SystemExit("begun"))
    with begun, pytest.raises(SystemExit, match="begun"):
        training.pretrain(*NOTHING[:4], None, None, {}, None, None, None, None, None)
    seen = {}

    def remembered(*args, **given):
        seen.update(given, by_position=len(args))
        return {}, None

    with mock.patch("minimegatron.training.evaluation.evaluate", remembered):
        evaluate_and_print_results("p", *NOTHING[:3], 3, None, None, True, False, "mine")
    assert seen["non_loss_data_func"] == "mine"
