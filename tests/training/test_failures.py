"""A rank that raises or is killed takes the job down, with its rank and stage named."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minimegatron.core.datasets.atomic_file import CannotWrite
from minimegatron.core.datasets.utils import DataError
from minimegatron.training import failures
from minimegatron.training.failures import Identity, is_lost_connection
from tests.figures import figure

TINY = (
    "--hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 1000 --lr 1e-3"
)


def run_job(stages: int, *flags: str) -> tuple[int, str, float]:
    """`failing_pretrain` under torchrun, a rank per stage: exit code, stderr, seconds."""
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [torchrun, "--nproc-per-node", str(stages), "--standalone"]
    command += ["-m", "tests.training.failing_pretrain", *TINY.split(), *flags]
    command += ["--num-layers", str(stages), "--pipeline-model-parallel-size", str(stages)]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stderr, time.monotonic() - begin


def test_rank_that_raises():
    code, stderr, seconds = run_job(2, "--fail-rank", "1", "--fail-how", "raise")
    place = "rank 1 (stage 1/2, tp 0, dp 0)"
    assert code != 0
    assert f"{place}: ValueError: the planted error" in stderr
    # One block: nothing of another rank between the headline and the last line of the traceback.
    block = re.search(rf"-{{100}}\n{re.escape(place)}.*?\n-{{100}}\n", stderr, re.DOTALL)
    assert block and block[0].rstrip("-\n").endswith("ValueError: the planted error")
    figure(f"raised: {seconds:.1f} s in all, of which most is starting")


@pytest.mark.full
def test_rank_that_is_killed():
    """Of three, so that there are two who could speak of it. Of two: tests/faults/test_kill.py."""
    code, stderr, seconds = run_job(3, "--fail-rank", "0", "--fail-how", "kill")
    place = "rank 0 (stage 0/3, tp 0, dp 0)"
    assert code != 0
    assert re.search(rf"stops, because a rank is gone: {re.escape(place)}, process \d+", stderr)
    assert stderr.count("because a rank is gone") == 1  # one survivor speaks for all
    figure(f"killed: {seconds:.1f} s in all, of which most is starting")


def test_lost_connections_are_told_from_errors():
    assert is_lost_connection(dist.DistBackendError("NCCL communicator was aborted"))
    assert is_lost_connection(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed"))
    assert is_lost_connection(ConnectionResetError())
    assert not is_lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_connection(ValueError("Connection closed"))


def identity_of(pid: int) -> Identity:
    return Identity(rank=1, stage=0, num_stages=1, tp=0, dp=1, host="here", pid=pid)


def test_a_zombie_is_gone():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not identity_of(child.pid).is_gone()
    child.kill()
    while not identity_of(child.pid).is_gone():  # ended, but not collected
        time.sleep(0.01)
    child.wait()
    assert identity_of(child.pid).is_gone()
    child.stdin.close()


def test_b1_machines_of_one_name_do_not_watch_each_others_processes():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    me = replace(identity_of(os.getpid()), rank=0, machine="boot 1")
    there = replace(identity_of(child.pid), machine="boot 2")  # no such process here
    watch = failures.PeerWatch(me, [me, there])
    watch.stop()
    assert watch._gone() == []


def test_b15_a_file_that_cannot_be_written_is_named_in_one_line(monkeypatch):
    said, ended = [], []
    monkeypatch.setattr(failures, "_write", said.append)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(failures, "keep_printing", lambda: None)
    with contextlib.suppress(CannotWrite), failures.reported():
        raise CannotWrite(28, "No space left on device", "/runs/rank-00003.json")
    assert said[0] == "minimegatron: cannot write /runs/rank-00003.json: No space left on device\n"
    assert ended[0] == 1


def test_watch_can_be_stopped():
    before = signal.getsignal(signal.SIGTERM)
    watch = failures.PeerWatch(identity_of(os.getpid()), [identity_of(os.getpid())])
    assert signal.getsignal(signal.SIGTERM) is not before
    watch.stop()
    assert signal.getsignal(signal.SIGTERM) is before
    assert "peer watch" not in [thread.name for thread in threading.enumerate()]


# -- Data --

SENTENCE = "some/text holds token 900, but the tokenizer has 257: from 0 on"


class Strange(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, idx):
        raise DataError(SENTENCE)


def error_of_loader(num_workers: int) -> DataError:
    """Without what it holds: as long as its frames are there, the loader's process is."""
    with pytest.raises(DataError) as caught:
        next(iter(torch.utils.data.DataLoader(Strange(), num_workers=num_workers)))
    return caught.value.with_traceback(None)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.processes)])
@pytest.mark.parametrize("among_peers", [False, True])
def test_b13_data_are_refused_without_a_traceback(monkeypatch, num_workers, among_peers):
    """Also what a loader's process raised, whose message comes with a story of its own."""
    written, me = [], Identity(1, 0, 1, 0, 1, "host", os.getpid())
    # Before `os._exit` is another: a loader's process ends by it.
    error = error_of_loader(num_workers)
    gc.collect()

    def end(code):
        raise SystemExit(code)

    watch = object.__new__(failures.PeerWatch)
    watch.me, watch.local, watch._ending = me, [], threading.Lock()
    monkeypatch.setattr(failures, "_watch", watch if among_peers else None)
    monkeypatch.setattr(failures, "stop_watching", lambda: None)
    monkeypatch.setattr(failures, "_write", written.append)
    monkeypatch.setattr(failures.os, "_exit", end)
    with pytest.raises(SystemExit) as ending, failures.reported():
        raise error
    who = me if among_peers else "rank 0 (not yet in the model)"
    assert written == [f"minimegatron: {who}: {SENTENCE}\n"] and ending.value.code == 1


def test_b13_another_error_keeps_its_traceback():
    """One of a user's own code, say, whose line is what they look for."""
    with pytest.raises(ValueError) as caught:
        raise ValueError(SENTENCE)
    assert "Traceback" in failures._block("rank 1", caught.value)
