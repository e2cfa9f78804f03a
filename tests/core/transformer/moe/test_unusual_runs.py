"""Training with experts in ways that seldom meet: 16 bits, an overflow, a step that fails, a resume.

One start of four ranks: runs from the command line's flags, and steps that fail.
"""

import contextlib
import io
import math
import re
import sys
from functools import partial
from unittest import mock

import pytest

from minimegatron import pretrain_gpt
from minimegatron.core import parallel_state
from minimegatron.core.transformer.moe.experts import SequentialMLP
from minimegatron.training.global_vars import destroy_global_vars, get_args, get_train_state
from tests import test_failed_step
from tests.asked import asked_for, asks_for
from tests.figures import figure
from tests.parity import Case, reference
from tests.ranks import has_shared_memory, run_ranks
from tests.training.short_runs import MODEL, PP2, TP2, VP2, ZERO1, little_text, run
from tests.training.test_overflow import FP16

PAIRS = "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
LOSSES = "--moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.001"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
OVERLAP = f"{ZERO1} --overlap-grad-reduce --overlap-param-gather"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SP = f"{TP2} --sequence-parallel --expert-tensor-parallel-size 1"
SURE = "--hidden-dropout 0 --attention-dropout 0"
JITTER = f"{PAIRS} {LOSSES} --moe-input-jitter-eps 0.1"
FIRST = f"{PAIRS} {LOSSES} {SURE} --moe-layer-freq 1 0 0 0"
HALF = f"{PAIRS} {BIAS} {SURE} --bf16"

SAME: dict[str, tuple[float, list[str]]] = {
    "jitter and dropout": (1e-6, [JITTER, f"{JITTER} {FULL}"]),
    "jitter and dropout over tensor ranks": (
        1e-6,
        [f"{JITTER} {SP} --delay-wgrad-compute", f"{JITTER} {SP} {FULL}"],
    ),
    "bf16": (5e-3, [HALF, f"{HALF} {OVERLAP} {FULL} --moe-router-dtype fp32", f"{HALF} {SP}"]),
    "a stage, or chunks, without experts; tied": (
        1e-4,
        [FIRST, f"{FIRST} {PP2} {OVERLAP}", f"{FIRST} {PP2} {VP2} --delay-wgrad-compute"],
    ),
}
"""By what is special: runs that must have the same losses, and how far off they may be."""
SAVED = f"{HALF} {OVERLAP}"
RESUMED = (
    f"{HALF} {OVERLAP}",
    f"{HALF} --expert-model-parallel-size 4 {FULL}",
    f"{HALF} {SP} --expert-model-parallel-size 1 --moe-token-dispatcher-type allgather",
)
FAILS = Case(
    pp=2,
    vp=2,
    G=2,
    M=4,
    dp=2,
    batched=False,
    overlap=True,
    dist_opt=True,
    experts=4,
    ep=2,
    num_layers=4,
    balance="bias",
)


class OverflowingExpert:
    """`pretrain_gpt.forward_step`; in step 3 the gradient of one expert is Inf, on one rank."""

    def __init__(self):
        self.hook = None

    def __call__(self, data_iterator, model):
        is_here = get_args().rank == 3 and get_train_state().iteration == 2
        if self.hook is None and is_here:
            experts = next(part for part in model.modules() if isinstance(part, SequentialMLP))
            weight = experts.local_experts[0].linear_fc2.weight
            self.hook = weight.register_hook(lambda gradient: gradient * math.inf)
        elif self.hook is not None and not is_here:
            self.hook.remove()
        return pretrain_gpt.forward_step(data_iterator, model)


def overflow() -> str:
    """What the run prints."""
    sys.argv = ["test", *f"{MODEL} {FP16} --log-interval 1 {PAIRS} {LOSSES} {OVERLAP}".split()]
    with little_text(), contextlib.redirect_stdout(io.StringIO()) as out:
        pretrain_gpt.pretrain(
            pretrain_gpt.train_valid_test_datasets_provider,
            pretrain_gpt.model_provider,
            pretrain_gpt.ModelType.encoder_or_decoder,
            OverflowingExpert(),
        )
    destroy_global_vars()
    parallel_state.destroy_model_parallel()
    return out.getvalue()


def resumed(folder: str) -> list[list[float]]:
    """Steps 3 and 4 without a break, and after a resume in each layout."""
    run(f"{SAVED} --save {folder}", 2)
    found = [run(SAVED, 4)["losses"][2:]]
    return found + [run(f"{flags} --load {folder}", 4)["losses"] for flags in RESUMED]


def fail(path: str) -> list[str]:
    """After each failure, what was wrong in the good step that follows."""
    initialize = parallel_state.initialize_model_parallel
    with mock.patch.object(
        parallel_state,
        "initialize_model_parallel",
        lambda *sizes: initialize(*sizes, expert_model_parallel_size=FAILS.ep),
    ):
        planned = test_failed_step.failures(FAILS, every=False)
        return test_failed_step.fail_and_recover(FAILS, path, planned)[1]


def all_runs(names: list[str], folder: str, path: str) -> dict:
    """By name; those of `SAME` and those of the tests below."""
    others = {
        "overflow": overflow,
        "resumed": partial(resumed, folder),
        "failed": partial(fail, path),
    }
    return {
        name: others[name]() if name in others else [run(f, 3)["losses"] for f in SAME[name][1]]
        for name in names
    }


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory) -> list[dict]:
    """By rank, what the tests of this session ask for."""
    wanted = asked_for(request, "test_the_same_losses", "name")
    if asks_for(request, "test_all_ranks_skip_a_step_in_which_one_expert_overflows"):
        wanted.append("overflow")
    if asks_for(request, "test_resumed_in_another_layout"):
        wanted.append("resumed")
    # Over gloo a rank cannot tell the others that it has failed.
    if asks_for(request, "test_a_good_step_follows_a_failed_one") and has_shared_memory():
        wanted.append("failed")
    folder = tmp_path_factory.mktemp("runs")
    path = reference(FAILS.serial(), folder)
    return run_ranks(all_runs, 4, wanted, str(folder / "saved"), path, timeout=250)


def worst(runs: list[list[float]]) -> float:
    first, *others = runs
    return max(abs(a - b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", SAME)
def test_the_same_losses(ranks, name):
    limit, _ = SAME[name]
    for found in ranks:
        assert worst(found[name]) < limit, found[name]
        assert found[name][0][-1] < found[name][0][0]
    figure(f"{name}: {worst(ranks[0][name]):.1e}")


def test_resumed_in_another_layout(ranks):
    assert all(worst(found["resumed"]) < 5e-3 for found in ranks), ranks[0]["resumed"]


def test_all_ranks_skip_a_step_in_which_one_expert_overflows(ranks):
    lines = re.findall(r"^ iteration (\d)/5 \| (.*)", ranks[0]["overflow"], re.MULTILINE)
    assert ["skipped 1" in line for _, line in lines] == [False, False, True, False, False]
    scales = [re.search(r"loss scale (\d+)", line)[1] for _, line in lines]
    assert scales == ["1024", "2048", "1024", "1024", "2048"]
    losses = [float(re.search(r"lm loss ([\d.]+)", line)[1]) for i, line in lines if i != "3"]
    assert losses == sorted(losses, reverse=True)
    assert all("load imbalance" in line for i, line in lines if i != "3")


@pytest.mark.skipif(not has_shared_memory(), reason="gloo's ranks wait for the time-out")
def test_a_good_step_follows_a_failed_one(ranks):
    assert [problem for found in ranks for problem in found["failed"]] == []
