"""How a rank is asked what its GPU waits for: its thread, its pipe, its answer, or none."""

import os
import re
import threading
import time

import pytest
from torch._C import _distributed_c10d as c10d

from minimegatron.doctor import inquiry, watch
from minimegatron.doctor.inquiry import Inquiry, answer_path, offer_answers, question_path
from minimegatron.doctor.processes import main_stack
from minimegatron.doctor.records import RUNNING
from minimegatron.doctor.shared_record import RecordWriter
from minimegatron.launching.launcher import launch
from minimegatron.training import process_group

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")


class Clock:
    """Takes the place of the module `time` for who watches: it passes while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(inquiry, "time", clock)
    return clock


def dump_with(monkeypatch, function) -> None:
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", function, raising=False)


def own_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if "hang doctor" in one.name]


def test_question_and_answer(tmp_path, monkeypatch):
    asked = []

    def dump(*options):
        asked.append(options)
        return b"{}"

    dump_with(monkeypatch, dump)
    with offer_answers(tmp_path, 0), offer_answers(tmp_path, 1):
        assert Inquiry(tmp_path, [0, 1]).answers() == {0: b"{}", 1: b"{}"}
        question = Inquiry(tmp_path, [1])
        assert question.answers() == {1: b"{}"} and list(question.stacks()) == [1]
        for path in tmp_path.glob("*.stacks-*"):
            path.unlink()  # of the question before, which nobody has asked for
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0.question", "1.question"]
    # includeCollectives, and not onlyActive.
    assert asked == [(True, False)] * 3
    assert own_threads() == []
    # Nobody reads the pipe any more.
    assert Inquiry(tmp_path, [0]).answers() == {}


def test_stacks_are_as_a_signal_would_give_them(tmp_path):
    """And need none, which could end a rank that computes in Python."""
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait, name="another thread")
    other.start()
    with offer_answers(tmp_path, 0):
        text = Inquiry(tmp_path, [0]).stacks()[0]
    is_over.set()
    other.join()
    assert 'test_inquiry.py"' in main_stack(text).splitlines()[0]
    assert text.count("Current thread 0x") == 1 and " in wait\n" in text
    assert "in _answer" not in text
    assert re.search(r'\n  File ".*test_inquiry.py", line \d+ in test_stacks_are_as', text)


def test_who_answers_gets_no_signal(tmp_path, monkeypatch):
    signalled = []
    monkeypatch.setattr(watch, "read_stacks", lambda pids, _: signalled.append(pids) or {})
    writers = [start_recording_alone(tmp_path, rank) for rank in range(2)]
    with offer_answers(tmp_path, 0):
        looking = watch.Watch(tmp_path, range(2), 1.0)
        looking.look()
        records = looking.ask()
    assert [set(pids) for pids in signalled] == [{1}]
    assert "test_inquiry.py" in records[0].stack and records[1].stack == ""
    assert len(writers) == 2


def start_recording_alone(folder, rank):
    """A rank's record, without its observer."""
    writer = RecordWriter(watch.record_path(folder, rank), rank, 2)
    writer.set_state(RUNNING)
    return writer


def test_a_torch_without_nccl_answers_at_once(tmp_path, monkeypatch):
    monkeypatch.delattr(c10d, "_dump_nccl_trace_json", raising=False)
    with offer_answers(tmp_path, 0):
        assert Inquiry(tmp_path, [0]).answers() == {0: b""}


def test_a_rank_that_cannot_answer_costs_two_seconds(tmp_path, monkeypatch, clock):
    """Its thread is stuck in the call; or never comes to it, because the program lets no other run."""
    is_over = threading.Event()
    dump_with(monkeypatch, lambda *_: b"late" if is_over.wait(60) else b"")
    monkeypatch.setattr(inquiry, "JOIN_SECONDS", 60)
    with offer_answers(tmp_path, 0):
        assert Inquiry(tmp_path, [0, 7]).answers() == {}
        assert inquiry.ANSWER_SECONDS <= clock.now <= inquiry.ANSWER_SECONDS + 0.05 == 2.05
        is_over.set()
    # Its answer has come since, and is not taken for one to another question.
    assert own_threads() == []
    assert [path.read_bytes() for path in tmp_path.glob("0.answer-*")] == [b"late"]
    dump_with(monkeypatch, lambda *_: b"in time")
    monkeypatch.setattr(inquiry, "time", time)
    with offer_again(tmp_path):
        assert Inquiry(tmp_path, [0]).answers() == {0: b"in time"}


def offer_again(folder):
    os.unlink(question_path(folder, 0))
    return offer_answers(folder, 0)


def test_a_dump_that_fails_is_no_answer(tmp_path, monkeypatch, clock):
    def dump(*_):
        raise RuntimeError("CUDA error")

    dump_with(monkeypatch, dump)
    with offer_answers(tmp_path, 0):
        assert Inquiry(tmp_path, [0]).answers() == {}
        assert len(own_threads()) == 1


def test_a_folder_that_can_have_no_pipe_is_no_reason_to_fail(tmp_path):
    with offer_answers(tmp_path / "absent", 0):
        assert own_threads() == []


def test_files_that_are_no_answer(tmp_path, clock):
    """A rank runs what others wrote: it may put anything there. Nothing is followed, nor waited for."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    kinds = {
        0: lambda path: path.symlink_to(secret),
        1: os.mkfifo,
        2: lambda path: path.mkdir(),
        3: lambda path: (path.touch(), os.truncate(path, inquiry.MOST_BYTES + 1)),
    }
    pipes = []
    for rank in kinds:
        os.mkfifo(question_path(tmp_path, rank))
        pipes.append(os.open(question_path(tmp_path, rank), os.O_RDWR))
    question = Inquiry(tmp_path, kinds)
    for rank, make in kinds.items():
        make(answer_path(tmp_path, rank, question._number))
    assert question.answers() == dict.fromkeys(kinds, b"")
    for pipe in pipes:
        os.close(pipe)


def test_pipes_that_are_none(tmp_path, clock):
    """Nothing is written into another file."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    question_path(tmp_path, 0).symlink_to(secret)
    question_path(tmp_path, 1).write_bytes(b"file")
    assert Inquiry(tmp_path, [0, 1, 2]).answers() == {}
    assert secret.read_bytes() == b"secret"
    assert question_path(tmp_path, 1).read_bytes() == b"file"
    assert clock.now == 0


# -- The recorder is on where a rank is watched, before its process group is made --


def settings() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


def test_launched_ranks(monkeypatch):
    monkeypatch.setenv(NAMES[0], "77")
    for name in NAMES[1:]:
        monkeypatch.delenv(name, raising=False)
    options = {"backend": "gloo", "device": "cpu", "timeout": 60}
    watched = launch(settings, 2, hang_timeout=50, **options)
    assert [values[:2] for values in watched] == [["77", "1"]] * 2
    assert watched[0][2].endswith("-rank-")
    assert launch(settings, 1, **options) == [["77", None, None]]
    assert settings() == ["77", None, None]


@pytest.mark.parametrize("hang_timeout", [None, 5.0])
def test_ranks_under_torchrun(monkeypatch, hang_timeout):
    seen = []
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is taken back at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(process_group, "find_each_other", lambda *_: None)
    monkeypatch.setattr(process_group, "set_device", lambda *_: None)
    monkeypatch.setattr(
        process_group.dist, "init_process_group", lambda *_, **__: seen.append(settings())
    )
    monkeypatch.setattr(process_group, "agree_on_device", lambda *_: Chosen)
    args = Given(hang_timeout)
    process_group.init_process_group(args)
    (values,) = seen
    assert [value is not None for value in values] == [hang_timeout is not None] * 3


class Chosen:
    device, backend = "cpu", "gloo"


class Given:
    rank, world_size, local_rank, local_world_size = 0, 2, 0, 1
    distributed_timeout_minutes, device, distributed_backend = 10, "cpu", "gloo"
    tensor_model_parallel_size, tf32, cuda_graph_impl = 1, False, "none"

    def __init__(self, hang_timeout: float | None):
        self.hang_timeout = hang_timeout
