"""The doctor beside ranks that it did not launch: a watchman per machine, which ends a hung job."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minimegatron.doctor.watchman import HANG_EXIT_CODE
from minimegatron.launching.launcher import RankError, launch
from tests.doctor import watched_ranks


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """Where ranks and watchmen keep their files, to see that they take them along."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def wait_until_gone(folder: Path) -> None:
    """No file and no process of the watchmen is left: a watchman removes its file, then ends."""

    def left() -> list[str]:
        processes = subprocess.run(["ps", "axww"], capture_output=True, text=True).stdout
        files = [str(path) for path in folder.glob("minimegatron-doctor-*")]
        return files + [line for line in processes.splitlines() if str(folder) in line]

    deadline = time.monotonic() + 15
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left()


def run(folder, name: str, nprocs: int, hang_timeout: float, ranks_per_machine: int | None = None):
    arguments = (str(folder / "log"), name, hang_timeout, ranks_per_machine)
    options = {"timeout": 60, "backend": "gloo", "device": "cpu"}
    return launch(watched_ranks.run, nprocs, *arguments, **options)


def test_a_good_job_is_left_alone(own_folder):
    assert run(own_folder, "slow", 2, 20.0) == ["done", "done"]
    wait_until_gone(own_folder)
    assert (own_folder / "log").read_text() == ""


def test_a_hang_is_printed_and_ended(own_folder):
    with pytest.raises(RankError) as caught:
        run(own_folder, "missing_receive", 2, 1.5)
    assert f"ended with exit code {HANG_EXIT_CODE}" in str(caught.value)
    wait_until_gone(own_folder)
    err = (own_folder / "log").read_text()
    assert err.count("HANG: for") == 1
    assert "Rank 0 sends the activation of microbatch 3 to rank 1" in err
    assert "in receives_one_less" in err
    assert f"exit with code {HANG_EXIT_CODE}" in err


def test_what_gpus_wait_for_is_asked_on_every_machine(own_folder):
    # Ranks 0 and 1 on one machine; rank 2, on the other, waits for rank 1.
    with pytest.raises(RankError):
        run(own_folder, "gpu_waits_in_a_collective", 3, 1.0, 2)
    wait_until_gone(own_folder)
    err = (own_folder / "log").read_text()
    assert err.count("HANG: for") == 1
    assert "Ranks 0 and 2 wait for it." in err
    text = " ".join(err.split())
    assert text.count("its GPU waits in all-reduce #") == 2
    assert text.count("of the tensor group (ranks 0, 1 and 2), for rank 1") == 2


def test_two_machines_find_one_cause(own_folder):
    # Ranks 0 and 1 on one machine, 2 and 3 on the other, where rank 2 is stuck.
    with pytest.raises(RankError):
        run(own_folder, "wrong_peer", 4, 1.5, 2)
    wait_until_gone(own_folder)
    err = (own_folder / "log").read_text()
    assert err.count("HANG: for") == 1
    assert "Rank 0 (stage 0) sends activations to rank 2" in err
    for rank in range(4):
        assert f"--- Python stack of rank {rank}" in err


def test_two_machines_that_go_well(own_folder):
    assert run(own_folder, "slow", 2, 20.0, 1) == ["done", "done"]
    wait_until_gone(own_folder)
    assert (own_folder / "log").read_text() == ""


SIZES = (
    "--pipeline-model-parallel-size 2 --num-layers 4 "
    "--num-virtual-stages-per-pipeline-rank 2 --hidden-size 16 --num-attention-heads 2 "
    "--max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 1000 --lr 1e-3 --hang-timeout 6"
)


def hang_under_torchrun(folder: Path, num_ranks: int, *flags: str) -> str:
    """Its last rank is stopped by a signal; what torchrun and the others say, in one line."""
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", str(num_ranks)]
        + ["-m", "tests.doctor.hanging_pretrain", *SIZES.split(), *flags],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    # The one that was stopped could not end by itself.
    assert len(re.findall(rf"exitcode\s*: {HANG_EXIT_CODE} ", done.stderr)) == num_ranks - 1
    assert len(re.findall(r"exitcode\s*: -9 ", done.stderr)) == 1
    assert "because a rank is gone" not in done.stderr
    pids = re.findall(r"pid: (\d+)", done.stderr)
    assert len(set(pids)) == num_ranks
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    wait_until_gone(folder)
    return " ".join(done.stderr.split())


def test_training_with_hang_timeout(own_folder):
    told = hang_under_torchrun(own_folder, 2)
    assert "Rank 1 is stopped by a signal" in told
    assert "in the forward of microbatch 0, chunk 1. Rank 0 waits for it." in told
    assert "waits for the gradient of microbatch 0, chunk 1 from rank 1" in told
    assert "rank 0 (stage 0 of 2)" in told


@pytest.mark.full
def test_training_of_four_ranks_with_hang_timeout(own_folder):
    told = hang_under_torchrun(own_folder, 4, "--tensor-model-parallel-size", "2")
    assert "Rank 3 is stopped by a signal" in told
    assert "in the forward of microbatch 0, chunk 1. Ranks 0, 1 and 2 wait for it." in told
    assert "of the tensor group (ranks 2 and 3), for rank 3, in the forward of microbatch 0" in told
    assert "waits for the gradient of microbatch 0, chunk 1 from rank 2" in told
    assert "rank 1 (stage 0 of 2, tp 1 of 2)" in told
