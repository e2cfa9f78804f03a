"""Timers on their own, as an observer of traced calls, and compared over ranks."""

import time
from unittest import mock

import pytest
import torch.distributed as dist

from minimegatron.core import timer_reports
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.timers import Timers
from minimegatron.core.tracing import observed_by, traced
from tests.ranks import run_ranks


class Clock:
    """Time that passes only when told to."""

    now = 0.0

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


clock = Clock()


@pytest.fixture
def told_time(monkeypatch):
    monkeypatch.setattr(timer_reports.time, "perf_counter", lambda: clock.now)


def test_elapsed_active_time_and_reset(told_time):
    timer = Timers(2)("work")
    for _ in range(2):
        timer.start()
        clock.pass_by(2.0)
        timer.stop()
        clock.pass_by(1.0)
    assert timer.elapsed(reset=False) == 4.0
    assert timer.elapsed() == 4.0
    assert timer.elapsed() == 0.0
    assert timer.active_time() == 4.0
    timer.start()
    clock.pass_by(8.0)
    assert timer.elapsed() == 8.0
    assert timer.is_running()
    clock.pass_by(16.0)
    timer.stop()
    assert timer.elapsed() == 16.0


def test_misuse_is_refused():
    timers = Timers(2)
    with pytest.raises(RuntimeError, match="'x' does not run"):
        timers("x").stop()
    timers("x").start()
    with pytest.raises(RuntimeError, match="'x' runs already"):
        timers("x").start()
    timers("y", log_level=1)
    with pytest.raises(ValueError, match="timer 'y' has log_level 1, not 0"):
        timers("y", log_level=0)
    with pytest.raises(ValueError, match="log_level is 3; use 0, 1 or 2"):
        Timers(3)
    with pytest.raises(ValueError, match="log_option is 'min'"):
        Timers(1, "min")
    with pytest.raises(ValueError, match="normalizer is 0"):
        timers.log(normalizer=0)


def test_names_above_the_log_level_measure_nothing():
    timers = Timers(0)
    timers("interval-time", log_level=0).start()
    timers("interval-time").stop()
    timers("detail", log_level=2).start(barrier=True)
    timers("detail").stop()
    with pytest.raises(RuntimeError, match="'detail' is above the log level"):
        timers("detail").elapsed()
    assert "interval-time" in timers.get_all_timers_string()
    assert "detail" not in (timers.get_all_timers_string(["detail"]) or "")


@traced("outer")
def outer(depth: int) -> None:
    clock.pass_by(2.0)
    inner()
    if depth:
        outer(depth - 1)


@traced("inner")
def inner() -> None:
    clock.pass_by(1.0)


@traced("forward-backward")
def whole() -> None:
    inner()


@traced("breaks")
def breaks() -> None:
    raise KeyError("inside")


def test_watches_traced_calls_and_counts_nested_ones_once(told_time):
    timers = Timers(2)
    with observed_by(timers):
        outer(2)
        with pytest.raises(KeyError):
            breaks()
    assert timers("outer").elapsed() == 9.0
    assert timers("inner").elapsed() == 3.0
    assert not timers("breaks").is_running()
    outer(0)
    assert timers("outer").elapsed() == 0.0


def test_log_level_of_traced_calls(told_time):
    timers = Timers(1)
    with observed_by(timers):
        whole()
    assert "forward-backward" in timers.get_all_timers_string(reset=False)
    assert "inner" not in timers.get_all_timers_string()
    # A caller that runs the timer itself is not disturbed.
    timers("forward-backward", log_level=1).start()
    with observed_by(timers):
        whole()
    assert timers("forward-backward").is_running()
    timers("forward-backward").stop()


class Writer:
    def __init__(self):
        self.written = {}

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.written[name] = (value, iteration)


def compare_ranks() -> dict:
    rank = dist.get_rank()
    timers = Timers(2, "minmax")
    timers("both").start(barrier=True)
    time.sleep(0.05 * (rank + 1))
    timers("both").stop()
    if rank == 1:
        timers("second only").start()
        timers("second only").stop()
    text = timers.get_all_timers_string(reset=False, barrier=True)
    writer = Writer() if rank == 0 else None
    timers.write(["both", "nowhere"], writer, 7)
    timers.log()
    return {"text": text, "written": writer and writer.written}


def test_ranks_are_compared_though_they_ran_different_timers():
    first, second = run_ranks(compare_ranks, 2)
    assert first["text"] == second["text"]
    lines = first["text"].splitlines()
    assert lines[0] == "(min, max) time across ranks (ms):"
    low, high = lines[1].split("(")[1].rstrip(")").split(", ")
    assert 50 <= float(low) < float(high)
    assert float(high) >= 100
    assert "second only" in lines[2]
    seconds, iteration = first["written"]["both-time"]
    assert list(first["written"]) == ["both-time"]
    assert seconds >= 0.1
    assert iteration == 7


# -- Level 1 begins together --


@pytest.mark.parametrize(("with_barrier", "level"), [(True, 1), (False, 1), (True, 2)])
def test_parts_of_a_step_begin_with_a_barrier(with_barrier, level, monkeypatch):
    """If the configuration says so. Small parts never do: ranks have different numbers of them."""
    waited = []
    monkeypatch.setattr(timer_reports.utils, "barrier", waited.append)
    monkeypatch.setattr(timer_reports.dist, "is_initialized", lambda: True)
    timers = Timers(level)
    timers.told(ModelParallelConfig(barrier_with_L1_time=with_barrier))

    @traced("forward-compute")
    def small():
        pass

    @traced("forward-backward")
    def big():
        small()
        small()

    with observed_by(timers):
        big()
        big()
    assert len(waited) == 2 * with_barrier
    assert timers("forward-backward").elapsed() > 0


def begin_together():
    """In a rank: whether the other one had come when this one's clock started."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    timers = Timers(1)
    timers.told(ModelParallelConfig())
    seen, perf_counter = [], time.perf_counter

    def clock():
        seen.append(store.check(["rank 1 is here"]))
        return perf_counter()

    @traced("forward-backward")
    def part():
        pass

    if rank == 1:  # comes when rank 0 is about to enter
        store.wait(["rank 0 is here"])
        time.sleep(0.05)
        store.set("rank 1 is here", "")
    store.set("rank 0 is here", "")
    with mock.patch.object(timer_reports.time, "perf_counter", clock), observed_by(timers):
        part()
    return seen[0]


def test_the_first_rank_waits_for_the_last():
    assert run_ranks(begin_together, 2) == [True, True]
