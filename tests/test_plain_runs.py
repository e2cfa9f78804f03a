"""How much of the package a reader has to know who wants to know a plain training step.

`plain_runs` says what the five runs are, and measures. Every figure has a cap: what it was when it was
last lowered. Each change may lower a cap; none may raise one. Those marked *anew* were set once more
when messages and collectives became calls of `torch.distributed`: the room grew from a mesh to a whole
backend, a message's own link moved before its door, and what left the page stands in files beside it.
Two of them were set again when send limits, placement and orders of work became one room: its lines
had been in the spine, in a room of send limits alone, and in files that were in neither. One of these,
the lines of rooms, was set a third time when samples, watchers and left-out arguments became rooms,
and a fourth time when failures did: they had been in the spine. The lines of spine and rooms together
kept their cap. What checks and builds before the first step left the spine for files beside it, so
there are more other files that a whole run enters.

With rooms, a figure depends on when messages come: by a twenty-fifth in ten runs, half of them on a
busy machine. There a twentieth more passes.

    pytest -s tests/test_plain_runs.py      shows all figures beside their caps
"""

import contextlib
import math
import socket
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.code_recorder import WIRE, Call, Record, Recorder, wire_noted
from tests.code_shares import Shares, shares_of
from tests.figures import figure
from tests.plain_runs import (
    PACKAGE,
    ROOMS,
    RUNS,
    TIMED,
    Records,
    figures_of,
    outside,
    record_all,
    room_files,
    shares_in,
    spine,
    spine_files,
    tables,
)
from tests.plain_walks import callers, extents, length_of, walks, ways_to_wire, without_turns
from tests.ranks import has_shared_memory

pytestmark = pytest.mark.timeout(900)  # five runs in the first test that asks for them

MOST_ROOMS = 6
MORE_LINES_OF_ROOMS = 20
"""Lines of rooms that only run where a rank comes late, or a socket is full."""
MORE_WITH_ROOMS = 0.05

CAPS = {
    "spine: files": 59,
    "spine: lines": 5291,
    "spine: statements": 3680,
    "spine: lines executed": 3919,
    "spine: lines of branches never taken": 151,
    "spine: lines of functions never entered": 64,
    "spine: lines outside functions": 1157,
    "spine: lines of signatures": 1274,
    "spine: functions never entered": 20,
    "rooms: lines executed": 1787,  # anew
    "spine and rooms: lines executed": 5706,  # anew
    "other files that a whole run enters": 61,  # anew
    "one step: lines reported, rooms apart": 1115,
    "one step: lines reported, with doors": 1265,
    "one step: lines reported, with rooms": 1728,
    "one step: files, rooms apart": 39,
    "files loaded by a GPT run": 179,
    "wrappers before 1F1B": 2,
    "calls of tp2·pp2, rooms apart": 1756,
    "calls of tp2·pp2, with rooms": 4760,
    "calls of tp2·pp2 sequence, rooms apart": 1927,
    "calls of tp2·pp2 sequence, with rooms": 6966,
    "calls of pp2·dp2 ZeRO-1, rooms apart": 1869,
    "calls of pp2·dp2 ZeRO-1, with rooms": 2919,
    "calls of tp2·dp2 fp16, rooms apart": 2903,
    "calls of tp2·dp2 fp16, with rooms": 7352,
    "calls of pp2·v2, rooms apart": 2123,
    "calls of pp2·v2, with rooms": 3269,
    "send_forward to the wire: calls, rooms apart": 4,
    "send_forward to the wire: functions, rooms apart": 4,
    "send_forward to the wire: files, rooms apart": 1,
    "send_forward to the wire: changes, rooms apart": 0,  # anew
    "send_forward to the wire: calls, with rooms": 17,
    "send_forward to the wire: functions, with rooms": 16,
    "send_forward to the wire: files, with rooms": 7,  # anew
    "send_forward to the wire: changes, with rooms": 9,  # anew
    "recv_forward, its message from the wire: calls, rooms apart": 12,
    "recv_forward, its message from the wire: functions, rooms apart": 11,
    "recv_forward, its message from the wire: files, rooms apart": 1,
    "recv_forward, its message from the wire: changes, rooms apart": 0,
    "recv_forward, its message from the wire: calls, with rooms": 37,
    "recv_forward, its message from the wire: functions, with rooms": 34,
    "recv_forward, its message from the wire: files, with rooms": 8,  # anew
    "recv_forward, its message from the wire: changes, with rooms": 19,
    "1F1B to its first receive: calls, rooms apart": 33,
    "1F1B to its first receive: functions, rooms apart": 28,
    "1F1B to its first receive: files, rooms apart": 8,
    "1F1B to its first receive: changes, rooms apart": 20,
    "1F1B to its first receive: calls, with rooms": 57,
    "1F1B to its first receive: functions, with rooms": 45,
    "1F1B to its first receive: files, with rooms": 14,
    "1F1B to its first receive: changes, with rooms": 37,
    "chunk.forward_step to GPTModel.forward: calls, rooms apart": 56,
    "chunk.forward_step to GPTModel.forward: functions, rooms apart": 44,
    "chunk.forward_step to GPTModel.forward: files, rooms apart": 14,
    "chunk.forward_step to GPTModel.forward: changes, rooms apart": 30,
    "chunk.forward_step to GPTModel.forward: calls, with rooms": 116,
    "chunk.forward_step to GPTModel.forward: functions, with rooms": 82,
    "chunk.forward_step to GPTModel.forward: files, with rooms": 28,  # anew
    "chunk.forward_step to GPTModel.forward: changes, with rooms": 74,  # anew
    "last gradient to the wire: calls, rooms apart": 10,
    "last gradient to the wire: functions, rooms apart": 10,
    "last gradient to the wire: files, rooms apart": 3,
    "last gradient to the wire: changes, rooms apart": 2,
    "last gradient to the wire: calls, with rooms": 29,
    "last gradient to the wire: functions, with rooms": 28,
    "last gradient to the wire: files, with rooms": 10,
    "last gradient to the wire: changes, with rooms": 15,
    "optimizer.step to the learning rate: calls, rooms apart": 805,
    "optimizer.step to the learning rate: functions, rooms apart": 51,
    "optimizer.step to the learning rate: files, rooms apart": 16,
    "optimizer.step to the learning rate: changes, rooms apart": 368,
    "optimizer.step to the learning rate: calls, with rooms": 996,
    "optimizer.step to the learning rate: functions, with rooms": 101,
    "optimizer.step to the learning rate: files, with rooms": 29,  # anew
    "optimizer.step to the learning rate: changes, with rooms": 504,
}


@pytest.fixture(scope="module")
def records() -> Records:
    if not has_shared_memory():
        pytest.skip("gloo carries all messages, and no rank enters the shared memory")
    return record_all()


@pytest.fixture(scope="module")
def figures(records: Records) -> dict[str, int]:
    found = figures_of(records)
    print(f"\n{tables(records, found, CAPS)}")
    return found


# -- Rules --


def test_a_plain_step_enters_the_spine_and_rooms_alone(records):
    found = outside(records.steps)
    assert not found, f"give these a place in docs/spine.toml, or in one of its rooms: {found}"


def test_rooms_are_few_and_each_is_entered(records):
    assert len(ROOMS) <= MOST_ROOMS
    for name, room in ROOMS.items():
        assert min(map(len, (room.door, room.shut, room.what))) > 20, name
        entered = [file for file in records.steps.entered if room.has(file)]
        assert entered, f"no plain step enters the room {name!r}; take it off the list"


def test_the_functions_that_depend_on_time_are_in_rooms_or_send():
    files = [*room_files(), "core/pipeline_parallel/p2p_communication.py"]
    source = "".join((PACKAGE / file).read_text() for file in files)
    assert not [name for name in TIMED if f"def {name}(" not in source]


def test_no_figure_is_above_its_cap(figures):
    assert figures.keys() == CAPS.keys()
    above = {
        name: f"{number}, cap {CAPS[name]}"
        for name, number in figures.items()
        if number > most(name)
    }
    assert not above, "a plain step has become longer; pytest -s shows all figures"
    executed = figures["spine: lines executed"]
    figure(f"{executed} lines of the spine executed, cap {CAPS['spine: lines executed']}")


def most(name: str) -> int:
    """What passes."""
    if "rooms: lines executed" in name:
        return CAPS[name] + MORE_LINES_OF_ROOMS
    slack = MORE_WITH_ROOMS if name.endswith("with rooms") else 0
    return math.floor(CAPS[name] * (1 + slack))


def test_each_line_of_the_spine_is_counted_once(records):
    found = shares_in(records.everything, spine_files())
    assert found.num_lines == sum(link.num_lines for link in spine.read_spine())


MOST_UNENTERED = 30
UNENTERED = {
    "core/rank_generator.py: RankGenerator.coordinates": "what the grid of ranks is; exercise 1",
    "core/rank_generator.py: default_embedding_ranks": "Megatron's rule; this program has its own",
    "core/collectives.py: abandon": "the fourth edge of a step, beside begin, meet and end",
    "core/pipeline_parallel/loops.py: InterleavedRun._exchange_both": (
        "the same loop where messages do not overlap, which needs three stages"
    ),
    "core/pipeline_parallel/step_frame.py: GradSync.launch": "for schedules that set the moment",
    "core/pipeline_parallel/step_frame.py: of_chunk": "likewise",
    "core/pipeline_parallel/step_frame.py: StepFrame.let_all_go": "what a failed step must not keep",
    "core/pipeline_parallel/schedule_table.py: get_num_warmup_microbatches": (
        "the formula that the exam and exercise 5 ask for"
    ),
    "core/pipeline_parallel/schedule_table.py: convert_schedule_table_to_order": (
        "a whole interleaved step as one list: what the loop does, to look at"
    ),
    "core/pipeline_parallel/schedule_table.py: InterleavedOrder.is_first_microbatch_for_model_chunk": (
        "Megatron's helper, for combined steps"
    ),
    "core/pipeline_parallel/schedule_table.py: InterleavedOrder.is_last_microbatch_for_model_chunk": (
        "Megatron's helper, which the sources name"
    ),
    "core/pipeline_parallel/p2p_communication.py: Handle.wait": "a protocol",
    "core/pipeline_parallel/p2p_communication.py: P2PCommunicator.__deepcopy__": (
        "a communicator is not copied with its groups"
    ),
    "core/pipeline_parallel/p2p_communication.py: P2PCommunicator.abandon": (
        "the third edge of a step, beside begin_step and finish"
    ),
    "core/tensor_parallel/mappings.py: _CopyToModelParallelRegion.forward": (
        "with reduce, the conjugate pair that exercise 2 asks for"
    ),
    "core/tensor_parallel/mappings.py: _CopyToModelParallelRegion.backward": "likewise",
    "core/tensor_parallel/mappings.py: copy_to_tensor_model_parallel_region": "likewise",
    "core/distributed/param_and_grad_buffer.py: _ParamAndGradBuffer.scale_gradients": (
        "Megatron's method, with which gradients are divided by tokens"
    ),
    "core/optimizer/optimizer.py: MegatronOptimizer._make_shard": "abstract: each kind has its own",
    "core/utils.py: get_model_type": "Megatron's, beside get_model_config",
}
"""Functions of the spine that none of the five runs enters, and why they stay."""


def test_each_function_of_the_spine_is_entered_or_has_its_reason(records):
    files = spine_files()
    found = {f"{x}: {name}" for x in files for name in shares_in(records.everything, [x]).unused}
    assert found == UNENTERED.keys()
    assert len(UNENTERED) <= MOST_UNENTERED
    assert min(map(len, UNENTERED.values())) >= 8


# -- The runs are what they say --

WITNESSES = {
    "tp2·pp2": "forward_backward_pipelining_without_interleaving",
    "tp2·pp2 sequence": "reduce_scatter_to_sequence_parallel_region",
    "pp2·dp2 ZeRO-1": "DistributedDataParallel.params_were_updated",
    "tp2·dp2 fp16": "DynamicGradScaler.update",
    "pp2·v2": "forward_backward_pipelining_with_interleaving",
}
"""A function that the run's step calls; but the first's, no other run's does."""


def test_each_run_takes_its_own_way(records):
    assert WITNESSES.keys() == records.ranks.keys()
    for name, ranks in records.ranks.items():
        assert len(ranks) == next(run.num_ranks for run in RUNS if run.name == name)
        for rank in ranks:
            assert len(rank.steps) == 2
            for step in rank.steps:
                called = {call.name for call in step.calls}
                assert WITNESSES[name] in called
                others = {*WITNESSES.values()} - {WITNESSES[name], WITNESSES["tp2·pp2"]}
                assert not others & called, name
                # The update is not skipped.
                assert "OptimizerParamScheduler.get_lr" in called


def test_a_step_has_all_three_phases(records):
    """Plain 1F1B's first stage: one forward ahead, three pairs, one backward behind."""
    step = records.ranks["tp2·pp2"][0].steps[0]
    methods = [call.name.partition("P2PCommunicator.")[2] for call in step.calls]
    assert [name for name in methods if name.startswith(("send_", "recv_"))] == [
        *("recv_forward", "send_forward", "recv_forward"),
        *("send_forward_recv_backward", "send_backward_recv_forward") * 2,
        *("send_forward_recv_backward", "send_backward", "recv_backward", "send_backward"),
    ]


# -- The recorder, on a small file --

SAMPLE = dedent(
    '''\
    """A docstring does not count as a line."""
    import functools

    TABLE = {
        "one": 1,
    }

    def wrapped(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)

        return wrapper

    class Things:
        """Neither is this."""

        size: int = 3

        @wrapped
        def first(
            self, number
        ):
            if number > 2:
                raise ValueError(
                    "too many"
                )
            elif number:
                kept: list
                kept = [n for n in self.count(number)]
            else:
                kept = []
            try:
                return (
                    len(kept)
                    + len(kept)
                )
            except TypeError:
                return 0
            finally:
                kept.clear()

        def count(self, number):
            for n in range(number):
                yield n

    def never(
        x,
    ):
        return x

    def matched(x):
        match x:
            case 1:
                return "one"
            case _:
                return "other"
    '''
)


def sample(folder: Path) -> dict[str, object]:
    """The functions of `SAMPLE`, as a file of a package in `folder`."""
    space: dict[str, object] = {}
    exec(compile(SAMPLE, str(folder / "sample.py"), "exec"), space)
    return space


def recorded(folder: Path, number: int = 2) -> Record:
    space = sample(folder)
    with Recorder(folder) as recorder:
        space["Things"]().first(number)
        space["matched"](7)
    return recorder.record


def line(text: str) -> int:
    """The number of the first line with this text."""
    return next(i for i, found in enumerate(SAMPLE.splitlines(), start=1) if text in found)


def test_functions_and_calls_are_recorded(tmp_path):
    record = recorded(tmp_path)
    names = ["wrapped.<locals>.wrapper", "Things.first", "Things.count", "matched"]
    assert [call.name for call in record.calls] == names
    assert {call.file for call in record.calls} == {"sample.py"}
    assert [call.depth for call in record.calls[:2]] == [1, 2]
    assert record.calls[3].depth == 1, "the depth is not that of before"
    firsts = {line("@functools"), line("@wrapped"), line("def count"), line("def matched")}
    assert record.entered == {"sample.py": firsts}
    assert line("kept.clear()") in record.lines["sample.py"]
    assert line("too many") not in record.lines["sample.py"]


def test_lines_are_shared_out(tmp_path):
    record = recorded(tmp_path)
    found = shares_of(SAMPLE, record.entered["sample.py"], record.lines["sample.py"])
    assert found == Shares(
        # wrapper 3, first 4 + 11, count 3, matched 5
        executed=26,
        # raise 3, else 2, except 2, return "one"
        dead=8,
        # wrapped 2, never 4
        never_entered=6,
        # import, table 3, class, field
        rest=6,
        # wrapped 1, wrapper 2, first 4, count 1, never 3, matched 1
        signatures=12,
        num_functions=6,
        unused=["wrapped", "never"],
    )
    assert found.num_lines == len([x for x in SAMPLE.splitlines() if x and '"""' not in x])


def test_what_is_not_taken_is_dead_and_what_is_not_called_is_never_entered(tmp_path):
    """With 0, first() takes its `else:`; it calls no count()."""
    record = recorded(tmp_path, 0)
    found = shares_of(SAMPLE, record.entered["sample.py"], record.lines["sample.py"])
    # raise 3, `kept` twice, except 2, return "one"
    assert (found.dead, found.executed) == (8, 26 - 3)
    assert found.unused == ["wrapped", "Things.count", "never"]


def test_an_exception_takes_its_branch_and_ends_its_calls(tmp_path):
    space = sample(tmp_path)
    with Recorder(tmp_path) as recorder:
        with contextlib.suppress(ValueError):
            space["Things"]().first(3)
        space["matched"](1)
    assert {line("raise"), line('return "one"')} < recorder.record.lines["sample.py"]
    assert recorder.record.calls[-1] == Call("sample.py", "matched", 1)


def test_all_of_some_functions_counts_as_executed():
    found = shares_of(SAMPLE, set(), set(), {"never"})
    assert (found.executed, found.dead, "never" in found.unused) == (4, 0, False)


def test_a_generator_is_called_once(tmp_path):
    space = sample(tmp_path)
    with Recorder(tmp_path) as recorder:
        numbers = space["Things"]().count(5)
        assert [next(numbers), next(numbers)] == [0, 1]
        numbers.close()
        space["matched"](1)
    assert [call.name for call in recorder.record.calls] == ["Things.count", "matched"]
    assert recorder.record.calls[1].depth == 1


def test_only_the_package_is_recorded_and_only_within_the_block(tmp_path):
    before = sys.gettrace()
    space = sample(tmp_path)
    with Recorder(tmp_path / "other") as recorder:
        space["matched"](1)
    assert not recorder.record.calls and not recorder.record.lines
    assert sys.gettrace() is before


def test_records_are_added():
    one, other = Record(), Record()
    one.lines["a.py"], other.lines["a.py"], other.entered["b.py"] = {1}, {2}, {3}
    one.add(other)
    assert (one.lines, one.entered) == ({"a.py": {1, 2}}, {"b.py": {3}})


def test_the_wire_is_noted(tmp_path):
    here, there = socket.socketpair()
    with here, there, Recorder(tmp_path) as recorder:
        with wire_noted(recorder):
            here.send(b"1234")
            assert there.recv(4) == b"1234"
        here.send(b"5")
    assert recorder.record.calls == [Call(WIRE, "send", 1), Call(WIRE, "recv", 1)]


# -- Walks --

CALLS = [
    Call("a.py", "train_step", 1),
    Call("deco.py", "traced.<locals>.link", 2),
    Call("a.py", "Chunk.forward", 3),
    Call("room/b.py", "wait", 4),
    Call("room/b.py", "look", 5),
    Call("room/c.py", "read", 6),
    Call("room/b.py", "look", 5),
    Call("room/c.py", "read", 6),
    Call(WIRE, "send", 6),
    Call("a.py", "Chunk.after", 4),
    Call("a.py", "Model.forward", 2),
]


def test_a_walk_begins_with_its_wrappers():
    (found,) = walks(CALLS, "Chunk.forward", "Model.forward")
    assert found == CALLS[1:]
    assert length_of(found) == (9, 7, 4, 6)
    assert not [*walks(CALLS, "Model.forward", "Chunk.forward")]
    assert not [*walks(CALLS, "nobody", "Model.forward")]


def test_an_extent_ends_with_the_return():
    assert [*extents(CALLS, "Chunk.forward")] == [CALLS[1:10]]
    assert [*extents(CALLS, "look")] == [CALLS[4:6], CALLS[6:9]]


def test_a_way_to_the_wire_ends_there():
    assert [*ways_to_wire(CALLS, "Chunk.forward")] == [CALLS[1:9]]
    assert not [*ways_to_wire(CALLS, "Model.forward")]


def test_callers_have_not_returned():
    names = [CALLS[place].name for place in callers(CALLS, 9)]
    assert names == ["Chunk.forward", "traced.<locals>.link", "train_step"]


def test_a_loop_in_a_room_counts_once():
    assert without_turns(CALLS, lambda file: file.startswith("room/")) == CALLS[:6] + CALLS[9:]
    assert without_turns(CALLS, lambda file: False) == CALLS
