"""Which lines a step runs: each that another recorder sees, once, and none of those who watch."""

import json
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

from minimegatron.core.tracing import Call
from minimegatron.tracing.line_recorder import LineRecorder
from minimegatron.tracing.rank_trace import RankTrace
from minimegatron.tracing.recorder import trace
from minimegatron.tracing.recording_shape import check_recording
from minimegatron.tracing.step_lines import NONE
from minimegatron.tracing.surroundings import Surroundings
from minimegatron.tracing.unrolled import unroll
from tests.code_recorder import Recorder
from tests.trace import lines_program as program

FILE = Path(program.__file__)


def recorded(count: int = 3, step: int = 1, num_steps: int = 3, **options):
    """Of several steps, the one that was recorded line by line."""
    program.log.clear()
    with trace(lines_of_step=step, **options) as run:
        for _ in range(num_steps):
            program.train_step(count)
    (rank,) = run.ranks
    return run, rank


def lines_of(rank: RankTrace) -> dict[int, int]:
    """Line of the program's file -> in how many calls it ran."""
    found: Counter = Counter()
    numbers: dict = {}
    for function in rank.lines.functions:
        first = int(function.source.rpartition(":")[2])
        numbers[len(numbers)] = (function, first)
    for call in rank.lines.calls:
        function, first = numbers[call.function]
        found.update(first + line - 1 for line in function.paths[call.path])
    return dict(found)


def marked(words: str) -> int:
    """The number of the line that ends with this comment."""
    lines = FILE.read_text().split("\n")
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {words}")]
    return number


def names(rank: RankTrace) -> list[str]:
    """Of the calls, in order."""
    sources = [rank.sources[function.source].name for function in rank.lines.functions]
    return [sources[call.function].rpartition("lines_program.")[2] for call in rank.lines.calls]


def test_its_lines_are_those_of_another_recorder():
    _, rank = recorded()
    with Recorder(FILE.parent) as other:
        program.train_step(3)
    assert set(lines_of(rank)) == other.record.lines[FILE.name]
    assert Counter(names(rank)) == Counter(
        call.name for call in other.record.calls if call.file == FILE.name
    )


def test_each_line_says_in_how_many_calls_it_ran():
    _, rank = recorded(count=3)
    lines = lines_of(rank)
    counts = {
        "of even ones": 2,
        "of odd ones": 1,
        "asked": 4,
        "yielded": 1,
        "no more": 1,
        "left": 1,
    }
    assert {words: lines[marked(words)] for words in counts} == counts
    assert lines[marked("raised")] == lines[marked("enter")] == lines[marked("exit")] == 1
    for words in ("never", "not run", "of watchers"):
        assert marked(words) not in lines


def test_calls_are_in_order_and_know_their_line():
    _, rank = recorded(count=1)
    assert names(rank) == [
        "train_step",
        "around",
        "Guard.__enter__",
        "numbers",
        "half",
        "is_even",
        "forward",
        "double",
        "double",
        "Guard.__exit__",
        "fails",
        "handing_on.<locals>.call",
        "decorated",
        "often",
        "often",
        "chosen",
        "is_even",
        "chosen",
        "seldom",
    ]
    calls, lines = rank.lines.calls, FILE.read_text().split("\n")
    assert calls[0].parent == NONE
    for number, call in enumerate(calls[1:], 1):
        made_by = calls[call.parent]
        source = rank.lines.functions[made_by.function].source
        line = lines[int(source.rpartition(":")[2]) + call.line - 2]
        name = names(rank)[number].rpartition(".")[2]
        shown = {"__enter__": "Guard()", "__exit__": "Guard()", "call": "decorated("}
        words = (shown.get(name, f"{name}("), "function(*args)", "function(1)")
        assert any(word in line for word in words), (name, line)


def test_a_traced_call_is_the_event_of_the_recording():
    _, rank = recorded(count=2)
    events = [rank.events[call.event].name for call in rank.lines.calls if call.event != NONE]
    assert events == ["train-step", "layer", "layer"]
    of_step = [e for e in rank.events if e.name == "layer"][2:4]
    found = [rank.events[call.event] for call in rank.lines.calls if call.event != NONE][1:]
    assert found == of_step, "of the second step, not of the first"


def test_only_the_step_that_was_asked_for():
    _, rank = recorded(count=2, step=2)
    assert names(rank).count("train_step") == 1
    assert len(rank.events) == 3 * 3, "calls of all steps are recorded as ever"
    _, rank = recorded(step=7)
    assert rank.lines is None
    assert not {"lines"} & set(rank.to_json())


def test_a_program_that_calls_a_schedule_by_itself():
    with trace(lines_of_step=1) as run:
        for count in (5, 4, 3):
            _schedule(count)
    assert names(run.ranks[0]) == ["schedule", "half", "is_even"]
    assert marked("of even ones") in lines_of(run.ranks[0])


def _schedule(count: int) -> int:
    """As the recorder sees a call of a schedule, without what it reads off its arguments."""
    config = {"schedule": "no-pipelining", "pp_size": 1, "num_microbatches": 1}
    with mock.patch.object(Surroundings, "learn", lambda self, call: config):
        return program.schedule(count)


def test_nothing_is_left_on():
    def watching(frame, event, argument):
        return None

    before = torch._C._is_multithreading_enabled()
    sys.settrace(watching)
    try:
        recorded()
        assert sys.gettrace() is watching
    finally:
        sys.settrace(None)
    assert torch._C._is_multithreading_enabled() == before
    with pytest.raises(TypeError), trace(lines_of_step=0):
        program.train_step("not a number")
    assert sys.gettrace() is None


def test_the_backward_runs_in_the_thread_of_the_step():
    seen = []

    class Seam(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch._C._is_multithreading_enabled())
            return grad

    recorder = LineRecorder(0, lambda: None)
    call = Call("train-step", "", "", 0)
    recorder.start(call)
    Seam.apply(torch.ones(1, requires_grad=True)).sum().backward()
    recorder.stop(call)
    assert seen == [False] and torch._C._is_multithreading_enabled()


def test_a_step_that_fails_is_kept_up_to_there():
    with pytest.raises(TypeError), trace(lines_of_step=0, gather=True) as run:
        program.train_step("3")
    (rank,) = run.ranks
    assert names(rank)[:2] == ["train_step", "around"]
    assert marked("exit") in lines_of(rank)


def test_a_step_outside_of_what_is_recorded_is_refused():
    with (
        pytest.raises(ValueError, match=r"lines of step 5 .* recorded steps are 1 to 2"),
        trace(first_step=1, num_steps=2, lines_of_step=5),
    ):
        pass
    with pytest.raises(ValueError, match="0 and all after it"), trace(lines_of_step=-1):
        pass


def test_a_full_recording_says_so(monkeypatch):
    monkeypatch.setattr("minimegatron.tracing.line_recorder.MAX_CALLS", 5)
    _, rank = recorded()
    assert rank.is_cut and len(rank.lines.calls) == 5


def test_it_comes_back_from_its_file(tmp_path):
    run, rank = recorded(directory=tmp_path, gather=True)
    data = json.loads(json.dumps(rank.to_json()))
    check_recording(data)
    again = RankTrace.from_json(data)
    assert again.lines == rank.lines
    assert unroll(type(run).load(tmp_path))[0].num_lines == unroll(run)[0].num_lines


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("functions", 0, "source"), "no.py:1", "of which no text is kept"),
        (("functions", 0, "paths", 0), [10**7, 1], "lines from 1 to 1,000,000"),
        (("functions", 0, "paths", 0), [0], "lines from 1"),
        (("calls", 1), [0, 0, 1], "has 3 numbers"),
        (("calls", 1, 4), 7, "'s path is 7; there are 1"),
        (("calls", 1, 0), 999, "'s function is 999"),
        (("calls", 1, 1), 5, "'s parent is 5; there are 1"),
        (("calls", 1, 1), -1, "'s parent is -1"),
        (("calls", 0, 3), 10**6, "'s event is 1000000"),
    ],
)
def test_what_is_no_recording_is_refused(place, value, words):
    _, rank = recorded()
    data = json.loads(json.dumps(rank.to_json()))
    at = data["lines"]
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    with pytest.raises(ValueError, match=words):
        check_recording(data)
