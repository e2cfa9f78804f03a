"""What SIGKILL and Ctrl-C leave behind: after a minute, no process and no folder."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from minimegatron.doctor import folders
from tests.figures import slowness
from tests.rank_programs import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

FULL = pytest.mark.full
START_SECONDS, LEFT_SECONDS = 100, 60
TRAINING = (
    "--hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 9 --lr 1e-3 --num-layers 2 "
    "--pipeline-model-parallel-size 2 --hang-timeout 600"
)
STUDENT = """
import torch.distributed as dist
from tests.faults.leaving import wait_on_rank


def ring_sum(value):
    wait_on_rank()


if __name__ == "__main__":
    from minimegatron.exercises import engine, torchrun
    from tests.exercises.sample.ex00_ring import EXERCISE

    torchrun.HANG_SECONDS = 600
    torchrun.exercise_of = lambda path: EXERCISE
    from minimegatron.exercises.check import main

    main(__file__)
"""
CHECK = """
import sys
from pathlib import Path
from minimegatron.exercises.check.runner import Runner
from tests.exercises.sample.ex00_ring import EXERCISE

with Runner() as runner:
    runner.ask(EXERCISE, Path(sys.argv[1]), 600, patience=100.0, replay=sys.argv[1] + ".html")
"""
LEAVING = [sys.executable, "-m", "tests.faults.leaving"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@dataclass
class Job:
    """A program that was started, with a folder for temporary files and a mark of its own."""

    program: subprocess.Popen
    mark: str
    temporary: Path
    ready: Path
    output: Path

    def wait_until_ready(self, num_ready: int) -> None:
        deadline = time.monotonic() + START_SECONDS * slowness()
        while len(self.ranks()) < num_ready:
            assert self.program.poll() is None, f"it has ended already: {self.said()}"
            assert time.monotonic() < deadline, f"it did not come so far: {self.said()}"
            time.sleep(0.05)

    def said(self) -> str:
        """The end of what it has put out, and its processes."""
        commands = [f"{pid}: {_command(pid)}" for pid in self.processes()]
        return "\n".join([self.output.read_text(errors="replace")[-3000:], *commands])

    def ranks(self) -> list[int]:
        """The process numbers of those who are ready."""
        names = (path for path in self.ready.iterdir() if not path.name.startswith("."))
        return [int(path.read_text()) for path in sorted(names)]

    def processes(self) -> list[int]:
        """All that run and carry the mark in their environment, or descend from one that did."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def folders(self) -> list[str]:
        """What is in the folder for temporary files, without what torch itself leaves there."""
        names = (path.name for path in self.temporary.iterdir())
        return [name for name in names if not name.startswith(("torchelastic_", "torchinductor_"))]

    def left(self) -> list[str]:
        """Words about what is there after a minute at the latest; empty when nothing is."""
        deadline = time.monotonic() + LEFT_SECONDS
        while True:
            if self.program.poll() is None:
                words = ["the program itself"]
            else:
                words = [f"{pid}: {_command(pid)}" for pid in self.processes()] + self.folders()
            if not words or time.monotonic() > deadline:
                return words
            time.sleep(0.2)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return "(ended)"


@pytest.fixture
def start() -> Iterator:
    """Starts a program; at the end nothing of it is left in any case."""
    jobs: list[Job] = []
    # Short, since sockets are made in it: their paths may have 107 characters.
    top = Path(tempfile.mkdtemp(prefix="mm-", dir="/tmp"))

    def started(words: list[str], num_ready: int) -> Job:
        temporary, ready = top / "tmp", top / "ready"
        temporary.mkdir()
        ready.mkdir()
        mark = f"mark-{uuid.uuid4()}"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
            "READY": str(ready),
            "MINIMEGATRON_TEST": mark,
            "IPYTHONDIR": str(top / "ipython"),
        }
        with open(top / "output", "w") as output:
            program = subprocess.Popen(
                words,
                env=environment,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        jobs.append(Job(program, mark, temporary, ready, top / "output"))
        jobs[-1].wait_until_ready(num_ready)
        return jobs[-1]

    yield started
    for job in jobs:
        for pid in job.processes():
            _send(pid, signal.SIGKILL)
        job.program.kill()
        job.program.wait()
    shutil.rmtree(top)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end(job: Job, how: str) -> None:
    """Does to the job what `how` says."""
    if how == "all":
        # As the kernel does it at the end of a container: the keepers of folders too.
        for pid in job.processes():
            _send(pid, signal.SIGSTOP)
        for pid in job.processes():
            _send(pid, signal.SIGKILL)
    elif how == "rank":
        os.kill(job.ranks()[-1], signal.SIGKILL)
    elif how == "child":
        children = Path(f"/proc/{job.program.pid}/task/{job.program.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)
    elif how == "interrupt":
        os.killpg(job.program.pid, signal.SIGINT)
    else:
        job.program.kill()


def next_run(job: Job) -> None:
    """Another program makes a folder in the same place."""
    code = (
        "from minimegatron.doctor.folders import shared_folder\n"
        "with shared_folder('minimegatron-next-'): pass"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(job.temporary)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def ways(here: list[str], full: list[str]) -> pytest.MarkDecorator:
    """`here`: in every run of the tests; `full`: in `make test-full` as well.

    In every run each program but live ranks, which have tests of their own, is ended once; and each way
    of ending ends some program.
    """
    return pytest.mark.parametrize("how", [*here, *(pytest.param(w, marks=FULL) for w in full)])


@ways(["all"], full=["interrupt", "program", "rank"])
def test_launched_ranks_leave_nothing(start, how):
    job = start([*LEAVING, "launched"], 2)
    assert job.folders(), "the test would show nothing"
    end(job, how)
    if how == "all":
        job.program.wait(60)
        assert any(name.startswith("minimegatron-") for name in job.folders())
        next_run(job)
    assert not job.left()


def test_a_program_killed_between_two_launches_leaves_nothing(start):
    job = start([*LEAVING, "between"], 1)
    end(job, "program")
    assert not job.left()


@ways([], full=["interrupt", "program", "all"])
def test_live_ranks_leave_nothing(start, how):
    pytest.importorskip("ipyparallel", reason="the extra `notebooks` is missing")
    job = start([*LEAVING, "live"], 2)
    end(job, how)
    if how == "all":
        job.program.wait(60)
        next_run(job)
    assert not job.left()


@ways(["child"], full=["program", "rank", "interrupt"])
def test_the_check_of_an_exercise_leaves_nothing(start, tmp_path, how):
    """`child` is the process that checks."""
    file = tmp_path / "ex00_ring.py"
    file.write_text(STUDENT)
    job = start([sys.executable, "-c", CHECK, str(file)], 2)
    end(job, how)
    assert not job.left()


@ways(["program"], full=["interrupt", "rank"])
def test_an_exercise_under_torchrun_leaves_nothing(start, tmp_path, how):
    """`program` is torchrun's agent."""
    file = tmp_path / "ex00_ring.py"
    file.write_text(STUDENT)
    job = start([*TORCHRUN, str(file)], 2)
    end(job, how)
    assert not job.left()


@ways(["interrupt"], full=["program", "all"])
def test_training_under_torchrun_leaves_nothing(start, how):
    job = start([*TORCHRUN, "-m", "tests.faults.leaving", "training", *TRAINING.split()], 1)
    end(job, how)
    if how == "all":
        job.program.wait(60)
        assert any(name.startswith("minimegatron-doctor-") for name in job.folders())
        next_run(job)
    assert not job.left()


def test_ranks_that_start_when_torchrun_is_killed_leave_nothing(start):
    job = start([*TORCHRUN, "-m", "tests.faults.leaving", "starting", *TRAINING.split()], 2)
    end(job, "program")
    assert not job.left()


def test_a_keeper_removes_what_its_maker_could_not(tmp_path, monkeypatch):
    folder = folders.make_folder("minimegatron-one-", place=tmp_path)
    (folder / "file").touch()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    folders.remove_folder(folder)
    assert not folder.exists()


def test_a_keeper_with_nothing_to_remove_removes_nothing(tmp_path):
    folder = folders.make_folder("minimegatron-one-", place=tmp_path)
    held = folders._held.pop(folder)
    shutil.rmtree(folder)
    held.keeper.stdin.write(b"\n")
    folder.mkdir()  # somebody else's, of the same name
    held.keeper.stdin.close()
    assert held.keeper.wait(timeout=60) == 0 and folder.exists()
    os.close(held.lock)


def test_a_killed_keeper_is_no_error(tmp_path):
    folder = folders.make_folder("minimegatron-one-", place=tmp_path)
    keeper = folders._held[folder].keeper
    keeper.kill()
    keeper.wait()
    folders.remove_folder(folder)
    assert not folder.exists()


def test_a_folder_in_use_is_not_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with folders.shared_folder("minimegatron-one-") as one:
        (one / "file").touch()
        kept = folders.make_folder("minimegatron-two-", has_keeper=False)
        with folders.shared_folder("minimegatron-three-"):
            assert (one / "file").exists() and kept.exists()
        os.close(folders._held.pop(kept).lock)  # as the end of its last user does
        other = tmp_path / "minimegatron-notes-2024-plans"
        other.mkdir()
        with folders.shared_folder("minimegatron-four-"):
            assert one.exists() and other.exists() and not kept.exists()
    assert list(tmp_path.iterdir()) == [other]
