"""The CUDA side, with a pretended GPU: its events, its own clock, NVTX ranges."""

import math
import time

import pytest
import torch

import minimegatron
from minimegatron.core.tracing import traced
from minimegatron.tracing import device_clock, recorder
from minimegatron.tracing.device_clock import DeviceClock
from tests.trace.fake_run import Clock


class Stream:
    """A GPU that does what is queued 5 ms later, and whose clock starts at its own zero."""

    LAG_MS = 5.0

    def __init__(self):
        self.ranges: list[str] = []
        self.open: list[str] = []
        self.stuck_from = math.inf
        """When the GPU began to wait for a message that never comes."""
        self.num_waits = 0

    def synchronize(self) -> None:
        assert self.stuck_from == math.inf, "waits for what never ends"
        self.num_waits += 1

    def now_ms(self) -> float:
        return time.perf_counter() * 1e3 + self.LAG_MS

    def push(self, name: str) -> None:
        self.open.append(name)
        self.ranges.append("/".join(self.open))

    def pop(self) -> None:
        self.open.pop()


@pytest.fixture
def gpu(monkeypatch):
    stream = Stream()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = stream.now_ms()

        def synchronize(self):
            pass

        def query(self):
            return self.at <= stream.stuck_from

        def elapsed_time(self, later):
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", stream.synchronize)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", stream.push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", stream.pop)
    monkeypatch.setattr(recorder, "get_device", lambda: torch.device("cuda"))
    return stream


class OwnClock(Clock):
    """And `sleep` takes its time; a busy machine takes none."""

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


@pytest.fixture
def read_clock(monkeypatch):
    clock = OwnClock()
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(time, "perf_counter_ns", clock.read)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.read() / 1e9)
    return clock.read


def test_marks_are_on_the_programs_clock(gpu, read_clock):
    clock = DeviceClock(read_clock)
    began = time.perf_counter_ns()
    marks = [clock.mark()]
    time.sleep(0.01)
    clock.set_anchor()
    time.sleep(0.01)
    marks.append(clock.mark())
    ended = time.perf_counter_ns()
    first, second = map(clock.times(), marks)
    assert began <= first + 2_000_000 and second <= ended + 2_000_000
    assert 20_000_000 <= second - first <= ended - began + 1000


GPU_LAG_US = Stream.LAG_MS * 1000


@traced("launches")
def launches():
    computes()


@traced("computes")
def computes():
    time.sleep(0.002)


def test_recordings_have_both_times_and_nvtx_ranges(gpu, read_clock):
    with minimegatron.trace(read_clock=read_clock) as run:
        launches()
    (recording,) = run.ranks
    assert recording.device == "cuda"
    assert gpu.ranges == ["launches", "launches/computes"] and gpu.open == []
    for event in recording.events:
        host = event.attributes["host_start"], event.attributes["host_end"]
        # The pretended GPU lags behind by the same time throughout, so lengths agree.
        assert event.end - event.start == pytest.approx(host[1] - host[0], abs=500)
        assert event.end - event.start >= 2000
    outer, inner = recording.events
    assert outer.start <= inner.start and inner.end <= outer.end


class PeerIsGone(Exception):
    pass


def test_an_error_does_not_wait_for_a_gpu_that_waits_for_ever(gpu):
    with pytest.raises(PeerIsGone), minimegatron.trace() as run:
        launches()
        gpu.stuck_from = gpu.now_ms()
        time.sleep(0.001)
        launches()
        raise PeerIsGone
    done, done_inside, stuck, stuck_inside = run.ranks[0].events
    assert not any("unfinished" in event.attributes for event in (done, done_inside))
    for event in (stuck, stuck_inside):
        # The program's own times are all that is known.
        assert event.attributes["unfinished"] and "host_start" not in event.attributes
        assert event.end - event.start >= 2000
    assert done.end <= stuck.start + GPU_LAG_US and stuck.start <= stuck_inside.start


def test_a_step_whose_anchor_never_ends(gpu):
    clock = DeviceClock()
    before = clock.mark()
    gpu.stuck_from = gpu.now_ms()
    time.sleep(0.001)
    clock.set_anchor()
    times = clock.times(wait=False)
    assert times(before) is not None and times(clock.mark()) is None
    assert gpu.num_waits == 1  # at the beginning


def test_the_anchor_is_bracketed(gpu, read_clock):
    """A clock that is read 30 us late, and an event that ends 40 us after it was asked for."""
    readings = iter([1000, 41_000])
    clock = DeviceClock(lambda: next(readings))
    assert clock.residual == 20_000 and clock._began == 21_000
    with minimegatron.trace(read_clock=read_clock) as run:
        launches()
    assert 0 < run.ranks[0].clock.worst_residual_us == run.clock_residual_us < 1000


def test_nothing_happens_without_a_gpu(monkeypatch):
    def forbidden(*_):
        raise AssertionError("no CUDA here")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", forbidden)
    assert device_clock.open_range("x", on_cuda=False) is None
    device_clock.close_range(None, on_cuda=False)
