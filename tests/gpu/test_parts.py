"""Every part of the check does on the CPU, in small, what it will do on GPUs.

On a GPU a part can then fail for what the GPU does, and not for what nobody has tried.
"""

from unittest import mock

import pytest
import torch

from minimegatron.core import utils
from minimegatron.training import training
from tests.gpu import host_syncs, one_gpu, two_gpus
from tests.gpu.parts import PARTS
from tests.gpu.place import Place
from tests.gpu.report import run_parts

pytestmark = pytest.mark.processes

STAND_IN = Place("cpu", num_gpus=0, is_quick=True)


TRIED_ELSEWHERE = (two_gpus.notebooks,)
"""On the CPU it executes a notebook as `test_notebooks` does. `make test-full` has it."""


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, id=part.title, marks=[pytest.mark.full] * (part.run in TRIED_ELSEWHERE))
        for part in PARTS
    ],
)
def test_stand_in(part):
    report = run_parts([part._replace(num_gpus=0)], STAND_IN)
    (entry,) = report["parts"]
    assert entry["state"] == "holds", entry["findings"]


@pytest.mark.parametrize("flags", one_gpu.ONE_RANK[2:])
def test_waits_of_one_rank(flags):
    (counts,) = STAND_IN.launch(host_syncs.count_waits, 1, flags, True)
    assert host_syncs.beyond_what_is_allowed(counts) == []
    if "--fp16" in flags:
        assert counts["_unscale_main_grads_and_check_for_nan"] == 1
    else:
        assert counts["check_grads"] == 1 and counts["validate_result"] == 4


@pytest.mark.parametrize(
    "flags, num_chunks",
    [
        (f"--tensor-model-parallel-size 2 --sequence-parallel {one_gpu.RECOMPUTED}", 1),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
    ],
)
def test_waits_where_ranks_share_a_model(flags, num_chunks):
    allowed = host_syncs.SHARED | {"check_grads": num_chunks}
    for counts in STAND_IN.launch(host_syncs.count_waits, 2, flags):
        assert host_syncs.beyond_what_is_allowed(counts, allowed) == []
        assert counts["check_grads"] == num_chunks


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
