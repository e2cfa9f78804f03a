"""Mamba in a run: checkpoints from layout to layout, whose sections are cut anew; 16 bits; a sample."""

import contextlib
import io
import sys
from functools import partial
from unittest import mock

import pytest

from minimegatron import pretrain_gpt, pretrain_mamba
from minimegatron.training.global_vars import destroy_global_vars
from tests.parity import Case
from tests.ranks import run_ranks
from tests.training.short_runs import MODEL, PP2, TP2, ZERO1, little_text, run
from tests.training.test_expert_checkpoints import from_one_to_each

# -- To the bit, over four ranks --

SAME = {"model": "mamba", "num_layers": 2, "pattern": "*M"}
SAVED_BY = Case(tp=2, pp=2, sp=True, M=4, **SAME)
LAYOUTS = [
    Case(dp=4, M=1, dist_opt=True, **SAME),
    Case(tp=4, M=4, **SAME),
]


def test_saved_by_one_layout_and_loaded_by_another(tmp_path):
    names = run_ranks(partial(from_one_to_each, SAVED_BY, LAYOUTS), 4, str(tmp_path), timeout=120)[
        0
    ]
    for part in ("A_log", "in_proj.weight", "conv1d.weight"):
        name = f"decoder.layers.1.mixer.{part}"
        assert {f"model.{name}", f"optimizer.state.exp_avg.{name}"} <= set(names)


# -- Through the program --

SIZES = (
    "--hybrid-override-pattern M*M- --mamba-num-groups 2 --mamba-head-dim 4 --mamba-state-dim 8 "
    "--hidden-dropout 0 --attention-dropout 0"
)
FP16 = "--fp16 --initial-loss-scale 1024"


def runs(folder: str) -> dict[str, list[float]]:
    """Losses of four steps; in the last runs a checkpoint and another layout lie between."""
    with mock.patch.object(pretrain_gpt, "model_provider", pretrain_mamba.model_provider):
        found = {"copies": run(SIZES, 4)["losses"]}
        first = run(f"{SIZES} {TP2} --sequence-parallel --save {folder}/wide", 2)["losses"]
        for layout in (f"{PP2} --pipeline-schedule gpipe", ZERO1):
            found[layout] = first + run(f"{SIZES} {layout} --load {folder}/wide", 4)["losses"]
        for kind in ("--bf16", FP16):
            first = run(f"{SIZES} {kind} {TP2} --save {folder}/{kind[2:6]}", 2)["losses"]
            rest = run(f"{SIZES} {kind} {ZERO1} --load {folder}/{kind[2:6]}", 4)["losses"]
            found[kind] = first + rest
    return found


def test_runs_of_any_layout_have_the_same_losses(tmp_path):
    for found in run_ranks(partial(runs, str(tmp_path)), 2, timeout=120):
        wanted = found["copies"]
        assert len(wanted) == 4 and wanted[3] < wanted[0] - 0.1
        for name, losses in found.items():
            tolerance = 2e-2 if "16" in name else 2e-5
            assert losses == pytest.approx(wanted, abs=tolerance), name


def the_program() -> str:
    """What a whole run prints."""
    flags = f"{SIZES} {PP2} --train-iters 2 --eval-iters 1 --sample-tokens 3 --split 8,1,1"
    sys.argv = ["test", *MODEL.split(), *flags.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out, little_text():
        pretrain_mamba.main()
    destroy_global_vars()
    return out.getvalue()


def test_the_program_trains_and_writes_a_sample():
    printed = "".join(run_ranks(the_program, 2, timeout=120))
    assert "validation loss at iteration 2" in printed
    assert printed.partition("a sample of what the model writes:\n\n")[2].startswith("def ")
