"""The detector of slow ranks: free while off; measures, survives errors and names ranks while on."""

import contextlib
import inspect
import io
import sys
import time

import pytest
import torch

from minimegatron import pretrain_bert, pretrain_gpt, pretrain_mamba, pretrain_t5, train_rl
from minimegatron.core import straggler_detector, timer_reports, utils
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.parallel_state import get_pipeline_model_parallel_rank
from minimegatron.core.straggler_detector import StragglerDetector
from minimegatron.training.global_vars import get_train_state
from tests.ranks import run_ranks
from tests.training.short_runs import MODEL, PP2, little_text

stimer = StragglerDetector()


class Clock:
    """Time that passes only when told to."""

    now = 0.0

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


clock = Clock()


@pytest.fixture(autouse=True)
def told_time(monkeypatch):
    monkeypatch.setattr(timer_reports.time, "perf_counter", lambda: clock.now)
    yield
    stimer.configure(0, 0, coordinates={})


def turn_on(**how) -> None:
    stimer.configure(1, 0, enabled=True, **how)


def forward(seconds: float) -> None:
    with stimer:
        clock.pass_by(seconds)


def report_of(monkeypatch, rows: list[list[float]], mmcnt: int = 1, flops: float = 0.0) -> str:
    """What rank 0 prints where the ranks' rows are `rows`: forward, data, stage, tp."""
    monkeypatch.setattr(straggler_detector, "gather_rows", lambda row: torch.tensor(rows))
    turn_on(mmcnt=mmcnt, coordinates={"stage": 0, "tp": 0})
    stimer.world = len(rows)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert stimer.report(flops, 10)
    return printed.getvalue()


# -- Off --


def test_there_is_one_and_megatron_s_door_to_it():
    assert StragglerDetector() is stimer is utils.StragglerDetector()
    turn_on()
    assert StragglerDetector().enabled  # unlike Megatron's, which is off again
    assert {program.forward_step.__globals__["stimer"] for program in PROGRAMS} == {stimer}


PROGRAMS = (pretrain_gpt, pretrain_bert, pretrain_t5, pretrain_mamba, train_rl)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_each_program_times_its_batch_and_its_forward(program):
    source = inspect.getsource(program.forward_step)
    assert source.count("with stimer(bdata=True):") == source.count("with stimer:") == 1
    body = source.partition("with stimer:\n")[2].splitlines()[0]
    assert "= model(" in body or "get_logprobs(model" in body


def test_off_it_takes_every_call_and_enters_five_functions(monkeypatch):
    monkeypatch.setattr(
        timer_reports.time, "perf_counter", lambda: pytest.fail("looked at the clock")
    )
    monkeypatch.setattr(straggler_detector, "gather_rows", lambda row: pytest.fail("gathered"))
    assert not stimer.enabled
    stimer.start()
    stimer.start()
    stimer.stop()
    stimer.reset()
    assert stimer.elapsed() == (0.0, 0.0)
    assert stimer.report(1e12, 10) is False
    file, entered = straggler_detector.__file__, []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename == file:
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    with stimer(bdata=True):
        pass
    with stimer:
        pass
    sys.setprofile(None)
    assert entered == ["__call__", "__enter__", "__exit__", "__enter__", "__exit__"]


# -- On --


def test_forwards_and_batches_are_timed_apart():
    turn_on()
    for _ in range(2):
        with stimer(bdata=True):
            clock.pass_by(0.5)
        clock.pass_by(64.0)  # waits for the stage before
        forward(2.0)
        clock.pass_by(64.0)
    stimer.start()
    clock.pass_by(1.0)
    stimer.stop()
    stimer.stop()
    assert stimer.elapsed() == (5000.0, 1000.0)
    assert stimer.elapsed() == (0.0, 0.0)
    forward(2.0)
    stimer.reset()
    assert stimer.elapsed() == (0.0, 0.0)


@pytest.mark.parametrize("bdata", [False, True])
def test_after_a_failed_forward_the_next_one_is_timed(bdata):
    turn_on()
    with pytest.raises(KeyError), stimer(bdata=bdata):
        clock.pass_by(1.0)
        raise KeyError("inside")
    clock.pass_by(64.0)
    forward(2.0)
    assert stimer.elapsed() == ((2000.0, 1000.0) if bdata else (3000.0, 0.0))
    with pytest.raises(RuntimeError, match="'forward' runs already"), stimer:
        forward(1.0)
    forward(2.0)
    assert stimer.elapsed() == (2000.0, 0.0)


def test_configure_counts_each_time_and_drops_what_was_measured():
    turn_on()
    stimer.start()
    stimer.configure(1, 0)
    assert not stimer.enabled
    stimer.stop()
    turn_on()
    forward(2.0)
    assert stimer.elapsed() == (2000.0, 0.0)


# -- Reports --


def test_a_report_is_of_one_step_and_begins_anew(capsys):
    turn_on(coordinates={"stage": 0})
    for _ in range(3):
        for _ in range(10):
            forward(0.25)
        assert stimer.report(log_interval=0) is False
        assert stimer.report(log_interval=10) is True
        assert "stage 0: 250.00, data 0.00\n" in capsys.readouterr().out
    stimer.configure(2, 1, enabled=True)
    assert stimer.report(log_interval=10) is False  # another rank prints
    assert capsys.readouterr().out == ""


ROWS = [[20.0, 1.0, 0, 0], [24.0, 9.0, 0, 1], [30.0, 0.0, 1, 0], [26.0, 8.0, 1, 1]]


def test_a_report_has_each_stage_and_names_ranks(monkeypatch):
    assert report_of(monkeypatch, ROWS).splitlines()[1:] == [
        "    stage 0: 22.00, data 5.00; slowest rank 1 24.00",
        "    stage 1: 28.00, data 4.00; slowest rank 2 30.00",
        "    slowest: rank 2 (stage 1, tp 0) 30.00",
        "    fastest: rank 0 (stage 0, tp 0) 20.00",
    ]


def test_more_ranks_are_named_if_they_are_not_all(monkeypatch):
    text = report_of(monkeypatch, ROWS, mmcnt=2)
    assert "slowest: rank 2 (stage 1, tp 0) 30.00; rank 3 (stage 1, tp 1) 26.00\n" in text
    assert "fastest: rank 0 (stage 0, tp 0) 20.00; rank 1 (stage 0, tp 1) 24.00\n" in text
    assert report_of(monkeypatch, ROWS, mmcnt=4) == report_of(monkeypatch, ROWS)


def test_throughput_is_estimated_where_somebody_counted(monkeypatch):
    """1200 TFLOP in 10 steps are 30 a rank and step, a third of them in 30 ms: 333 TFLOP/s."""
    text = report_of(monkeypatch, ROWS, flops=1200e12)
    assert "slowest: rank 2 (stage 1, tp 0) 30.00 (333.33 TF/s)" in text


# -- Real ranks --

FLAGS = f"{PP2} --train-iters 6 --log-interval 3 --log-straggler --global-batch-size 2"
SLOW_MS = 2 * 100


def train_with_a_slow_stage() -> str:
    """In a rank: each forward of stage 1 sleeps in the first three steps, of stage 0 in the others."""
    fast_forward = GPTModel.forward

    def slow_forward(self, *args, **kwargs):
        if get_pipeline_model_parallel_rank() == (get_train_state().iteration < 3):
            time.sleep(SLOW_MS / 2000)
        return fast_forward(self, *args, **kwargs)

    GPTModel.forward = slow_forward
    sys.argv = ["pretrain_gpt", *MODEL.split(), *FLAGS.split()]
    with little_text(), contextlib.redirect_stdout(io.StringIO()) as printed:
        pretrain_gpt.main()
    assert not stimer.enabled
    return printed.getvalue()


def test_the_slow_stage_is_named_and_not_the_one_that_waits():
    printed, of_the_other = run_ranks(train_with_a_slow_stage, 2)
    assert "slowest" not in of_the_other
    lines = printed.splitlines()
    reports = [i for i, line in enumerate(lines) if line.endswith("getting its batches (ms):")]
    assert len(reports) == 2
    for begin, slow in zip(reports, (1, 0), strict=True):
        times = [float(lines[begin + 1 + s].split()[2].strip(",")) for s in (0, 1)]
        assert times[slow] >= SLOW_MS and times[1 - slow] < SLOW_MS, lines
        assert lines[begin + 3].startswith(f"    slowest: rank {slow} (stage {slow}, tp 0, dp 0)")
        assert lines[begin + 4].startswith(f"    fastest: rank {1 - slow} (stage {1 - slow}, ")
