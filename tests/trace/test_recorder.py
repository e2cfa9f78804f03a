"""What a recording holds: every link, nested, named, placed, timed; and nothing it should not."""

import gc
import linecache
import time
import weakref

import pytest
import torch

import minimegatron
from minimegatron.core import parallel_state, tracing
from minimegatron.core.tracing import traced
from minimegatron.planner.actions import BACKWARD, COMMUNICATE, FORWARD
from minimegatron.tracing.rank_trace import RankTrace
from minimegatron.tracing.recorded_source import function_text
from minimegatron.tracing.recorder import Recorder
from tests.ranks import run_ranks
from tests.trace.recordings import run_step


def test_every_link_is_there_and_nested(plain):
    for recording in plain.ranks:
        names = {event.name for event in recording.events}
        links = {"forward-backward", "forward-compute", "backward-compute", "p2p-start", "p2p-wait"}
        assert names >= links | {"forward-step-func"}
        assert ("loss-func" in names) == (recording.coordinates["pp"] == 2)
        for index, event in enumerate(recording.events):
            assert event.end >= event.start
            if event.parent is not None:
                parent = recording.events[event.parent]
                assert event.parent < index
                assert parent.start <= event.start and event.end <= parent.end


def test_the_users_functions_are_named(plain):
    events = plain.ranks[2].events
    names = {event.name: event for event in events}
    step_func, loss_func = names["forward-step-func"], names["loss-func"]
    assert step_func.symbol == "tests.trace.recordings.users_forward_step"
    assert loss_func.symbol == "tests.trace.recordings.users_loss_func"
    assert step_func.file == "tests/trace/recordings.py"
    assert "def users_forward_step" in linecache.getline(step_func.file, step_func.line)


def test_coordinates_phases_and_microbatches(plain):
    assert [rank.coordinates["pp"] for rank in plain.ranks] == [0, 1, 2]
    assert all(rank.sizes["pp"] == 3 and rank.world_size == 3 for rank in plain.ranks)
    step = plain.step(1)
    assert [a.phase for a in step.actions(0) if a.kind == FORWARD] == ["warmup"] * 2 + [
        "steady"
    ] * 2
    assert [a.microbatch for a in step.actions(1) if a.kind == BACKWARD] == [0, 1, 2, 3]
    # What happens inside a forward belongs to its microbatch too.
    inner = [event for event in step.events[1].values() if event.name == "forward-step-func"]
    assert [event.action.microbatch for event in inner] == [0, 1, 2, 3]


def test_messages_say_how_much_of_what(plain):
    step = plain.step(0)
    sends = [m for a in step.actions(0) for m in a.messages if m.direction == "send"]
    assert {m.num_bytes for m in sends} == {5 * 2 * 6 * 8}
    call = next(e for e in step.events[0].values() if e.action.call == "send_forward")
    assert call.attributes["shape"] == [5, 2, 6] and call.attributes["dtype"] == "float64"


def test_call_stacks_point_at_lines_that_make_the_call(plain):
    recording = plain.ranks[1]
    checked = set()
    for event in recording.events:
        if event.action.kind in (FORWARD, BACKWARD, COMMUNICATE):
            source, line = recording.stack(event)[-1]
            first_line = int(source.rpartition(":")[2])
            text = recording.sources[source].text.splitlines()[line - first_line]
            method = event.symbol.rpartition(".")[2]
            assert f"{method}(" in text, (method, source, line)
            checked.add(method)
    assert checked >= {"forward_step", "backward_step", "send_forward", "recv_forward"}
    stack = recording.stack(next(e for e in recording.events if e.action.kind == FORWARD))
    names = [recording.sources[source].name.rpartition(".")[2] for source, _ in stack]
    schedule = "forward_backward_pipelining_without_interleaving"
    assert names[-3:] == [schedule, "one_f_one_b", "forward_step"]


def test_a_recording_survives_its_file(plain_folder):
    folder, in_memory = plain_folder
    assert sorted(path.name for path in folder.glob("rank-*")) == [
        f"rank-0000{rank}.json" for rank in range(3)
    ]
    loaded = type(in_memory).load(folder)
    assert loaded.ranks == [RankTrace.from_json(rank.to_json()) for rank in in_memory.ranks]
    assert loaded.step(0).actions(1) == in_memory.step(0).actions(1)
    assert loaded.missing_ranks == []


def test_folders_without_a_recording_are_refused(plain_folder, tmp_path):
    trace = plain_folder[1]
    with pytest.raises(ValueError, match=r"has no rank-\*\.json; give the folder that --trace"):
        type(trace).load(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        type(trace).load(tmp_path / "nowhere")
    (tmp_path / "rank-00000.json").write_text('{"schema": "other"}')
    with pytest.raises(ValueError, match=r"rank-00000\.json: not a timeline"):
        type(trace).load(tmp_path)
    with pytest.raises(ValueError, match="there is no step 2: the recording has 2 steps"):
        trace.step(2)
    with pytest.raises(ValueError, match="no recording of rank 9; there are: 0, 1, 2"):
        trace.rank(9)


# -- Waiting and transfer --


def slow_sender(M: int, seconds: float):
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    run_step(2, M)
    with minimegatron.trace() as run:
        run_step(2, M, seconds=seconds if rank == 0 else 0.0)
    return run


def test_waiting_and_transfer_are_told_apart():
    seconds = 0.08
    step = run_ranks(slow_sender, 2, 4, seconds)[0].step(0)
    waits = [
        event
        for event in step.events[1].values()
        if event.name == "p2p-wait" and event.attributes["doing"] == "receiving"
    ]
    assert len(waits) == 4
    # Stage 1 has nothing else to do while stage 0 computes.
    sent = [message for message in step.transfers if message.payload == "activation"]
    for event, message in zip(waits, sent, strict=True):
        length = event.end - event.start
        assert event.wait + event.attributes["transfer"] == pytest.approx(length)
        assert event.start + event.wait == pytest.approx(message.sent_at)
        assert event.wait > 0.5e6 * seconds
    gap = next(gap for gap in step.gaps(1) if gap.length > 0.5e6 * seconds)
    assert gap.waits_for[0] == 0 and step.event(gap.waits_for).action.kind == FORWARD
    assert gap.waiting > 0.5e6 * seconds
    assert gap.waiting + gap.transfer + gap.other == pytest.approx(gap.length)


# -- One process --


@traced("outer")
def outer(n: int) -> int:
    return sum(inner(i) for i in range(n))


@traced("inner", lambda arguments: {"number": arguments["i"]})
def inner(i: int) -> int:
    if i == 3:
        raise KeyError(i)
    return i


@traced("train-step")
def train_step() -> int:
    return outer(2)


def test_without_ranks():
    with minimegatron.trace() as run:
        outer(2)
    events = run.ranks[0].events
    assert [(event.name, event.parent) for event in events] == [
        ("outer", None),
        ("inner", 0),
        ("inner", 0),
    ]
    assert [event.attributes.get("number") for event in events] == [None, 0, 1]
    assert run.num_steps == 0
    assert "inner" in run.tree()


def test_nothing_is_recorded_outside_the_block():
    with minimegatron.trace() as run:
        pass
    outer(2)
    assert run.ranks[0].events == [] and not tracing._observers


def test_a_block_that_raises_keeps_what_was_open(tmp_path):
    with pytest.raises(KeyError), minimegatron.trace(tmp_path) as run:
        outer(5)
    assert not tracing._observers
    assert [event.name for event in run.ranks[0].events] == [
        "outer",
        "inner",
        "inner",
        "inner",
        "inner",
    ]
    assert type(run).load(tmp_path).ranks == [RankTrace.from_json(run.ranks[0].to_json())]


def test_calls_still_open_are_marked():
    block = minimegatron.trace()
    run = block.__enter__()

    @traced("closing")
    def closing():
        outer(1)
        block.__exit__(None, None, None)

    closing()
    unfinished = [event.attributes.get("unfinished", False) for event in run.ranks[0].events]
    assert unfinished == [True, False, False]
    assert "NOT FINISHED" in run.tree()


def test_only_the_wanted_steps_are_recorded():
    with minimegatron.trace(first_step=1, num_steps=2) as run:
        for _ in range(4):
            outer(1)
            train_step()
    assert [event.name for event in run.ranks[0].events] == 2 * [
        "train-step",
        "outer",
        "inner",
        "inner",
    ]


def test_a_full_recording_says_so():
    with minimegatron.trace(max_calls=2) as run:
        outer(3)
    assert len(run.ranks[0].events) == 2 and run.ranks[0].is_cut


def test_watching_keeps_no_tensor_alive():
    @traced("make")
    def make(tensor):
        return tensor * 2

    recorder = Recorder()
    with tracing.observed_by(recorder):
        tensor = torch.ones(3)
        alive = [weakref.ref(tensor), weakref.ref(make(tensor))]
        del tensor
        gc.collect()
        assert [reference() for reference in alive] == [None, None]


def test_calls_show_in_the_torch_profiler():
    with torch.profiler.profile() as profile, minimegatron.trace():
        outer(1)
    assert {"outer", "inner"} <= {event.name for event in profile.events()}


def test_recording_is_quick():
    with minimegatron.trace() as run:
        start = time.process_time()
        for _ in range(500):
            outer(2)
        seconds = time.process_time() - start
    assert len(run.ranks[0].events) == 1500
    assert seconds / 1500 < 500e-6, f"{1e6 * seconds / 1500:.0f} us per call"


def test_a_functions_text_is_that_of_the_file_as_it_was_last_read(tmp_path):
    path = tmp_path / "later.py"
    path.write_text("@here\ndef f():\n    return 1\n\n\nx = 2\n")
    assert function_text(str(path), 1) == "@here\ndef f():\n    return 1\n"
    path.write_text("def f():\n    return 1000\n")
    assert "return 1\n" in function_text(str(path), 1)
    linecache.checkcache(str(path))
    assert function_text(str(path), 1) == "def f():\n    return 1000\n"
    assert function_text(str(path), 0) == function_text(str(tmp_path / "none.py"), 1) == ""
