"""A real GPT whose steps are captured: eager = replay to the bit; what a captured step must not do."""

import contextlib
import io
import re
from argparse import Namespace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron import pretrain_gpt
from minimegatron.core.datasets.utils import DataError
from minimegatron.core.full_cuda_graph import FullCudaGraphWrapper
from minimegatron.core.recorded_graph import HostReadError
from minimegatron.core.rerun_state_machine import RerunStateMachine
from minimegatron.training import captured_step, training
from minimegatron.training.arguments import parse_args
from minimegatron.training.captured_step import check_ranks_of_graph, graph_impl
from minimegatron.training.global_vars import destroy_global_vars
from tests.ranks import run_ranks
from tests.training import short_runs
from tests.training.bad_graph_configs import GRAPH
from tests.training.captured_runs import CAPTURED, EAGER, STEPS, Watched

OPTIONS = {
    "plain": "--eval-iters 2 --split 60,20,20",
    "per token": (
        "--calculate-per-token-loss --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --defer-embedding-wgrad-compute --cuda-graph-warmup-steps 0"
    ),
    "bf16": "--bf16 --use-distributed-optimizer --overlap-grad-reduce",
}


# -- In one rank --


def beside_each_other(options: str) -> dict[str, Any]:
    """An eager and a captured run."""
    eager, captured = Watched(f"{EAGER} {options}"), Watched(f"{CAPTURED} {options}")
    return {
        "different": captured.same_as(eager),
        "losses": (captured.losses, eager.losses),
        "evaluated": (captured.evaluated, eager.evaluated),
        "list that grows": (len(captured.list_that_grows), len(eager.list_that_grows)),
        "replayed": [captured.replayed.index(graph) for graph in captured.replayed],
        "replayed in the eager run": len(eager.replayed),
        "after": captured.after,
    }


def what_is_planted() -> dict[str, str]:
    """What is said of a loss function that is not made for a capture, and goes on all the same."""
    said: dict[str, str] = {}

    def loss_func(loss_mask: Any, output: Any) -> Any:
        found = pretrain_gpt.loss_func(loss_mask, output)
        for name, read in PLANTED.items():
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    read(found[0])
                except HostReadError as error:
                    said[name] = str(error)
        return found

    def forward_step(iterator: Any, model: Any) -> Any:
        output, found = pretrain_gpt.forward_step(iterator, model)
        return output, partial(loss_func, *found.args)

    Watched(CAPTURED, forward_step)
    return said


MACHINE = RerunStateMachine()
PLANTED = {
    "item": lambda loss: loss.item(),
    "print": lambda loss: print(f"loss {loss}"),
    "cpu": lambda loss: loss.cpu(),
    "NaN": lambda loss: MACHINE.validate_result(loss, torch.isnan, "NaN"),
    "spiky": lambda loss: MACHINE.is_unexpectedly_large(loss, 10.0, "loss"),
}


def all_of_it() -> dict[str, Any]:
    """In a rank: an import of the package for each test would take longer than the tests."""
    found = {name: beside_each_other(options) for name, options in OPTIONS.items()}
    return found | {"planted": what_is_planted()}


@pytest.fixture(scope="module")
def found():
    return run_ranks(all_of_it, 1)[0]


# -- What it shows --


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_gradients_and_weights_are_equal_to_the_bit(name, found):
    assert found[name]["different"] == []
    captured, eager = found[name]["losses"]
    assert captured == eager and len(set(captured)) == STEPS


@pytest.mark.parametrize(("name", "warmup"), [("per token", 0), ("bf16", 2)])
def test_a_list_that_python_grows_stops_growing(name, warmup, found):
    """The sign that no Python runs again: 4 microbatches of each eager step, and of the capture."""
    assert found[name]["list that grows"] == (4 * (warmup + 1), 4 * STEPS)


def test_evaluation_has_its_own_graph(found):
    captured, eager = found["plain"]["evaluated"]
    assert captured == eager and len(set(captured)) == STEPS
    # Two batches of each evaluation are replayed from the second on, a training step from the third.
    assert found["plain"]["replayed"] == [0, 0, *(2, 0, 0) * 3]
    assert found["plain"]["replayed in the eager run"] == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("item", r"Tensor.item\(\) in <lambda>, test_captured_step.py:\d+, asks for the number"),
        ("print", r"Tensor.__format__\(\) in <lambda>, test_captured_step.py"),
        ("cpu", r"Tensor.cpu\(\) in <lambda>, test_captured_step.py"),
        ("NaN", r"Tensor.__bool__\(\) in validate_result, rerun_state_machine.py"),
        ("spiky", r"Tensor.__float__\(\) in is_unexpectedly_large, states.py"),
    ],
)
def test_who_reads_a_number_is_named(name, words, found):
    assert re.match(words, found["planted"][name])


def test_a_run_leaves_no_graph_behind(found):
    nothing = dict.fromkeys(("training", "validation"))
    assert found["plain"]["after"] == (nothing, dict.fromkeys(nothing, 0), 0)


# -- Flags --


def parsed(flags: str, **others: Any) -> Any:
    return parse_args(argv=[*short_runs.MODEL.split(), *flags.split()], environ={}, **others)


@pytest.mark.parametrize(
    ("flags", "impl"),
    [
        ("", "none"),
        (GRAPH, "full_iteration"),
        (f"{EAGER} --enable-cuda-graph --cuda-graph-scope full_iteration", "full_iteration"),
        (f"{EAGER} --cuda-graph-impl local --cuda-graph-scope full_iteration", "full_iteration"),
        (f"{GRAPH} --cuda-graph-scope full_iteration", "full_iteration"),
    ],
)
def test_all_three_spellings(flags, impl):
    args = parsed(flags)
    assert args.cuda_graph_impl == impl and args.cuda_graph_warmup_steps == 3


def test_an_empty_scope_is_a_scope():
    with pytest.raises(
        ValueError, match="--cuda-graph-scope is , but here a graph is of a whole step"
    ):
        parse_args(argv=[*short_runs.MODEL.split(), "--cuda-graph-scope", ""], environ={})


def test_hidden_dropout_and_a_constant_loss_scale_may_be():
    assert parsed(f"{GRAPH} --hidden-dropout 0.1 --fp16 --loss-scale 128").cuda_graph_impl


@pytest.mark.parametrize(
    ("impl", "world_size", "device", "backend", "words"),
    [
        ("full_iteration", 4, "cpu", "gloo", "4 processes on CPUs, where"),
        ("full_iteration", 2, "cuda", "gloo", "2 processes over gloo, whose messages"),
        ("full_iteration", 2, "cuda", "nccl", None),
        ("full_iteration", 1, "cuda", "gloo", None),
        ("full_iteration", 1, "cpu", "gloo", None),
        ("none", 4, "cpu", "gloo", None),
    ],
)
def test_ranks_need_a_gpu_each(impl, world_size, device, backend, words):
    args = Namespace(cuda_graph_impl=impl, world_size=world_size)
    may_be = contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=words)
    with may_be:
        check_ranks_of_graph(args, device, backend)


def test_flags_that_say_nothing_of_a_graph_ask_for_none():
    given = {"cuda_graph_impl": "none", "cuda_graph_scope": None, "enable_cuda_graph": False}
    assert graph_impl(Namespace(**given)) == "none"


# -- Results --


def losses_of_five_steps(run: Any) -> list[float]:
    """What `train_step` reports of a model whose loss is the sum of its data."""
    patched = {
        "get_args": lambda: SimpleNamespace(**ARGS),
        "get_num_microbatches": lambda: 2,
        "get_current_global_batch_size": lambda: 2,
        "logical_and_across_model_parallel_group": lambda value: value,
        "reduce_max_stat_across_model_parallel_group": lambda value: value,
        "sum_over_microbatches": lambda reports: {
            "loss": (torch.stack([report["loss"] for report in reports]).sum(), torch.tensor(2))
        },
    }
    optimizer = mock.Mock(step=lambda: (True, 1.0, None))
    source = iter([{"x": torch.tensor([float(number)])} for number in range(10)])
    model = [mock.Mock()]
    with mock.patch.multiple(training, **patched):
        steps = [
            training.train_step(None, source, model, optimizer, mock.Mock(), None, run)
            for _ in range(STEPS)
        ]
    return [float(losses["loss"]) for losses, *_ in steps]


ARGS = {
    "seq_length": 1,
    "micro_batch_size": 1,
    "decoder_seq_length": None,
    "log_num_zeros_in_grad": False,
}


def test_a_step_reads_its_results_before_the_next_call():
    def schedule(**kwargs: Any) -> list:
        batches = kwargs["data_iterator"]
        batches = batches[0] if isinstance(batches, list) else batches
        return [{"loss": next(batches)["x"].sum()} for _ in range(2)]

    try:
        found = losses_of_five_steps(FullCudaGraphWrapper(schedule))
    finally:
        destroy_global_vars()
    assert found == losses_of_five_steps(schedule) == [0.5, 2.5, 4.5, 6.5, 8.5]


# -- Labels --


def test_a_label_that_is_no_token_is_found_as_it_is_read(monkeypatch):
    args = SimpleNamespace(cuda_graph_warmup_steps=0, unpadded_vocab_size=5)
    monkeypatch.setattr(captured_step, "get_args", lambda: args)
    run = captured_step.captured(lambda **kwargs: [])
    labels = torch.tensor([[1, 4]])
    sample = {"labels": labels, "loss_mask": torch.ones(1, 2)}
    call = {"model": "chunk", "num_microbatches": 1, "seq_length": 2, "forward_only": False}
    try:
        run(data_iterator=iter([sample]), **call)
        labels[0, 1] = 5
        with pytest.raises(DataError, match="label 5 where loss_mask is not 0"):
            run(data_iterator=iter([sample]), **call)
        assert FullCudaGraphWrapper.curr_iteration["training"] == 1
    finally:
        destroy_global_vars()
    assert FullCudaGraphWrapper.curr_iteration == {"training": 0, "validation": 0}


def test_a_line_says_what_stands_for_a_gpu(capsys):
    captured_step.describe_graph(parsed(GRAPH))
    captured_step.describe_graph(parsed(""))
    out = capsys.readouterr().out
    assert out.startswith("> no GPU: after 3 steps one is recorded") and out.count("\n") == 1
