"""Paced runs: lengths are the pace's, everything else is real, and every output says so."""

import time

import pytest

import minimegatron
from minimegatron.core import parallel_state, tracing
from minimegatron.core.tracing import traced
from minimegatron.planner.actions import BACKWARD, FORWARD
from tests.ranks import run_ranks
from tests.trace.recordings import BACKWARD_MS, FORWARD_MS, run_step


@traced("forward-compute")
def forward_compute(seconds: float = 0.0) -> None:
    time.sleep(seconds)


@traced("backward-compute")
def backward_compute() -> None:
    pass


def seconds_of(function, *args) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


class Stopwatch:
    """An observer that only takes times."""

    def start(self, call):
        self.began = time.perf_counter()

    def stop(self, call):
        self.seconds = time.perf_counter() - self.began


def test_calls_take_at_least_their_pace():
    with minimegatron.pace(20, 30) as pacer:
        assert seconds_of(forward_compute) >= 0.020
        assert seconds_of(backward_compute) >= 0.030
        num_late = pacer.num_late
        forward_compute(0.025)
        assert pacer.num_late == num_late + 1
    assert not tracing._observers and not tracing._innermost


def test_the_pace_is_part_of_the_call_for_other_observers():
    for before, after in ((Stopwatch(), None), (None, Stopwatch())):
        with (
            tracing.observed_by(before),
            minimegatron.pace(20, 20),
            tracing.observed_by(after),
        ):
            forward_compute()
        assert (before or after).seconds >= 0.020


@pytest.mark.parametrize("lengths", [(-1, 2), (1, -2), (float("nan"), 1), (float("inf"), 1)])
def test_bad_paces_are_refused(lengths):
    message = r"_ms is .*; give 0 or more milliseconds"
    with pytest.raises(ValueError, match=message), minimegatron.pace(*lengths):
        pass


def test_one_pace_at_a_time():
    with (
        minimegatron.pace(1, 2),
        pytest.raises(ValueError, match="paced already, to 1/2 ms"),
        minimegatron.pace(3, 4),
    ):
        pass


def both_ways(p: int, M: int):
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=p)
    real = run_step(p, M)
    with minimegatron.pace(2, 3):
        paced = run_step(p, M)
    return real, paced


def test_losses_and_gradients_are_the_same():
    for real, paced in run_ranks(both_ways, 3, 3, 4):
        assert real[0] == paced[0]
        assert all((a == b).all() for a, b in zip(real[1], paced[1], strict=True))


def test_recordings_know_their_pace(plain, interleaved):
    step = plain.step(1)
    assert step.pace == {"forward_ms": FORWARD_MS, "backward_ms": BACKWARD_MS}
    assert interleaved.step(0).pace is None
    for rank in range(3):
        for index in step.work(rank):
            event = step.events[rank][index]
            least = {FORWARD: FORWARD_MS, BACKWARD: BACKWARD_MS}[event.action.kind]
            assert event.end - event.start >= 1e3 * least


def test_a_paced_step_is_as_long_as_its_plan_or_a_little_longer(plain):
    step = plain.step(1)
    ideal = float(step.simulation.makespan)
    assert ideal == (4 + 3 - 1) * (FORWARD_MS + BACKWARD_MS) * 1e3
    assert ideal <= step.makespan
    assert float(step.formulas[1].value) == pytest.approx(2 / 6)
    assert step.bubble_over_total >= 2 / 6 - 0.02
    assert step.num_late >= 0


def test_every_output_says_that_it_was_paced(plain, tmp_path):
    words = "paced: forward 8 ms, backward 16 ms"
    assert words in plain.report()
    plain.to_html(tmp_path / "x.html")
    assert words in (tmp_path / "x.html").read_text()
    plain.to_chrome(tmp_path / "x.json")
    assert words in (tmp_path / "x.json").read_text()
    figure = plain.plot()
    assert any(words in text.get_text() for text in figure.texts)
