"""Plans: the calls of each schedule in order, what is refused, JSON, registration, speed."""

import gc
import json
import subprocess
import sys
import time

import pytest

from minimegatron.planner.actions import (
    BACKWARD,
    COMMUNICATE,
    FORWARD,
    Action,
    Event,
    action_from_json,
    timeline_from_json,
    timeline_to_json,
)
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.registry import (
    get_schedule,
    register_schedule,
    schedule_names,
    unregister_schedule,
)
from minimegatron.planner.simulator import Costs, simulate
from tests.figures import figure
from tests.planner.grid import is_legal


def script(step: Plan, rank: int) -> list[str]:
    """A rank's actions in short: F0, B0, or the name of the call."""
    return [
        a.call if a.kind == COMMUNICATE else f"{a.kind[0].upper()}{a.microbatch}.{a.chunk}"
        for a in step.ranks[rank]
    ]


# -- The order of calls --


def test_1f1b_calls_in_megatrons_order():
    step = plan("1f1b", pp=3, num_microbatches=3)
    assert script(step, 1) == [
        *("recv_forward", "F0.0", "send_forward"),
        "recv_forward",
        *("F1.0", "send_forward_recv_backward", "B0.0", "send_backward_recv_forward"),
        *("F2.0", "send_forward_recv_backward", "B1.0", "send_backward"),
        *("recv_backward", "B2.0", "send_backward"),
    ]
    # The last stage makes the same calls; its outputs and their gradients are no messages.
    assert script(step, 2) == [
        "recv_forward",
        *("F0.0", "send_forward_recv_backward", "B0.0", "send_backward_recv_forward"),
        *("F1.0", "send_forward_recv_backward", "B1.0", "send_backward_recv_forward"),
        *("F2.0", "send_forward_recv_backward", "B2.0", "send_backward"),
    ]
    assert [a.messages for a in step.ranks[2] if a.call == "send_forward_recv_backward"] == [()] * 3


def test_1f1b_with_fewer_microbatches_than_stages_has_no_steady_phase():
    step = plan("1f1b", pp=4, num_microbatches=1)
    assert script(step, 0) == [
        *("recv_forward", "F0.0", "send_forward"),
        *("recv_backward", "B0.0", "send_backward"),
    ]
    assert {a.phase for a in step.ranks[0]} == {"warmup", "cooldown"}


def test_1f1b_forward_only():
    step = plan("1f1b", pp=2, num_microbatches=2, forward_only=True)
    assert script(step, 0) == [
        *("recv_forward", "F0.0", "send_forward"),
        *("recv_forward", "F1.0", "send_forward"),
    ]
    assert script(step, 1) == [
        "recv_forward",
        *("F0.0", "send_forward", "recv_forward"),
        *("F1.0", "send_forward"),
    ]
    # As in the loop: without a gradient to wait for, every forward warms up.
    assert {a.phase for a in (*step.ranks[0], *step.ranks[1])} == {"warmup"}


FOUR_WAY = "send_forward_backward_recv_forward_backward"


def test_interleaved_calls_in_megatrons_order():
    step = plan("interleaved", pp=3, num_microbatches=4, vpp=2, group_size=4)
    # Rank 2 warms up 2 * 0 + (2 - 1) * 4 forwards.
    assert script(step, 2) == [
        "recv_forward",
        *("F0.0", "send_forward_recv_forward", "F1.0", "send_forward_recv_forward"),
        *("F2.0", "send_forward_recv_forward", "F3.0", FOUR_WAY),
        *("F0.1", "B0.1", FOUR_WAY, "F1.1", "B1.1", FOUR_WAY),
        *("F2.1", "B2.1", FOUR_WAY, "F3.1", "B3.1", FOUR_WAY),
        *("B0.0", "send_backward_recv_backward", "B1.0", "send_backward_recv_backward"),
        *("B2.0", "send_backward_recv_backward", "B3.0", "send_backward_recv_backward"),
    ]
    assert [a.phase for a in step.ranks[2] if a.kind == COMMUNICATE] == [
        *["warmup"] * 5,
        *["steady"] * 4,
        *["cooldown"] * 4,
    ]
    assert str(step.ranks[2][8]) == (
        f"{FOUR_WAY}(receive activation of microbatch 0, chunk 1 from rank 1; "
        "send activation of microbatch 3, chunk 0 to rank 0)"
    )


def test_interleaved_all_in_warmup_receives_its_first_gradient_alone():
    step = plan("interleaved", pp=2, num_microbatches=2, vpp=1)
    assert script(step, 0) == [
        "recv_forward",
        *("F0.0", "send_forward_recv_forward", "F1.0", "send_forward_recv_forward"),
        "recv_backward",
        *("B0.0", "send_backward_recv_backward", "B1.0", "send_backward_recv_backward"),
    ]


def test_overlap_separates_the_two_directions():
    step = plan("interleaved", pp=2, num_microbatches=2, vpp=2, overlap_p2p_comm=True)
    both = ["send_forward_recv_forward", "send_backward_recv_backward"]
    assert script(step, 1) == [
        *("recv_forward", "F0.0", both[0], "F1.0", *both),
        *("F0.1", both[0], "B0.1", both[1], "F1.1", both[0], "B1.1", both[1]),
        *("B0.0", both[1], "B1.0", both[1]),
    ]
    overlapping = [a.overlap for a in step.ranks[1] if a.kind == COMMUNICATE]
    assert overlapping == [False, *[True] * 7, False, False]


def test_messages_start_in_the_order_of_the_communicator():
    def parts(rank, batched):
        step = plan("interleaved", 4, 8, 2, batch_p2p_comm=batched)
        call = next(a for a in step.ranks[rank] if len(a.messages) == 4)
        return [
            f"{m.direction} {'next' if m.peer == (rank + 1) % 4 else 'prev'}" for m in call.messages
        ]

    batch = ["send prev", "receive prev", "send next", "receive next"]
    assert parts(1, True) == parts(2, True) == batch
    assert parts(1, False) == ["receive prev", "send next", "receive next", "send prev"]
    assert parts(2, False) == ["send next", "receive prev", "send prev", "receive next"]


def test_default_schedule_is_the_one_megatron_chooses():
    assert plan(None, 1, 4).config.schedule == "no-pipelining"
    assert plan(None, 2, 4).config.schedule == "1f1b"
    assert plan(None, 2, 4, vpp=1).config.schedule == "interleaved"


def test_default_transport_is_one_that_a_run_could_use():
    assert plan("1f1b", 2, 4).config.batch_p2p_comm
    assert plan("interleaved", 3, 4, 2, 4).config.batch_p2p_comm
    assert not plan("interleaved", 2, 4, 2).config.batch_p2p_comm
    assert not plan("interleaved", 3, 4, 2, 4, overlap_p2p_comm=True).config.batch_p2p_comm


def test_bytes():
    step = plan("1f1b", 3, 5, message_bytes=10)
    assert step.bytes_sent() == 2 * 2 * 5 * 10
    assert [step.bytes_sent(rank) for rank in range(3)] == [50, 100, 50]


# -- What is refused --


@pytest.mark.parametrize("p", range(2, 7))
def test_every_illegal_group_is_refused(p):
    for M in range(1, 13):
        for G in range(1, M + 3):
            if is_legal(p, M, G):
                continue
            with pytest.raises(ValueError, match=rf"\b{G}\b") as error:
                plan("interleaved", p, M, 2, G)
            assert str(p) in str(error.value)


@pytest.mark.parametrize(
    ("schedule", "pp", "num_microbatches", "options", "words"),
    [
        (None, 0, 4, {}, "pp is 0; give 1 or more"),
        (None, 2, 0, {}, "num_microbatches is 0; give 1"),
        (None, 2, 2.0, {}, "num_microbatches is 2.0; give an integer"),
        (None, 2, 4, {"vpp": 0}, "vpp is 0; give 1"),
        (None, 1, 4, {"vpp": 2}, "vpp=2 needs a pipeline"),
        ("no-pipelining", 2, 4, {}, "use pp 1"),
        ("gpipe", 2, 4, {"vpp": 2}, "leave vpp out"),
        ("1f1b", 2, 4, {"group_size": 2}, "set vpp, or leave it out"),
        ("1f1b", 2, 4, {"overlap_p2p_comm": True}, "turn it off"),
        ("1f1b", 2, 4, {"message_bytes": -1}, "message_bytes is -1; give 0"),
        ("interleaved", 2, 4, {}, "set vpp to 2 or more"),
        (
            "interleaved",
            2,
            4,
            {"vpp": 2, "overlap_p2p_comm": True, "batch_p2p_comm": True},
            "set batch_p2p_comm=False",
        ),
        ("zigzag", 2, 4, {}, "unknown schedule 'zigzag'; known are no-pipelining, gpipe"),
    ],
)
def test_bad_sizes_are_refused_with_a_remedy(schedule, pp, num_microbatches, options, words):
    with pytest.raises(ValueError, match=words):
        plan(schedule, pp, num_microbatches, **options)


def test_a_schedule_that_yields_something_else_is_refused():
    def wrong(stage):
        yield "forward"

    with pytest.raises(ValueError, match=r"schedule wrong yielded 'forward' on rank 0"):
        plan(wrong, 2, 2)


# -- Registration --


def test_register_and_unregister():
    @register_schedule("test-only")
    def mine(stage):
        yield from get_schedule("gpipe")(stage)

    try:
        assert "test-only" in schedule_names()
        assert plan("test-only", 2, 3).ranks == plan("gpipe", 2, 3).ranks
        assert register_schedule("test-only")(mine) is mine
        with pytest.raises(ValueError, match="is taken by"):
            register_schedule("test-only")(lambda stage: ())
    finally:
        unregister_schedule("test-only")
    with pytest.raises(ValueError, match="unknown schedule 'test-only'"):
        get_schedule("test-only")


def test_a_schedule_that_is_defined_again_takes_its_own_place():
    """Was: a notebook's cell that registers one could not run a second time, changed or not."""

    def run_the_cell(schedule):
        @register_schedule("test-only")
        def mine(stage):
            yield from get_schedule(schedule)(stage)

    try:
        run_the_cell("gpipe")
        run_the_cell("1f1b")
        assert plan("test-only", 2, 3).ranks == plan("1f1b", 2, 3).ranks
    finally:
        unregister_schedule("test-only")


# -- JSON --


@pytest.mark.parametrize(
    "arguments",
    [
        ("1f1b", 3, 4),
        ("interleaved", 2, 4, 2),
        ("interleaved", 3, 5, 2, 5, False, True),
        ("gpipe", 2, 2, None, None, True),
    ],
)
def test_a_plan_survives_json(arguments):
    step = plan(*arguments, message_bytes=7)
    assert Plan.from_json(json.loads(json.dumps(step.to_json()))) == step
    simulation = simulate(step, Costs(1, 2, latency=1))
    data = json.loads(json.dumps(simulation.to_json()))
    assert data["schema"] == "minimegatron-timeline"
    assert data["version"] == 1
    assert data["source"] == "simulation"
    assert data["summary"]["makespan"] == simulation.makespan
    assert Plan.from_json(data) == step
    events = timeline_from_json(data)
    assert events == [simulation.events(rank) for rank in range(step.config.pp_size)]


def test_json_leaves_out_what_says_nothing():
    (rank,) = plan("no-pipelining", 1, 1).to_json()["ranks"]
    assert rank[0] == {
        "kind": "forward",
        "rank": 0,
        "phase": "steady",
        "microbatch": 0,
        "chunk": 0,
    }


def test_events_of_a_run_survive_json():
    event = Event(
        Action(FORWARD, 1, "steady", 2, 0),
        start=1.5,
        end=2.5,
        wait=0.25,
        waits_for=(0, 3),
        name="forward-compute",
        symbol="minimegatron.core.pipeline_parallel.steps.forward_step",
        file="steps.py",
        line=12,
        parent=4,
        attributes={"shape": [4, 2, 8]},
    )
    data = json.loads(json.dumps(timeline_to_json([[event]], "run", {}, "us")))
    assert timeline_from_json(data) == [[event]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "not a timeline"),
        ([], "not a timeline"),
        ({"schema": "minimegatron-timeline", "version": 3, "ranks": []}, "reads versions 1 to 2"),
        ({"schema": "minimegatron-timeline", "version": 1, "ranks": [[{}]]}, "not an action"),
        (
            {
                "schema": "minimegatron-timeline",
                "version": 1,
                "ranks": [[{"kind": "forward", "rank": 0, "start": "now", "end": 1}]],
            },
            "'start' is missing or no number",
        ),
    ],
)
def test_bad_json_is_refused(data, words):
    with pytest.raises(ValueError, match=words):
        timeline_from_json(data)


def test_from_json_needs_the_config_of_a_plan():
    data = plan("1f1b", 2, 2).to_json()
    data["config"] = {"schedule": "1f1b"}
    with pytest.raises(ValueError, match="config is not that of a plan"):
        Plan.from_json(data)
    with pytest.raises(ValueError, match="not an action"):
        action_from_json({"kind": BACKWARD})


# -- Speed, and where it runs --


def plan_and_simulate(pp: int, num_microbatches: int, vpp: int) -> int:
    """Forwards and backwards of the step that was planned and simulated."""
    step = plan("interleaved", pp, num_microbatches, vpp)
    assert simulate(step).makespan == (num_microbatches * vpp + pp - 1) * 3
    return 2 * pp * num_microbatches * vpp


def lines_per_pass(*size: int) -> float:
    """How many lines of Python are executed for one forward or backward."""
    num_lines = 0

    def count(frame, event, _):
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        num_passes = plan_and_simulate(*size)
    finally:
        sys.settrace(before)
    return num_lines / num_passes


def microseconds_per_pass(*size: int) -> float:
    """Processor time of one forward or backward."""
    begin = time.process_time()
    num_passes = plan_and_simulate(*size)
    return (time.process_time() - begin) * 1e6 / num_passes


def test_a_plan_takes_few_lines_per_pass_and_no_more_in_a_larger_one():
    small, large = lines_per_pass(8, 32, 2), lines_per_pass(16, 128, 4)
    figure(f"planned and simulated in {small:.0f} and {large:.0f} lines per pass (bound: 200)")
    assert large < 200
    assert large < small * 1.1


def test_time_grows_as_the_plan_does():
    """Also where it grows within one line. Seconds: `benchmarks/planner_speed.py`."""
    ratios = []
    while len(ratios) < 5 and not any(ratio < 3 for ratio in ratios):
        small = microseconds_per_pass(16, 64, 4)
        ratios.append(microseconds_per_pass(64, 512, 8) / small)
    figure(f"a plan 64 times as large takes {min(ratios):.2f} times as long per pass (bound: 3)")
    assert min(ratios) < 3, ratios
    assert gc.isenabled()


def test_runs_without_torch_or_any_other_library():
    code = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] not in {*sys.stdlib_module_names, 'minimegatron'}:\n"
        "            raise ImportError('blocked: ' + name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "from minimegatron.__main__ import main\n"
        "sys.exit(main('plan --pp 4 --microbatches 8 --vpp 2'.split()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Interleaved 1F1B, 4 stages, 2 chunks per stage" in done.stdout
