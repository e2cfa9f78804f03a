"""What a rank writes is what a reader gets: nested calls, counts, and when there is no more room."""

import errno
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minimegatron.core import tracing
from minimegatron.core.pipeline_parallel.p2p_communication import (
    Started,
    TensorMessage,
)
from minimegatron.core.tracing import Call, traced
from minimegatron.doctor.folders import make_folder, remove_folder
from minimegatron.doctor.observer import RecordingObserver
from minimegatron.doctor.records import RETURNED, RUNNING, STARTING, MessageCount
from minimegatron.doctor.shared_record import (
    MAX_CALLS,
    MAX_GROUPS,
    NONE,
    NUM_RECENT,
    RECORD_BYTES,
    CallFields,
    RecordWriter,
    read_progress,
    read_record,
)


class Group:
    def __init__(self, size: int = 2):
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "3.record"


@pytest.fixture
def observer(path):
    observer = RecordingObserver(RecordWriter(path, 3, 8))
    tracing.add_observer(observer)
    yield observer
    tracing.remove_observer(observer)


def call(name: str, arguments: dict | None = None, **attributes) -> Call:
    return Call(name, f"somewhere.{name}", "", 1, attributes, arguments or {})


def all_reduce(group: Group, tensor: torch.Tensor, **more) -> Call:
    attributes = {"shape": tuple(tensor.shape), "dtype": "float32", "bytes": tensor.nbytes}
    arguments = {"group": group, "tensor": tensor, "op": torch.distributed.ReduceOp.SUM, **more}
    return call("all-reduce", arguments, group_size=group.size(), **attributes)


def start(group: Group, message: TensorMessage) -> Call:
    arguments = {"self": SimpleNamespace(pp_group=group), "message": message}
    return call("p2p-start", arguments, **tracing.of_message(arguments))


def wait(message: TensorMessage, number: int = 0) -> Call:
    arguments = {"handle": Started(message, None, 0, number, ())}
    return call("p2p-wait", arguments, **tracing.of_message_wait(arguments))


def test_a_record_is_small_and_absent_before_it_is_whole(path):
    assert read_record(path) is None
    assert read_progress(path) is None
    writer = RecordWriter(path, 3, 8)
    assert path.stat().st_size == RECORD_BYTES < 40_000
    record = read_record(path)
    assert (record.rank, record.world_size, record.state) == (3, 8, STARTING)
    assert record.calls == () and record.step is None and record.caught is None
    writer.set_state(RUNNING)
    assert read_record(path).state == read_progress(path)[0] == RUNNING


def test_nested_calls_and_their_attributes(path, observer):
    before = time.monotonic()
    group = Group()
    calls = [
        call("forward-backward", {"num_microbatches": 4, "model": None}, num_microbatches=4),
        call("forward-compute", microbatch=2, chunk=1),
        call("layer-forward", layer=5),
        all_reduce(group, torch.ones(4, 8)),
    ]
    for one in calls:
        observer.start(one)
    record = read_record(path)
    assert [one.name for one in record.calls] == [one.name for one in calls]
    assert record.calls[0].symbol == "somewhere.forward-backward"
    assert (record.calls[1].microbatch, record.calls[1].chunk) == (2, 1)
    assert record.calls[2].layer == 5
    reduce = record.calls[3]
    assert (reduce.shape, reduce.dtype, reduce.op, reduce.number) == ((4, 8), "float32", "sum", 0)
    assert (reduce.num_bytes, reduce.group) == (128, 0)
    assert before < reduce.since <= record.last_progress <= record.seen_at
    (entry,) = record.groups[0].recent
    assert (entry.layer, entry.work, entry.work_number) == (5, "forward-compute", 0)
    assert record.step["num_microbatches"] == 4
    assert (record.num_steps, record.num_forwards, record.num_backwards) == (1, 1, 0)
    for one in reversed(calls):
        observer.stop(one)
    record = read_record(path)
    assert record.calls == ()
    assert record.num_events == 1 + 2 * len(calls)


def test_collectives_are_numbered_per_group_and_the_last_few_remembered(path, observer):
    first, second = Group(), Group(3)
    for size in range(NUM_RECENT + 3):
        one = all_reduce(first, torch.ones(size))
        observer.start(one)
        observer.stop(one)
    observer.start(all_reduce(second, torch.tensor(1.0)))
    observer.start(all_reduce(Group(1), torch.ones(1)))
    record = read_record(path)
    assert [group.num_started for group in record.groups] == [NUM_RECENT + 3, 1]
    assert [entry.number for entry in record.groups[0].recent] == list(range(3, NUM_RECENT + 3))
    assert record.groups[0].recent[-1].shape == (NUM_RECENT + 2,)
    assert record.groups[1].ranks == (0, 1, 2)
    assert record.calls[0].shape == ()
    assert record.calls[1].group is None  # a group of one waits for nobody


def test_a_wait_for_an_asynchronous_collective_knows_its_number(path, observer):
    class Handle:
        pass

    group, handle = Group(), Handle()
    for result in (None, handle, None):
        one = all_reduce(group, torch.ones(2))
        observer.start(one)
        one.result = result
        observer.stop(one)
    observer.start(call("collective-wait", {"handle": handle}, collective="all-reduce"))
    (waiting,) = read_record(path).calls
    assert (waiting.name, waiting.number, waiting.group) == ("collective-wait", 1, 0)


def test_messages_are_counted_per_step(path, observer):
    group, sent = Group(4), TensorMessage(True, torch.ones(4, 1, 2), 1, "activation")
    for number in range(2):
        one = start(group, sent)
        observer.start(one)
        (found,) = read_record(path).calls
        assert (found.number, found.shape, found.dtype) == (number, (4, 1, 2), "float32")
        observer.stop(one)
    one = wait(sent)
    observer.start(one)
    record = read_record(path)
    assert record.messages == (MessageCount("sending", "activation", 1, 2, 1),)
    assert record.pipeline == (0, 1, 2, 3)
    assert (record.calls[0].number, record.calls[0].shape) == (0, (4, 1, 2))
    observer.stop(one)
    # What lies in shared memory has no tensor any more.
    observer.start(wait(sent._replace(tensor=None, shape=(4, 1, 2)), 1))
    assert [(call.number, call.shape) for call in read_record(path).calls] == [(1, None)]
    observer.start(call("forward-backward", {"num_microbatches": 1, "model": None}))
    assert read_record(path).messages == ()
    observer.start(wait(TensorMessage(False, torch.ones(2), 2, "gradient")))
    assert read_record(path).messages == (MessageCount("receiving", "gradient", 2, 0, 1),)


def test_below_the_deepest_place_the_innermost_call_is_shown(path, observer):
    calls = [call(f"call-{depth}") for depth in range(MAX_CALLS + 3)]
    for one in calls:
        observer.start(one)
    names = [one.name for one in read_record(path).calls]
    assert names == [f"call-{depth}" for depth in range(MAX_CALLS - 1)] + [calls[-1].name]
    for one in reversed(calls[-2:]):
        observer.stop(one)
    assert read_record(path).calls[-1].name == f"call-{MAX_CALLS}"
    for one in reversed(calls[MAX_CALLS - 1 : -2]):
        observer.stop(one)
    assert [one.name for one in read_record(path).calls] == names[:-1]


def test_calls_that_end_out_of_order(path, observer):
    outer, inner = call("outer"), call("inner")
    observer.start(outer)
    observer.start(inner)
    observer.stop(call("never begun"))
    observer.stop(outer)
    observer.stop(inner)
    assert read_record(path).calls == ()


def test_names_and_groups_without_end(path):
    writer = RecordWriter(path, 0, 1)
    for number in range(2000):
        index = writer.link(f"name {number}", f"a.module.with.a.long.name.{number}")
        writer.push(CallFields(index))
        assert len(read_record(path).calls) == 1 if number % 500 == 0 else True
        writer.pop()
    assert index == 0
    groups = [writer.add_group(f"g{number}", "", [0, 1]) for number in range(MAX_GROUPS + 1)]
    assert groups[-1] == NONE
    assert read_record(path).groups is not None


def test_groups_of_many_ranks_take_little_room(path):
    writer = RecordWriter(path, 0, 100_000)
    every_eighth = list(range(3, 100_000, 8))
    assert writer.add_group("data", "data", every_eighth) == 0
    assert writer.add_group("odd", "", [1, 5, 6]) == 1
    record = read_record(path)
    assert record.groups[0].ranks == tuple(every_eighth)
    assert record.groups[1].ranks == (1, 5, 6)


def test_exceptions_that_leave_a_call(path, observer):
    @traced("inner")
    def inner():
        raise KeyError("lost")

    @traced("outer")
    def outer():
        inner()

    with pytest.raises(KeyError):
        outer()
    caught = read_record(path).caught
    assert (caught.text, caught.call.name) == ("KeyError: 'lost'", "inner")


def test_a_call_within_an_exception_handler_has_not_raised(path, observer):
    @traced("tidy-up")
    def tidy_up():
        pass

    try:
        raise ValueError("before")
    except ValueError:
        tidy_up()
    assert read_record(path).caught is None


def keep_writing(path: str) -> None:
    writer = RecordWriter(path, 0, 1)
    links = [writer.link(f"name-{i}", f"symbol-{i}") for i in range(20)]
    writer.set_state(RUNNING)
    parent, number = os.getppid(), 0
    while os.getppid() == parent:
        number += 1
        for link in links:
            writer.push(CallFields(link, number=number, peer=number % 7))
        writer.tell(step={"num_microbatches": number})
        for _ in links:
            writer.pop()


def test_reading_while_the_rank_writes(path):
    process = multiprocessing.get_context("fork").Process(target=keep_writing, args=(str(path),))
    process.start()
    try:
        deadline = time.monotonic() + 30
        while (read_progress(path) or [STARTING])[0] != RUNNING and time.monotonic() < deadline:
            time.sleep(0.01)
        # On a busy machine a process may wait for its turn: until enough was seen, a second at least.
        seen, least, most = set(), time.monotonic() + 1, time.monotonic() + 60
        while time.monotonic() < least or (len(seen) <= 10 and time.monotonic() < most):
            record = read_record(path)
            if record is None:  # the writer lost its processor within an entry
                time.sleep(0.001)
                continue
            assert [call.name for call in record.calls] == [
                f"name-{i}" for i in range(len(record.calls))
            ]
            seen.add(record.num_events)
        assert len(seen) > 10
    finally:
        process.kill()
        process.join()
    assert read_record(path).state == RUNNING


def test_the_end_is_told(path):
    RecordWriter(path, 0, 1).set_state(RETURNED)
    assert read_record(path).is_over()


def test_b2_a_record_has_its_memory_before_it_is_used():
    # Where a file is only made so long, the first use of a page without room ends the process.
    folder = make_folder("minimegatron-test-")
    try:
        RecordWriter(folder / "0.record", 0, 1)
        found = os.stat(folder / "0.record")
        assert found.st_blocks * 512 >= found.st_size == RECORD_BYTES
    finally:
        remove_folder(folder)


def test_b2_without_room_a_rank_goes_on_unseen_and_says_so(path, monkeypatch, capsys):
    def no_room(self: Path, data: bytes) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_room)
    writer = RecordWriter(path, 0, 1)
    writer.set_state(RUNNING)
    said = capsys.readouterr().err
    assert "the hang doctor does not see this rank" in said
    assert f"{RECORD_BYTES} bytes cannot be written to {path.parent} (No space left" in said
    assert read_record(path) is None
    assert list(path.parent.iterdir()) == []
