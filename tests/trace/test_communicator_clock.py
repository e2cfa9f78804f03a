"""When a communicator did its work, of a pretended GPU whose works end at times that a test says."""

import gc
import math
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders.work import ACTIVATION
from minimegatron.core.pipeline_parallel import p2p_communication
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, TensorMessage
from minimegatron.core.tracing import observed_by, traced
from minimegatron.tracing import recorder
from minimegatron.tracing.clock import Alignment
from minimegatron.tracing.to_events import to_rank_trace
from tests.trace.fake_gpu import NcclGroup

COMPUTE = "compute"
FURTHER = "further"


class Gpu:
    """Streams that know how far they are, in ms. `asked` holds what they were asked to wait for."""

    def __init__(self):
        self.now = {COMPUTE: 0.0, FURTHER: 0.0}
        self.stream = COMPUTE
        self.host_ms = 0.0
        self.stuck_from = math.inf
        """From then on it waits for something that never comes."""
        self.asked: list[tuple[str, str]] = []
        self.next: Work | None = None

    def computes(self, until: float) -> None:
        self.now[COMPUTE] = until

    def take(self, *_, **__) -> "Work":
        """What torch returns: the work that the test has put there."""
        work, self.next = self.next, None
        return work

    def all_reduce(self, tensor, op, group, async_op) -> "Work | None":
        """As torch does it with NCCL: unless `async_op`, in the current stream."""
        work = self.take()
        if async_op:
            return work
        self.computes(work.ends)
        return None

    @contextmanager
    def on(self, stream):
        self.stream = stream
        yield
        self.stream = COMPUTE


class Work(dist.Work):
    def __init__(self, gpu: Gpu, name: str, ends: float):
        super().__init__()
        self.gpu, self.name, self.ends = gpu, name, ends

    def wait(self, timeout=None) -> bool:
        self.gpu.asked.append((self.gpu.stream, self.name))
        self.gpu.now[self.gpu.stream] = max(self.gpu.now[self.gpu.stream], self.ends)
        return True

    def is_completed(self) -> bool:
        return self.gpu.host_ms >= self.ends


@dataclass(frozen=True)
class Group(NcclGroup):
    """`members` are global ranks, `backend` what carries its messages."""

    members: tuple[int, ...] = (0, 2)
    backend: str = "nccl"
    bound_device_id: str | None = None

    def name(self) -> str:
        return self.backend


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.at = gpu.now[gpu.stream]

        def synchronize(self):
            pass

        def query(self):
            return self.at < gpu.stuck_from

        def elapsed_time(self, later):
            return later.at - self.at

    for name, value in {
        "Event": Event,
        "Stream": lambda priority: FURTHER,
        "stream": gpu.on,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *_: None)
    monkeypatch.setattr(dist, "all_reduce", gpu.all_reduce)
    monkeypatch.setattr(dist, "isend", gpu.take)
    monkeypatch.setattr(dist, "get_backend", lambda group: group.backend)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(group.members))
    monkeypatch.setattr(recorder, "get_device", lambda: torch.device("cuda"))
    return gpu


@contextmanager
def recording(gpu):
    """What is recorded inside; `spans` is filled at the end: per event with a lane, in ms."""
    mine = recorder.Recorder(lambda: round(gpu.host_ms * 1e6))
    found = SimpleNamespace(spans=[], events=[], clock=mine.communicator_clock)
    with observed_by(mine):
        yield found
    mine.close()
    end = Alignment() if gpu.stuck_from == math.inf else None  # None: an error has ended the run
    found.events = to_rank_trace(mine, Alignment(), end).events
    for event in found.events:
        if "communicator" in event.attributes:
            name, start, end = (
                event.attributes[key] for key in ("communicator", "device_start", "device_end")
            )
            found.spans.append((event.name, name, start / 1e3, end / 1e3))


def all_reduce(gpu, name, ends, group, async_op=True):
    """The package's own, which gets a work that ends then."""
    gpu.next = Work(gpu, name, ends)
    return collectives.all_reduce(torch.ones(2), group, async_op=async_op)


DP = Group(0, 2, "3", "dp+dp_cp")


def test_an_overlapped_collective_has_the_times_of_its_own_stream(gpu):
    with recording(gpu) as found:
        gpu.computes(10)
        handle = all_reduce(gpu, "sum", 50, DP)
        gpu.computes(30)
        handle.wait()
    assert found.spans == [("all-reduce", "dp 0,2", 10, 50)]
    start, wait = found.events
    assert (start.start, start.end) == (10_000, 10_000)  # the compute stream's, as before
    assert (wait.start, wait.end) == (30_000, 50_000)


def test_a_collective_that_is_waited_for_within_its_call(gpu):
    with recording(gpu) as found:
        gpu.computes(10)
        all_reduce(gpu, "sum", 50, DP, async_op=False)
    assert found.spans == [("all-reduce", "dp 0,2", 10, 50)]
    assert gpu.asked == []


def test_a_communicator_does_one_thing_after_the_other(gpu):
    """The first was posted first, and ends first, although the program waits for it last."""
    with recording(gpu) as found:
        first = all_reduce(gpu, "first", 40, DP)
        gpu.computes(10)
        second = all_reduce(gpu, "second", 60, DP)
        elsewhere = all_reduce(gpu, "third", 20, Group(0, 2, "4", "tp"))
        second.wait()
        first.wait()
    assert found.spans == [("all-reduce", "dp 0,2", 0, 40), ("all-reduce", "dp 0,2", 40, 60)]
    # Never before the program: torch keeps memory until the first wait.
    assert gpu.asked == [
        (COMPUTE, "second"),
        (FURTHER, "first"),
        (FURTHER, "second"),
        (COMPUTE, "first"),
    ]
    assert elsewhere is not None  # nobody waited for it, and it has no end


def test_a_program_slower_than_its_gpu_sees_work_end(gpu):
    @traced("computes")
    def computes(until):
        gpu.host_ms = until

    with recording(gpu) as found:
        handle = all_reduce(gpu, "sum", 5, DP)
        computes(4)
        computes(6)
        computes(90)
        gpu.computes(90)
        handle.wait()
    assert found.spans == [("all-reduce", "dp 0,2", 0, 6)]
    assert gpu.asked == [(COMPUTE, "sum")]


def test_handles_live_no_longer_than_the_program_needs_them(gpu):
    with recording(gpu):
        handle = all_reduce(gpu, "sum", 50, DP)
        work = weakref.ref(handle.work)
        handle.wait()
        del handle
        gc.collect()
        assert work() is None


@pytest.mark.parametrize("name", ["all-reduce", "broadcast"])
def test_what_the_compute_stream_does_itself(gpu, monkeypatch, name):
    """The stream of its group's communicator does not wait for it, nor the program for that stream."""
    # NCCL itself keeps the order of a communicator's work.
    monkeypatch.setattr(dist, "broadcast", lambda tensor, group, group_src: gpu.computes(60))
    with recording(gpu) as found:
        handle = all_reduce(gpu, "sum", 50, DP)
        if name == "broadcast":
            collectives.broadcast(torch.ones(2), 0, DP)
        else:
            all_reduce(gpu, "at once", 60, DP, async_op=False)
        assert gpu.asked == []
        handle.wait()
    assert sorted(found.spans) == [("all-reduce", "dp 0,2", 0, 50), (name, "dp 0,2", 50, 60)]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_what_no_stream_carries_has_no_lane_and_is_not_waited_for(gpu, monkeypatch, backend):
    """gloo, and shared memory; a tensor of a GPU goes through the host there."""
    group = Group(0, 2, "3", "pp", backend=backend)
    monkeypatch.setattr(p2p_communication, "get_timeout", lambda group: 1.0)
    with recording(gpu) as found:
        handle = all_reduce(gpu, "sum", 50, group)
        p2p = communicator(group)
        lone_message(gpu, p2p, 20)
        p2p.finish()
        handle.wait()
    assert found.spans == []
    assert [stream for stream, _ in gpu.asked] == [COMPUTE, COMPUTE]


def communicator(group) -> P2PCommunicator:
    config = ModelParallelConfig(
        pipeline_model_parallel_size=group.size(),
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        overlap_p2p_comm=True,
    )
    return P2PCommunicator(group, config)


def lone_message(gpu, p2p, ends):
    gpu.next = Work(gpu, "message", ends)
    p2p.exchange([TensorMessage(True, torch.ones(2), 1, ACTIVATION)])


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (Group(3, 4, "5", "pp+mp", (0, 2, 4, 6)), "pp 2:6"),
        # Of a group that torch connected for one device, lone messages have no other.
        (Group(3, 4, "5", "pp", (0, 2, 4, 6), bound_device_id="cuda:0"), "pp 0,2,4,6"),
        (Group(3, 4, "5", "pp", (4, 5, 6, 7), bound_device_id="cuda:0"), "pp 4-7"),
        (Group(3, 4, "5", "tp+pp", (4, 5, 6, 7)), "pp 5:7"),
        (Group(3, 4, "5", "", (4, 5, 6, 7)), "group 5:7"),
    ],
)
def test_names(gpu, group, name):
    with recording(gpu) as found:
        lone_message(gpu, communicator(group), 20)
        gpu.host_ms = 100
        traced("anything")(lambda: None)()
    assert found.spans == [("p2p-start", name, 0, 100)]


def test_each_step_counts_its_messages_anew(gpu):
    """As the pipeline's communicator does, whose waits name a message by its number."""
    p2p = communicator(Group(0, 2, "3", "pp"))
    with recording(gpu) as found:
        for ends in (20, 50):
            found.clock.begin_step()
            p2p.begin_step()
            lone_message(gpu, p2p, ends)
            p2p.finish()
    assert found.spans == [("p2p-start", "pp 0:2", 0, 20), ("p2p-start", "pp 0:2", 20, 50)]


def test_two_groups_of_one_name_have_two_lanes(gpu):
    with recording(gpu) as found:
        for number in ("3", "4"):
            all_reduce(gpu, number, 5, Group(0, 2, number, "dp"), async_op=False)
    assert [span[1] for span in found.spans] == ["dp 0,2", "dp 0,2 #2"]


def test_work_that_never_ends_has_no_times(gpu):
    with recording(gpu) as found:
        all_reduce(gpu, "first", 20, DP, async_op=False)
        all_reduce(gpu, "second", 50, DP).wait()
        gpu.stuck_from = 40
    assert found.spans == [("all-reduce", "dp 0,2", 0, 20)]
    assert not found.events[0].attributes.get("unfinished")
