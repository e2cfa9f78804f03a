"""Verdicts, exits, iterators and skipped iterations: as megatron-core's own machine has them.

Where this package differs on purpose, the test says so.
"""

import math
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minimegatron.core import rerun_state_machine
from minimegatron.core.rerun.differences import relative_difference
from minimegatron.core.rerun.states import iterations_to_skip
from minimegatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    RerunStateMachine,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)
from tests.conformance.megatron import megatron_module

theirs = megatron_module("rerun_state_machine")

VALUES = st.sampled_from(
    [0.0, -0.4, 0.5, -0.5, 3.0, 5.0, -5.0, -500.0, float("nan"), -float("inf")]
)
RESULTS = st.lists(st.tuples(st.sampled_from(["loss", "gradient"]), VALUES), max_size=20)


@given(results=RESULTS, threshold=st.sampled_from([1.0, 10.0]), num_samples=st.integers(0, 4))
@example([("loss", -0.5), ("loss", -0.4), ("loss", -500.0)], 10.0, 1)  # the wrong way round once
@example([("loss", float("inf")), ("loss", 0.5), ("loss", 5.0)], 10.0, 1)  # off for ever once
def test_a3_the_same_results_are_unexpectedly_large(results, threshold, num_samples):
    machines = RerunStateMachine(), theirs.RerunStateMachine()
    for context, value in results:
        asked = {"threshold": threshold, "context": context, "num_samples": max(num_samples, 1)}
        ours, megatrons = (
            machine.is_unexpectedly_large(torch.tensor(value), **asked) for machine in machines
        )
        assert ours == megatrons, (context, value)


# -- Scripted results --


@contextmanager
def without_a_gpu():
    """Megatron's machine asks CUDA for its device and its random numbers."""
    replaced = {
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_rng_state": torch.get_rng_state,
        "torch.cuda.set_rng_state": torch.set_rng_state,
        "torch.distributed.get_world_size": lambda *_: 1,
        "torch.distributed.get_rank": lambda *_: 0,
    }
    with ExitStack() as stack:
        for name, stand_in in replaced.items():
            stack.enter_context(mock.patch(name, stand_in))
        alone = mock.patch.object(
            theirs.RerunStateMachine,
            "_reduce_any",
            lambda self, value: tuple(value) if isinstance(value, list) else value,
        )
        stack.enter_context(alone)
        yield


def play(machine, script) -> list:
    """Exits and states of steps with scripted runs, until the run ends."""
    found = []
    for runs, fatal in script:
        runs = iter(runs)
        while machine.should_run_forward_backward(None):
            for value in next(runs):
                machine.validate_result(
                    result=torch.tensor(value),
                    rejection_func=lambda result: not math.isfinite(result),
                    message="bad",
                    comparison_func=None,
                    tolerance=0.01,
                    fatal=fatal,
                )
        found.append((machine.should_checkpoint_and_exit(), machine.state.name))
        if found[-1][0][1]:
            break
    return found


FINITE = st.sampled_from([1.0, 1.001, 2.0])
RESULT = st.one_of(FINITE, FINITE, st.sampled_from([math.nan, math.inf]))
RUN = st.lists(RESULT, min_size=2, max_size=2)
STEPS = st.lists(st.tuples(st.tuples(RUN, RUN), st.booleans()), min_size=1, max_size=4)


def expected(found: list) -> list:
    """Megatron 0.16 saves a checkpoint after a transient error; its later source does not."""
    return [
        ((False, *exits[1:]) if state == "RERUNNING_IN_PLACE" else exits, state)
        for exits, state in found
    ]


@given(script=STEPS)
@example([(([1.0, 1.0],) * 2, True), (([1.0, math.nan],) * 2, True)])
@example([(([1.0, 1.0],) * 2, True), (([1.0, math.nan], [1.0, 1.0]), False)])
def test_the_same_exits_and_states(script):
    with without_a_gpu():
        ours = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
        megatrons = theirs.RerunStateMachine(mode=theirs.RerunMode.VALIDATE_RESULTS)
        assert play(ours, script) == expected(play(megatrons, script))


@pytest.mark.parametrize("same_device", [True, False])
@pytest.mark.parametrize("third", [math.nan, math.inf, 1.0])
def test_the_same_third_run(same_device, third):
    script = [(([1.0],) * 2, True), (([math.nan],) * 2, True)]
    with without_a_gpu():
        ours = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
        megatrons = theirs.RerunStateMachine(mode=theirs.RerunMode.VALIDATE_RESULTS)
        play(ours, script), play(megatrons, script)
        ours_again = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
        ours_again.load_state_dict(ours.state_dict())
        state = megatrons.state_dict(None, "torch_dist")
        state["sharded"] = state["sharded"].data
        theirs_again = theirs.RerunStateMachine(mode=theirs.RerunMode.VALIDATE_RESULTS)
        theirs_again.load_state_dict(state)
        if not same_device:
            ours_again.judge.suspicious_device = ("elsewhere", "0")
            theirs_again.suspicious_node = "elsewhere"
        script = [(([third],), True)]
        assert play(ours_again, script) == play(theirs_again, script)


def test_the_same_names_and_numbers():
    for name in ("RerunMode", "RerunState", "RerunDiagnostic", "RerunValidationStatus"):
        ours, megatrons = vars(rerun_state_machine)[name], vars(theirs)[name]
        assert {member.name: member.value for member in ours} == {
            member.name: member.value for member in megatrons
        }
    for name in ("EXIT_CODE_RESUME_TO_DISAMBIGUATE", "EXIT_CODE_FAILED_ON_RESULT_VALIDATION"):
        assert vars(rerun_state_machine)[name] == vars(theirs)[name]


NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(a=NUMBERS, b=NUMBERS)
def test_the_same_differences(a, b):
    """But for two numbers of different signs: there Megatron divides by what is left of their sum."""
    ours = relative_difference(torch.tensor(a), torch.tensor(b))
    if math.copysign(1, a) == math.copysign(1, b) or math.isnan(a) or math.isnan(b):
        megatrons = theirs._compare_floats(torch.tensor(a), torch.tensor(b))
        assert ours == pytest.approx(megatrons, rel=1e-9) or not math.isfinite(float(a) + float(b))
    else:
        assert ours == 0.0 or ours >= 1.0


@given(
    lines=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(1, 3),
            st.sampled_from(["1", "2"]),
            st.sampled_from([*theirs.RerunValidationStatus]),
        ),
        max_size=12,
    )
)
def test_the_same_iterations_are_skipped(lines, tmp_path_factory):
    text = [
        f"ts=2026-01-01 00:00:00 node=n device=0 jobID={job} rank={rank} iteration={iteration} "
        f"status={status.value} result=nan message='m'"
        for rank, iteration, job, status in lines
    ]
    path = tmp_path_factory.mktemp("tracker") / "lines"
    path.write_text("".join(f"{line}\n" for line in text))
    read = theirs.RerunStateMachine.get_skipped_iterations_from_tracker_file
    assert iterations_to_skip(text) == read(str(path))
    assert RerunStateMachine.get_skipped_iterations_from_tracker_file(str(path)) == read(str(path))


@given(orders=st.lists(st.sampled_from(["next", "rewind", "advance"]), max_size=15))
def test_the_same_microbatches(orders):
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    machine = mock.Mock(get_mode=lambda: theirs.RerunMode.VALIDATE_RESULTS)
    try:
        with mock.patch.object(theirs, "get_rerun_state_machine", lambda: machine):
            pair = RerunDataIterator(range(99)), theirs.RerunDataIterator(iter(range(99)))
            for order in orders:
                read = []
                for iterator in pair:
                    try:
                        read.append(
                            next(iterator) if order == "next" else getattr(iterator, order)()
                        )
                    except (AssertionError, RuntimeError):
                        read.append("no more")
                assert read[0] == read[1]
    finally:
        destroy_rerun_state_machine()
