"""When is it a hang: the watcher's clock, busy machines, ranks that begin and end."""

import os
import subprocess
import sys
import time

import pytest

from minimegatron.doctor import processes
from minimegatron.doctor import watch as watch_module
from minimegatron.doctor.processes import Sample, main_stack, sample, without_own_threads
from minimegatron.doctor.records import RETURNED, RUNNING
from minimegatron.doctor.shared_record import CallFields, RecordWriter
from minimegatron.doctor.watch import STARVED_FACTOR, Watch, record_path


class Bench:
    """Two ranks' records, a clock, and what the system says of their processes."""

    def __init__(self, folder, monkeypatch):
        self.now, self.letter, self.is_ready, self.cpu_seconds = 100.0, "S", False, 0.0
        monkeypatch.setattr(
            watch_module,
            "sample",
            lambda pid: Sample(self.letter, self.cpu_seconds, self.letter == "R" or self.is_ready),
        )
        self.watch = Watch(folder, [0, 1], hang_timeout=10, read_clock=lambda: self.now)
        self.writers = [RecordWriter(record_path(folder, rank), rank, 2) for rank in (0, 1)]

    def begin(self):
        for writer in self.writers:
            writer.set_state(RUNNING)
        self.watch.look()

    def let_pass(self, seconds: float, cpu_share: float = 0.0, by: float = 0.5):
        for _ in range(round(seconds / by)):
            self.now += by
            self.cpu_seconds += by * cpu_share
            self.watch.look()


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


def test_a_hang_is_the_time_out_without_an_event(bench):
    bench.begin()
    bench.let_pass(9)
    assert not bench.watch.is_hung()
    bench.writers[1].push(CallFields(0))
    bench.let_pass(9)
    assert not bench.watch.is_hung()
    bench.let_pass(2)
    assert bench.watch.is_hung()


def test_nobody_hangs_before_all_have_begun(bench):
    bench.writers[0].set_state(RUNNING)
    bench.let_pass(60)
    assert not bench.watch.is_hung()


def test_nobody_hangs_after_all_have_ended(bench):
    bench.begin()
    bench.writers[0].set_state(RETURNED)
    bench.let_pass(11)
    assert bench.watch.is_hung()  # rank 1 is still to come
    bench.writers[1].set_state(RETURNED)
    bench.let_pass(30)
    assert not bench.watch.is_hung()
    assert bench.watch.are_all_over()


def test_processes_that_are_gone_have_ended(bench):
    bench.begin()
    bench.letter = "Z"
    bench.let_pass(30)
    assert bench.watch.are_all_over()
    assert [record.process for record in bench.watch.records()] == ["gone", "gone"]


def test_time_in_which_the_watcher_was_stopped_too_does_not_count(bench):
    bench.begin()
    bench.now += 3600
    bench.watch.look()
    assert not bench.watch.is_hung()
    bench.let_pass(11)
    assert bench.watch.is_hung()


@pytest.mark.parametrize("letter", ["R", "S"])
def test_a_rank_that_gets_no_processor_is_given_longer(bench, letter):
    bench.begin()
    bench.letter, bench.is_ready = letter, True  # S: the main thread waits for another one
    bench.let_pass(20, cpu_share=0.1)
    assert not bench.watch.is_hung()
    bench.let_pass(10 * STARVED_FACTOR - 19, cpu_share=0.1)
    assert bench.watch.is_hung()
    word = "computing" if letter == "R" else "sleeping"
    assert {record.process for record in bench.watch.records()} == {word}


def test_a_rank_that_computes_is_not(bench):
    bench.begin()
    bench.letter = "R"
    bench.let_pass(10.5, cpu_share=0.9)
    assert bench.watch.is_hung()
    assert {record.process for record in bench.watch.records()} == {"computing"}


@pytest.mark.parametrize(("letter", "word"), [("S", "sleeping"), ("T", "stopped"), ("Z", "gone")])
def test_states_of_a_process(bench, letter, word):
    bench.begin()
    bench.letter = letter
    bench.let_pass(2)
    assert bench.watch.records()[0].process == word


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_samples_of_real_processes():
    code = "import sys; print(1, flush=True)\nfor _ in sys.stdin: pass\nwhile True: pass"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        deadline = time.monotonic() + 30
        while sample(child.pid).letter != "S" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sample(child.pid).letter == "S" and not sample(child.pid).is_ready
        child.stdin.close()
        while sample(child.pid).letter != "R" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sample(child.pid).letter == "R"
        assert sample(child.pid).is_ready
    finally:
        child.kill()
        child.wait()
    assert sample(child.pid).letter == "Z"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_thread_that_computes_is_seen_while_the_main_thread_waits():
    # Python's lock would wake the main thread now and then; a digest is computed without it.
    code = (
        "import hashlib, threading\n"
        "work = lambda: hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "print(1, flush=True)\ninput()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            taken = sample(child.pid)
            if taken.letter == "S" and taken.is_ready:
                break
            time.sleep(0.01)
        assert taken.letter == "S" and taken.is_ready
    finally:
        child.kill()
        child.wait()


STACKS = """Thread 0x1 (most recent call first):
  File "/x/minimegatron/launching/launcher.py", line 3 in _die_with_parent

Thread 0x2 (most recent call first):
  File "/x/loader.py", line 5 in fetch

Current thread 0x3 (most recent call first):
  File "/x/minimegatron/core/tracing.py", line 1 in _watch
  File "/x/model.py", line 9 in forward
  File "/x/minimegatron/launching/launcher.py", line 7 in _report
"""


def test_stacks_without_what_is_in_every_rank():
    assert "_die_with_parent" not in without_own_threads(STACKS)
    assert "loader.py" in without_own_threads(STACKS)
    assert main_stack(STACKS) == '  File "/x/model.py", line 9 in forward'
    assert main_stack("") == ""


IN_BACKWARD = """Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/x/loader.py", line 5 in fetch
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x2 (most recent call first):
  <no Python frame>

Thread 0x3 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 5 in all_reduce
  File "/x/layers.py", line 20 in backward
  File "/x/site-packages/torch/autograd/function.py", line 311 in apply

Current thread 0x4 (most recent call first):
  File "/x/site-packages/torch/autograd/graph.py", line 865 in _engine_run_backward
  File "/x/site-packages/torch/_tensor.py", line 630 in backward
  File "/x/train.py", line 9 in train
  File "/x/minimegatron/launching/launcher.py", line 7 in _report
"""


OF_TORCH = "torch/autograd/graph.py", "_engine_run_backward"
OF_THE_SCHEDULE = "minimegatron/core/pipeline_parallel/steps.py", "run_backward"


@pytest.mark.parametrize(("file", "function"), [OF_TORCH, OF_THE_SCHEDULE])
def test_the_thread_that_runs_the_backward_pass_is_shown_above_the_one_that_waits(file, function):
    stacks = IN_BACKWARD.replace(OF_TORCH[0], file).replace(OF_TORCH[1], function)
    lines = main_stack(stacks).splitlines()
    assert "in all_reduce" in lines[0]
    assert "autograd's own thread" in lines[3]
    assert [line.rpartition(" ")[2] for line in lines[4:]] == [function, "backward", "train"]


def test_other_threads_are_not_shown_for_autograds_own():
    # A thread of Python's own is none of autograd's; nor does one matter while the program runs.
    before, _, after = IN_BACKWARD.partition("Thread 0x3")
    without = before + after[after.index("Current") :]
    assert "in _engine_run_backward" in main_stack(without).splitlines()[0]
    elsewhere = IN_BACKWARD.replace("graph.py", "elsewhere.py")
    assert "elsewhere.py" in main_stack(elsewhere).splitlines()[0]


def test_b1_the_process_numbers_of_another_proc_are_not_believed(monkeypatch):
    # A container with process numbers of its own may see the /proc of its host.
    monkeypatch.setattr(os, "readlink", lambda path: "4711")
    assert sample(os.getpid()) is None


def test_b1_a_hidden_proc_says_nothing(monkeypatch):
    def hidden(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(processes, "_stat", hidden)
    assert sample(os.getpid()) is None
