"""Every part of the check does on the CPU, in small, what it will do on GPUs.

On a GPU a part can then fail for what the GPU does, and not for what nobody has tried.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from minimegatron.core import utils
from minimegatron.training import training
from tests.gpu import host_syncs, one_gpu
from tests.gpu.parts import PARTS
from tests.gpu.place import Place

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]

STAND_IN = Place("cpu", num_gpus=0, is_quick=True)


TRIED_ELSEWHERE = ("notebooks", "nodes", "peers")
"""On the CPU they do what `test_notebooks`, `test_two_hosts` and the part `gpt2` do; `make test-full`
has them."""


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, id=part.name, marks=[pytest.mark.full] * (part.name in TRIED_ELSEWHERE))
        for part in PARTS
    ],
)
def test_stand_in(part):
    module, _, function = part.run.partition(":")
    run = getattr(importlib.import_module(f"tests.gpu.{module}"), function)
    findings = list(run(STAND_IN))
    assert findings and [finding for finding in findings if not finding.holds] == []


# -- A bare machine --


BARE = """
import importlib, pkgutil, sys
allowed = {"torch", "numpy", "tqdm", "pytest"}
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is not on a bare machine", name=name)
sys.meta_path.insert(0, Blocked())
from tests.gpu.parts import PARTS
assert "torch" not in sys.modules
from tests.gpu import __main__, report
assert "torch" not in sys.modules, "the check itself imports torch"
for module in sorted({part.run.partition(":")[0] for part in PARTS}):
    importlib.import_module(f"tests.gpu.{module}")
from cases import gpu_page
gpu_page.gpu_page(gpu_page.REPORT, gpu_page.planned_parts())
"""

BEYOND_BARE = (
    "hypothesis", "safetensors", "tokenizers", "transformers", "megatron", "matplotlib", "jupytext",
    "nbclient", "nbformat", "nbconvert", "ipyparallel", "IPython", "cloudpickle", "playwright",
    "mkdocs", "yaml", "tensorboard", "xdist", "pytest_timeout",
)  # fmt: skip
"""What the tests' environment has, and a bare machine has not."""


def test_every_part_can_be_imported_on_a_bare_machine():
    """With torch and numpy alone; and the check itself, its report and page without torch."""
    program = f"BLOCKED = {set(BEYOND_BARE)!r}\n{BARE}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_part_in_its_own_process(tmp_path):
    """One stand-in as the check runs it, from the probe to the report."""
    command = [sys.executable, "-m", "tests.gpu", "--rehearse", "--gpus", "1"]
    command += ["--only", "inventory", "--report", str(tmp_path / "report.json")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["machine"]["torch"] == torch.__version__
    states = {entry["name"]: entry["state"] for entry in report["parts"]}
    assert states.pop("inventory") == "holds"
    assert set(states.values()) == {"not run: not asked for"} and len(states) == len(PARTS) - 1


# -- Waits --


@pytest.mark.parametrize("flags", one_gpu.ONE_RANK[2:])
def test_waits_of_one_rank(flags):
    (counts,) = STAND_IN.launch(host_syncs.count_waits, 1, flags, True)
    assert host_syncs.beyond_what_is_allowed(counts) == []
    if "--fp16" in flags:
        assert counts["_unscale_main_grads_and_check_for_nan"] == 1
    else:
        assert counts["check_noted_grads"] == 1 and counts["validate_result"] == 4


@pytest.mark.parametrize(
    "flags, num_chunks",
    [
        (f"--tensor-model-parallel-size 2 --sequence-parallel {one_gpu.RECOMPUTED}", 1),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
    ],
)
def test_waits_where_ranks_share_a_model(flags, num_chunks):
    allowed = host_syncs.SHARED | {"check_noted_grads": num_chunks}
    for counts in STAND_IN.launch(host_syncs.count_waits, 2, flags):
        assert host_syncs.beyond_what_is_allowed(counts, allowed) == []
        assert counts["check_noted_grads"] == num_chunks


def count_with_a_planted_wait(on_meta: bool) -> dict[str, int]:
    """In a rank: each step reads a number more."""
    update = training.get_num_microbatches

    def read_too() -> int:
        torch.ones((), device=utils.get_device()).item()
        return update()

    with mock.patch.object(training, "get_num_microbatches", read_too):
        return host_syncs.count_waits("", on_meta)


@pytest.mark.parametrize("on_meta", [True, False])
def test_a_planted_wait_is_found(on_meta):
    (counts,) = STAND_IN.launch(count_with_a_planted_wait, 1, on_meta)
    (problem,) = host_syncs.beyond_what_is_allowed(counts)
    assert problem == "train_step waits 1 times a step, not 0"


def gradients_that_recompute_changes() -> list[str]:
    """In a rank: what is compared, where recomputing gives other gradients."""

    def gradients(recompute: str | None) -> list[torch.Tensor]:
        return [torch.full((2,), 1.0 if recompute is None else 1.5)]

    with mock.patch.object(one_gpu, "gradients_with_dropout", gradients):
        return one_gpu.recompute_changes_nothing()


def test_gradients_that_recompute_changes_are_found():
    assert gradients_that_recompute_changes() == [
        "full recompute: gradient 0",
        "selective recompute: gradient 0",
    ]
