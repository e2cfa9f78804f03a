"""What uses `torch.distributed` runs over "cpu:shm" as over "gloo", and gets the same numbers.

The programs are in `copies` and `cuts`; only the name of the backend differs. Two ranks get the same
bits, because a sum of two has one order. With more, gloo may add in another order.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import minimegatron.backend  # noqa: F401  its import makes "shm" known to torch
from tests.backend import copies, cuts
from tests.ranks import run_ranks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GLOO, SHM = "gloo", "cpu:shm"

COPIES = [
    copies.ddp,
    copies.ddp_of_many_buckets,
    copies.ddp_of_a_static_graph,
    copies.ddp_that_finds_unused_parameters,
    copies.ddp_that_sends_one_time_in_two,
    copies.ddp_that_sends_half_precision,
    copies.ddp_with_a_hook,
    copies.ddp_of_uneven_inputs,
    copies.zero_redundancy_optimizer,
]
PROGRAMS = [
    *COPIES,
    copies.fsdp_1,
    copies.fsdp_2,
    copies.fsdp_2_of_mixed_precision,
    copies.fsdp_2_of_copies,
    copies.checkpoint,
    copies.checkpoint_beside_training,
    copies.checkpoint_for_half_of_the_ranks,
    cuts.pipeline_1f1b,
    cuts.pipeline_gpipe,
    cuts.pipeline_interleaved,
    cuts.pipeline_zero_bubble,
    cuts.tensor_parallel,
    cuts.sequence_parallel,
    cuts.distributed_tensors,
    cuts.mesh_of_two_dimensions,
    cuts.functional_collectives,
    cuts.differentiable_collectives,
    cuts.messages_and_objects,
    cuts.small_beside_large,
    cuts.groups_of_some_ranks,
]
SHM_ALONE = [copies.ddp_that_sends_low_ranks]
"""With gloo, some of these ranks end by SIGABRT: its own thread is the last to hold the group."""
SIZES = (2, 4)
TOLERANCE = {
    copies.ddp_that_sends_half_precision: 1e-2,
    copies.fsdp_2_of_mixed_precision: 1e-2,
}
"""On four ranks: what is rounded to 16 bits may be rounded another way after another order."""

Result = dict[str, list[torch.Tensor]]
"""By backend."""


def run_all(folder: Path) -> dict[str, Result | str]:
    """On a rank: every program over both backends, each in a default group of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    warnings.simplefilter("ignore")  # torch finds some of its names old, which are in 2.9 already
    return {
        program.__name__: run_over_both(program, folder, rank, size)
        for program in [*PROGRAMS, *SHM_ALONE]
    }


def run_over_both(program: Callable, folder: Path, rank: int, size: int) -> Result | str:
    """A text where the program raises: the programs after it still run."""
    found: Result = {}
    for backend in (SHM,) if program in SHM_ALONE else (GLOO, SHM):
        place = folder / f"{program.__name__}-{backend.replace(':', '-')}"
        place.mkdir(exist_ok=True)
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(place / "store"), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        try:
            assert dist.get_backend() == backend
            found[backend] = program(place)
        except Exception:
            return f"over {backend}: {traceback.format_exc()}"
        finally:
            dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> list[dict[str, Result | str]]:
    """By rank, of as many ranks as the parameter says; started once for all programs."""
    return run_ranks(run_all, request.param, tmp_path_factory.mktemp("programs"), timeout=240)


def names(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("program", PROGRAMS, ids=names)
@pytest.mark.parametrize("results", SIZES, indirect=True)
def test_the_same_numbers_as_gloo(results, program):
    tolerance = 0.0 if len(results) == 2 else TOLERANCE.get(program, 1e-12)
    num_compared = 0
    for rank, by_program in enumerate(results):
        found = by_program[program.__name__]
        assert not isinstance(found, str), f"rank {rank} {found}"
        theirs, ours = found[GLOO], found[SHM]
        assert len(theirs) == len(ours)
        for one, other in zip(theirs, ours, strict=True):
            torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)
        num_compared += len(ours)
    assert num_compared > 0


@pytest.mark.parametrize("program", [*COPIES, *SHM_ALONE], ids=names)
@pytest.mark.parametrize("results", SIZES, indirect=True)
def test_all_copies_have_the_same_bits(results, program):
    num_weights = len(list(copies.make_net().parameters()))
    found = [by_program[program.__name__] for by_program in results]
    assert not any(isinstance(one, str) for one in found), found
    first, *others = [one[SHM][-num_weights:] for one in found]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# -- Programs and test suites of others --


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts Python with these words, in a session of its own; at the end of the test, all are gone."""
    running: list[subprocess.Popen] = []

    def call(*words: str | Path, folder: Path = ROOT) -> subprocess.Popen:
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", *map(str, words)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        )
        return running[-1]

    yield call
    for run in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


TORCHRUN = (
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    HERE / "plain_script.py",
)
ENOUGH_SECONDS = 240
"""For a busy machine; the groups of these programs would wait for an hour."""


def weights_of_one_process() -> list:
    """What `plain_script` trains, without a group: each rank has half a say in the gradient."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    generators = [torch.Generator().manual_seed(rank + 1) for rank in range(2)]
    for _ in range(3):
        optimizer.zero_grad()
        for generator in generators:
            x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
            (layer(x).square().mean() / 2).backward()
        optimizer.step()
    return [p.tolist() for p in layer.parameters()]


def test_a_script_under_torchrun_trains_as_one_process(start):
    run = start(*TORCHRUN, SHM)
    output, _ = run.communicate(timeout=ENOUGH_SECONDS)
    assert run.returncode == 0, output
    (printed,) = [line for line in output.splitlines() if line.startswith("[[")]
    assert json.loads(printed) == weights_of_one_process()


def test_a_script_under_torchrun_ends_when_one_rank_raises(start, tmp_path):
    """It would wait for an hour. What rank 0 is told names the rank that is gone."""
    told = tmp_path / "told"
    run = start(*TORCHRUN, SHM, "raise", told)
    output, _ = run.communicate(timeout=ENOUGH_SECONDS)
    assert run.returncode == 1 and "ValueError: planted" in output
    assert "rank 1" in told.read_text()


WRONG = """

def be_rank_0():
    assert dist.get_rank() == 0


def test_wrong(on_ranks):
    on_ranks(be_rank_0, 2)
"""


def test_the_conftest_of_the_page_works(start, tmp_path):
    """Its test passes; one that fails on a rank fails."""
    (tmp_path / "conftest.py").write_text((HERE / "example_conftest.py").read_text())
    (tmp_path / "test_sums.py").write_text((HERE / "example_sums.py").read_text() + WRONG)
    run = start("pytest", "-p", "no:cacheprovider", "--junitxml", "report.xml", folder=tmp_path)
    output, _ = run.communicate(timeout=ENOUGH_SECONDS)
    report = (tmp_path / "report.xml").read_text()
    assert run.returncode == 1 and 'tests="2"' in report and 'failures="1"' in report, output
    assert "Process 1 terminated" in output and "assert dist.get_rank() == 0" in output
