"""The CUDA side, with a pretended GPU: its events, its own clock, NVTX ranges."""

import time

import pytest
import torch

import minimegatron
from minimegatron.core.tracing import traced
from minimegatron.tracing import device_clock, recorder
from minimegatron.tracing.device_clock import DeviceClock


class Stream:
    """A GPU that does what is queued 5 ms later, and whose clock starts at its own zero."""

    LAG_MS = 5.0

    def __init__(self):
        self.ranges: list[str] = []
        self.open: list[str] = []

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

        def elapsed_time(self, later):
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", stream.push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", stream.pop)
    monkeypatch.setattr(recorder, "get_device", lambda: torch.device("cuda"))
    return stream


def test_marks_are_on_the_programs_clock(gpu):
    clock = DeviceClock()
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


@traced("launches")
def launches():
    computes()


@traced("computes")
def computes():
    time.sleep(0.002)


def test_recordings_have_both_times_and_nvtx_ranges(gpu):
    with minimegatron.trace() as run:
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


def test_nothing_happens_without_a_gpu(monkeypatch):
    def forbidden(*_):
        raise AssertionError("no CUDA here")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", forbidden)
    assert device_clock.open_range("x", on_cuda=False) is None
    device_clock.close_range(None, on_cuda=False)
