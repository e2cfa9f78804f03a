"""Every part of the check does on the CPU, in small, what it will do on GPUs.

On a GPU a part can then fail for what the GPU does, and not for what nobody has tried.
"""

from unittest import mock

import pytest

from minimegatron.training import training
from tests.gpu import host_syncs, one_gpu
from tests.gpu.parts import PARTS
from tests.gpu.place import Place
from tests.gpu.report import run_parts

pytestmark = pytest.mark.processes

STAND_IN = Place("cpu", num_gpus=0, is_quick=True)
LONG = {"notebooks", "eight ranks: layouts, bubble, bandwidth"}


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, id=part.title, marks=pytest.mark.full if part.title in LONG else ())
        for part in PARTS
    ],
)
def test_stand_in(part):
    report = run_parts([part._replace(num_gpus=0)], STAND_IN)
    (entry,) = report["parts"]
    assert entry["state"] == "holds", entry["findings"]


def reads_a_number(optimizer):
    """What somebody adds to look at a gradient."""
    return optimizer.param_groups[0]["params"][0].sum().item()


def count_with_a_planted_wait() -> dict[str, int]:
    """In a rank: `zero_grad`, called in each step, reads a number."""
    zero_grads = training._zero_grads

    def zero_and_read(model, optimizer):
        zero_grads(model, optimizer)
        reads_a_number(optimizer)

    with mock.patch.object(training, "_zero_grads", zero_and_read):
        return host_syncs.count_waits()


def test_a_planted_wait_is_found():
    (counts,) = STAND_IN.launch(count_with_a_planted_wait, 1)
    assert len(host_syncs.beyond_what_is_allowed(counts)) == 1


def test_gradients_that_dropout_changes_are_found():
    with mock.patch.object(one_gpu, "small_model", side_effect=AssertionError("planted")):
        report = run_parts([PARTS[2]._replace(num_gpus=0)], STAND_IN)
    assert report["parts"][0]["state"] == "failed"
