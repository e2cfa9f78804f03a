"""An overflow planted on one rank of an fp16 run: all skip that step together, and say so."""

import contextlib
import io
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from minimegatron import pretrain_gpt
from minimegatron.core import parallel_state
from minimegatron.core.dist_checkpointing.core import load_common_state_dict
from minimegatron.core.dist_checkpointing.serialization import load_plain_tensors
from minimegatron.training.checkpoint_folder import get_checkpoint_name
from minimegatron.training.global_vars import destroy_global_vars, get_args, get_train_state
from tests.ranks import run_ranks
from tests.training.short_runs import MODEL, PP2, TP2, ZERO1

FP16 = "--fp16 --initial-loss-scale 1024 --hysteresis 1 --loss-scale-window 2 --train-iters 5"
LOGGED = "--log-interval 1 --save-interval 1"

CASES = [
    # the rank whose gradients overflow, and the layout of four
    (0, f"{TP2} {PP2}"),
    (3, f"{PP2} {ZERO1} --overlap-grad-reduce --overlap-param-gather"),
]


class Overflowing:
    """`pretrain_gpt.forward_step` whose backward is Inf on one rank, in one microbatch of step 3."""

    def __init__(self, rank: int):
        self.rank = rank

    def __call__(self, data_iterator, model):
        output, loss_func = pretrain_gpt.forward_step(data_iterator, model)
        is_here = get_args().rank == self.rank and get_train_state().iteration == 2
        if is_here and model.module.module.current_microbatch == 1:
            output.register_hook(lambda gradient: gradient * math.inf)
        return output, loss_func


def runs(folder: str) -> list[str]:
    """What each run prints on this rank."""
    printed = []
    for number, (culprit, layout) in enumerate(CASES):
        sys.argv = ["test", *f"{MODEL} {FP16} {LOGGED} {layout}".split()]
        sys.argv += ["--save", f"{folder}/{number}"]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            pretrain_gpt.pretrain(
                pretrain_gpt.train_valid_test_datasets_provider,
                pretrain_gpt.model_provider,
                pretrain_gpt.ModelType.encoder_or_decoder,
                Overflowing(culprit),
            )
        printed.append(out.getvalue())
        destroy_global_vars()
        parallel_state.destroy_model_parallel()
    return printed


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("overflow")
    return folder, run_ranks(runs, 4, str(folder), timeout=100)[0]


@pytest.mark.parametrize("number", range(len(CASES)), ids=["tp2 pp2", "pp2 dp2 ZeRO-1"])
def test_all_ranks_skip_together_and_halve_the_scale(finished, number):
    folder = finished[0] / str(number)
    folders = [Path(get_checkpoint_name(folder, iteration)) for iteration in (2, 3, 4)]
    before, skipped, after = (load_plain_tensors(path) for path in folders)
    for name, tensor in before.items():
        if not name.startswith("rng."):
            assert torch.equal(tensor, skipped[name]), name
            assert skipped[name].isfinite().all()
    weight = "model.decoder.layers.0.mlp.linear_fc1.weight"
    assert not torch.equal(before[weight], after[weight])
    commons = [load_common_state_dict(path) for path in folders]
    scales = [common["optimizer"]["grad_scaler"]["scale"] for common in commons]
    assert scales == [2048, 1024, 1024]  # doubled after two good steps, then halved
    assert [common["optimizer"]["step"] for common in commons] == [2, 2, 3]
    assert [common["opt_param_scheduler"]["num_steps"] for common in commons] == [8, 8, 12]
    samples = [common["train_state"]["consumed_train_samples"] for common in commons]
    assert samples == [8, 12, 16]  # the data goes on
    lost = [common["train_state"]["skipped_train_samples"] for common in commons]
    assert lost == [0, 4, 4]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_log_says_so(finished, number):
    lines = re.findall(r"^ iteration (\d)/5 \| (.*)", finished[1][number], re.MULTILINE)
    assert [iteration for iteration, _ in lines] == list("12345")
    assert ["skipped 1" in line for _, line in lines] == [False, False, True, False, False]
    scales = [re.search(r"loss scale (\d+)", line)[1] for _, line in lines]
    assert scales == ["1024", "2048", "1024", "1024", "2048"]
    assert "lm loss" not in lines[2][1] and "lm loss" in lines[3][1]
