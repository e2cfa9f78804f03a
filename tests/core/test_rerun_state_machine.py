"""The rerun state machine by scripted results, in one process and for two ranks: no processes."""

import json
import math
from unittest import mock

import pytest
import torch

from minimegatron.core.rerun import states, step_runs, verdicts
from minimegatron.core.rerun.differences import as_plain, from_plain, relative_difference
from minimegatron.core.rerun.states import (
    EXITS,
    RerunDiagnostic,
    RerunMode,
    RerunState,
    ResultTracker,
    iterations_to_skip,
)
from minimegatron.core.rerun.statistics import QuickStats
from minimegatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunErrorInjector,
    RerunStateMachine,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

GO_ON = (False, False, 0)


def new_machine(**options) -> RerunStateMachine:
    """One that has its first step behind it, so that results are judged."""
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS, **options)
    machine.first_iteration_complete = True
    machine.judge.device_of_rank = lambda: ("node", "0")
    return machine


def step(machine: RerunStateMachine, *scripted: list, fatal: bool = True, **options) -> tuple:
    """One step, whose n-th run has the results `scripted[n]`; all of them must be asked for."""
    left = list(scripted)
    while machine.should_run_forward_backward(None):
        for result in left.pop(0):
            machine.validate_result(
                torch.tensor(result), torch.isnan, "not a number", fatal=fatal, **options
            )
    assert not left, "fewer runs than were scripted"
    return machine.should_checkpoint_and_exit()


def resumed(machine: RerunStateMachine, device: str = "0") -> RerunStateMachine:
    """A machine of a new process that has read what `machine` leaves in a checkpoint."""
    told = json.loads(json.dumps(machine.state_dict()))
    other = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    other.judge.device_of_rank = lambda: ("node", device)
    assert other.validate_state_dict(told)
    other.load_state_dict(told)
    return other


BAD, GOOD, OTHER = [1.0, math.nan], [1.0, 2.0], [1.0, math.inf]

# -- The rows of the table --


def test_all_is_well():
    machine = new_machine()
    assert step(machine, GOOD) == step(machine, GOOD) == GO_ON
    assert machine.state is RerunState.NOT_RUNNING_YET and machine.current_iteration == 2


def test_transient():
    assert step(new_machine(), BAD, GOOD) == (False, True, 17)


def test_transient_and_not_fatal():
    machine = new_machine()
    assert step(machine, BAD, GOOD, fatal=False) == step(machine, GOOD) == GO_ON


def test_reproducible():
    machine = new_machine()
    assert step(machine, BAD, BAD) == (True, True, 16)
    assert machine.state is RerunState.WILL_RERUN_FROM_CHECKPOINT


def test_reproducible_and_not_fatal():
    machine = new_machine()
    assert step(machine, BAD, BAD, fatal=False) == step(machine, GOOD) == GO_ON


def test_resumed_on_the_same_device():
    machine = new_machine()
    step(machine, BAD, BAD)
    assert step(resumed(machine), BAD) == (False, True, 16)


@pytest.mark.parametrize("result", [BAD, GOOD], ids=["correct", "persistent"])
def test_resumed_on_another_device(result, caplog):
    machine = new_machine()
    step(machine, BAD, BAD)
    caplog.clear()
    assert step(resumed(machine, "1"), result) == (False, True, 17)
    assert ("correct result" in caplog.text) == (result is BAD)
    assert ("persistent error of node, 0" in caplog.text) == (result is GOOD)


def test_resumed_on_another_device_and_not_fatal():
    machine = new_machine()
    step(machine, BAD, BAD)
    other = resumed(machine, "1")
    assert step(other, BAD, fatal=False) == step(other, GOOD) == GO_ON


def test_the_first_step_of_a_process_is_not_judged(caplog):
    machine = RerunStateMachine(mode="validate_results")
    assert step(machine, BAD) == GO_ON
    assert "the first step of a process is not judged" in caplog.text
    assert step(machine, BAD, GOOD) == (False, True, 17)


def test_disabled():
    machine = RerunStateMachine()
    with pytest.raises(RuntimeError, match="not a number"):
        step(machine, BAD)
    machine.begin_step()
    assert step(machine, BAD, fatal=False) == step(machine, GOOD) == GO_ON


def test_outside_of_a_step_it_is_told_at_once():
    with pytest.raises(RuntimeError, match="bad"):
        new_machine().validate_result(torch.tensor(math.nan), torch.isnan, "bad")


def test_every_state_that_ends_a_run_has_its_code():
    assert {state: code for state, (_, _, code) in EXITS.items()} == {
        RerunState.RERUNNING_IN_PLACE: 17,
        RerunState.WILL_RERUN_FROM_CHECKPOINT: 16,
        RerunState.RERUNNING_FROM_CHECKPOINT: 17,
        RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT: 16,
    }


# -- Which call is compared with which --


def test_the_nth_call_is_compared_with_the_nth():
    """NaN in the second of two calls; in the second run the first call is NaN."""
    assert step(new_machine(), [1.0, math.nan], [math.nan, 2.0]) == (False, True, 17)
    assert step(new_machine(), [1.0, math.nan], [2.0, math.nan]) == (True, True, 16)


@pytest.mark.parametrize(
    ("second", "exits"), [(math.nan, (True, True, 16)), (4.0, (False, True, 17))]
)
def test_a_result_is_kept_as_it_was(second, exits):
    """The program writes the next microbatch's result into the same tensor."""
    machine, result = new_machine(), torch.zeros(())
    given = iter([[math.nan, 5.0], [second, 5.0]])
    while machine.should_run_forward_backward(None):
        for value in next(given):
            result.fill_(value)
            machine.validate_result(result, torch.isnan, "not a number")
    assert machine.should_checkpoint_and_exit() == exits


def test_tolerance():
    def run(second: float) -> tuple:
        machine, values = new_machine(), iter([100.0, second])
        while machine.should_run_forward_backward(None):
            result = torch.tensor(next(values))
            machine.validate_result(result, lambda r: r > 1, "large", tolerance=0.01)
        return machine.should_checkpoint_and_exit()

    assert run(100.5) == (True, True, 16) and run(102.0) == (False, True, 17)


@pytest.mark.filterwarnings("error")
def test_a_loss_that_needs_its_backward_is_judged_without_a_warning():
    machine, values = new_machine(), iter([math.nan, 1.0])
    while machine.should_run_forward_backward(None):
        loss = torch.tensor(next(values), requires_grad=True)
        machine.is_unexpectedly_large(loss, 10.0, "loss")
        machine.validate_result(loss, torch.isnan, "not a number")
    assert machine.should_checkpoint_and_exit() == (False, True, 17)


def test_a_comparison_of_ones_own():
    assert step(new_machine(), BAD, GOOD, comparison_func=lambda a, b: 0.0) == (True, True, 16)
    nan = {"comparison_func": lambda a, b: math.nan}
    assert step(new_machine(), BAD, BAD, **nan) == (False, True, 17)


def test_a_rejected_call_of_an_earlier_step_is_forgotten(caplog):
    """Another rank has step 2 run again; this one's step 1 had a rejected call, which was accepted."""
    machine = new_machine()
    assert step(machine, BAD, GOOD, fatal=False) == GO_ON
    caplog.clear()
    with mock.patch.object(step_runs, "of_any_rank", others_want("rerun", "checkpoint")):
        assert step(machine, GOOD, GOOD, fatal=False) == (True, True, 16)
    assert caplog.text == ""  # this rank has nothing to say of step 2


# -- Decided together --


def others_want(*names: str):
    """Stands in for the message between ranks: another rank wishes for what `names` says."""
    order = {1: ["rerun"], 3: ["checkpoint", "end", "go_on"]}

    def of_any_rank(*wishes: bool) -> tuple[bool, ...]:
        return tuple(w or n in names for w, n in zip(wishes, order[len(wishes)], strict=True))

    return of_any_rank


@pytest.mark.parametrize(
    ("theirs", "exits"),
    [
        (("rerun", "checkpoint"), (True, True, 16)),
        (("rerun", "end"), (False, True, 17)),
        (("rerun", "go_on"), GO_ON),
        ((), GO_ON),
    ],
)
def test_a_rank_without_a_bad_result_does_as_the_others(theirs, exits):
    with mock.patch.object(step_runs, "of_any_rank", others_want(*theirs)):
        assert step(new_machine(), *([GOOD, GOOD] if theirs else [GOOD])) == exits


@pytest.mark.parametrize("theirs", ["checkpoint", "end"])
def test_a_fatal_result_counts_more_than_one_that_is_not(theirs):
    with mock.patch.object(step_runs, "of_any_rank", others_want(theirs)):
        exits = step(new_machine(), BAD, GOOD, fatal=False)
    assert exits == ((True, True, 16) if theirs == "checkpoint" else (False, True, 17))


def test_one_message_a_step_and_none_when_off():
    asked = []
    with mock.patch.object(step_runs, "of_any_rank", lambda *wishes: asked.append(1) or wishes):
        step(new_machine(), GOOD)
        assert len(asked) == 1
        step(RerunStateMachine(), GOOD)
        assert len(asked) == 1


# -- What is put back --


def test_random_numbers_and_ones_own_state_are_put_back():
    import random

    import numpy

    own = {"count": 0}

    def draw() -> list[float]:
        own["count"] += 1
        drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        return [*drawn, float(own["count"])]

    machine = new_machine(state_save_func=lambda: dict(own), state_restore_func=own.update)
    seen = []
    given = iter([BAD, BAD])
    while machine.should_run_forward_backward(None):
        seen.append(draw())
        for result in next(given):
            machine.validate_result(torch.tensor(result), torch.isnan, "not a number")
    assert seen[0] == seen[1]
    # For the checkpoint, they are where the step began.
    assert draw() == seen[0]


def test_a_failed_step_is_no_run_of_the_next_one():
    machine = new_machine()
    machine.begin_step(3)
    assert machine.should_run_forward_backward(None)  # and raises within it
    machine.begin_step(3)
    assert step(machine, GOOD) == GO_ON and machine.current_iteration == 3


# -- Iterators --


@pytest.fixture
def on():
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    get_rerun_state_machine().first_iteration_complete = True
    yield get_rerun_state_machine()
    destroy_rerun_state_machine()


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_repeated_step_reads_the_same(on, num_chunks):
    chunks = [RerunDataIterator(range(10)) for _ in range(num_chunks)]
    given = chunks if num_chunks > 1 else chunks[0]
    read, results = [], iter([[1.0], [math.nan], [1.0], [1.0]])
    for _ in range(3):
        while on.should_run_forward_backward(given):
            read.append([[next(chunk) for _ in range(2)] for chunk in chunks])
            for result in next(results):
                on.validate_result(torch.tensor(result), torch.isnan, "nan", fatal=False)
    assert read == [[pair] * num_chunks for pair in ([0, 1], [2, 3], [2, 3], [4, 5])]


def test_what_was_kept_is_forgotten_after_the_step(on):
    """Also where the next step is one that nobody runs again."""
    iterator, given = RerunDataIterator(range(4)), iter([math.nan, 1.0])
    while on.should_run_forward_backward(iterator):
        next(iterator)
        on.validate_result(torch.tensor(next(given)), torch.isnan, "nan", fatal=False)
    assert iterator.saved_microbatches == []
    on.set_mode("disabled")
    assert next(iterator) == 1


def test_an_iterator_that_cannot_go_back_is_refused(on):
    with pytest.raises(ValueError, match=r"is a list_iterator.*give RerunDataIterator"):
        on.should_run_forward_backward(iter([1]))
    assert on.should_run_forward_backward([None, RerunDataIterator([1])])


def test_a_repeated_step_that_reads_more_is_refused(on):
    iterator = RerunDataIterator([1, 2])
    assert next(iterator) == 1
    iterator.rewind()
    assert next(iterator) == 1
    with pytest.raises(RuntimeError, match="reads more than the 1 microbatches"):
        next(iterator)


def test_nothing_is_kept_when_off():
    iterator = RerunDataIterator([1, 2])
    assert list(iterator) == [1, 2] and iterator.saved_microbatches == []


def test_an_iterator_goes_on_from_its_state(on):
    first, second = RerunDataIterator([1, 2, 3]), RerunDataIterator([3])
    next(first), next(first)
    first.rewind()
    next(first)
    second.load_state_dict(first.state_dict())
    assert next(second) == 2


# -- A resumed run --


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1, 1e-45, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_result_comes_back_from_json_as_it_was(value, dtype):
    result = torch.tensor(value).to(dtype)
    found = from_plain(json.loads(json.dumps(as_plain(result))))
    assert found.dtype == dtype and relative_difference(found, result) == 0.0


def test_results_of_other_kinds():
    assert from_plain(as_plain(torch.tensor([[1, 2]]))).tolist() == [[1, 2]]
    assert float(from_plain(as_plain(0.5))) == 0.5
    with pytest.raises(ValueError, match="a rejected result is a str"):
        as_plain("bad")


def test_large_values_are_remembered():
    machine = new_machine()
    machine.is_unexpectedly_large(torch.tensor(-3.0), 10.0, "loss")
    step(machine, BAD, BAD)
    assert resumed(machine).samples() == {"loss": [3.0, 1]}


def test_nothing_to_resume():
    machine = new_machine()
    step(machine, BAD, GOOD, fatal=False)
    assert machine.state_dict() is None and not machine.validate_state_dict(None)
    step(machine, BAD, GOOD)
    assert machine.state_dict() is None  # a transient error needs no third run


def test_a_disabled_machine_takes_nothing():
    machine, off = new_machine(), RerunStateMachine()
    step(machine, BAD, BAD)
    off.load_state_dict(machine.state_dict())
    assert off.state is RerunState.NOT_RUNNING_YET


def test_the_same_device_is_not_asked_for_ever(caplog):
    machine, codes = new_machine(), []
    step(machine, BAD, BAD)
    for _ in range(states.MAX_RUNS_ON_SAME_DEVICE):
        machine = resumed(machine)
        codes.append(step(machine, BAD)[2])
    assert codes == [16, 16, 17]
    assert "no verdict: all 3 resumed runs were on the suspected device" in caplog.text


# -- Errors on purpose --


@pytest.mark.parametrize("kind", RerunDiagnostic)
def test_an_injected_error_gets_its_verdict(kind):
    machine = new_machine(error_injector=RerunErrorInjector(1, kind))
    if kind is RerunDiagnostic.TRANSIENT_ERROR:
        assert step(machine, GOOD, GOOD) == (False, True, 17)
        return
    assert step(machine, GOOD, GOOD) == (True, True, 16)
    other = resumed(machine, "1")
    said = []
    with mock.patch.object(other.judge, "say", lambda text, fatal=True: said.append(text)):
        assert step(other, GOOD) == (False, True, 17)
    assert said[0].startswith(kind.value.replace("_", " "))


def test_an_injected_error_that_is_not_fatal_is_forgotten():
    """In Megatron the injector waits for a third run, and never injects again."""
    injector = RerunErrorInjector(1, RerunDiagnostic.CORRECT_RESULT)
    machine = new_machine(error_injector=injector)
    for _ in range(2):
        assert step(machine, GOOD, GOOD, fatal=False) == GO_ON


def test_injection_draws_no_number_of_the_run():
    import random

    before, injector = random.getstate(), RerunErrorInjector(5)
    found = [injector.maybe_inject(rank=3) or injector.forget() for _ in range(200)]
    assert 20 < sum(map(bool, found)) < 60 and random.getstate() == before


def test_no_injection():
    assert not any(RerunErrorInjector(0).maybe_inject() for _ in range(50))


# -- Statistics --


def test_two_runs_of_each_step(capsys):
    machine = RerunStateMachine(mode="report_determinism_stats")
    for second in (2.0, 2.5):
        assert step(machine, [1.0, 2.0], [1.0, second]) == GO_ON
    assert capsys.readouterr().out == (
        "> two runs of each step, up to iteration 2:\n"
        ">   not a number: 4 results, 3 identical; relative difference: mean 5.556E-02, p50 "
        "0.000E+00, max 2.222E-01\n"
    )


def test_statistics_of_several_ranks():
    first, second = QuickStats(max_size=3), QuickStats()
    for stats, values in ((first, [0.0, 0.5]), (second, [0.25, 0.0, 1.0, 2.0])):
        for value in values:
            stats.record(value)
    first.combine([second])
    assert (first.samples, first.zero_cnt, first.max) == ([0.5, 0.25, 1.0], 2, 2.0)


# -- The tracker's file --


def test_each_rejected_result_is_a_line(tmp_path):
    path = tmp_path / "lines"
    machine = new_machine(result_rejected_tracker_filename=str(path), job_id="77")
    step(machine, BAD, GOOD, fatal=False)
    machine.judge.tracker.note(
        states.RerunValidationStatus.RERUN_DISABLED, 4, ("n", "cpu"), 9, [1, 2], "two\nlines"
    )
    first, second, third = path.read_text().splitlines()
    assert "node=node device=0 jobID=77 rank=0 iteration=1 status=initial_run result=nan" in first
    assert "status=first_rerun_not_reproducible result=2.0 message='not a number'" in second
    assert third.endswith(
        "rank=4 iteration=9 status=rerun_disabled result=[1, 2] message='two lines'"
    )


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--result-rejected-tracker-filename .*No such file"):
        ResultTracker(tmp_path / "missing" / "lines")


def test_a_disk_that_fills_up_does_not_end_the_run(tmp_path, caplog):
    path = tmp_path / "lines"
    machine = new_machine(result_rejected_tracker_filename=str(path))
    path.unlink()
    path.mkdir()
    assert step(machine, BAD, GOOD, fatal=False) == GO_ON
    assert "cannot append to" in caplog.text


def line(rank: int, iteration: int, job: str = "1", status: str = "rerun_disabled") -> str:
    return (
        f"ts=2026-01-01 00:00:00 node=n device=0 jobID={job} rank={rank} iteration={iteration} "
        f"status={status} result=nan message='m'"
    )


@pytest.mark.parametrize(
    ("lines", "skipped"),
    [
        ([line(0, 3)], []),
        ([line(0, 3), line(0, 3)], [3]),
        ([line(0, 3), line(0, 3, job="2")], [3]),
        ([line(0, 3), line(1, 3), line(0, 3, job="2")], []),
        ([line(0, 3), line(1, 3, job="2"), line(0, 3, job="3")], [3]),
        ([line(0, 3, status="initial_run")] * 3, []),
        ([line(0, 3, status="first_rerun_not_reproducible")] * 3, []),
        ([line(0, 3, status="RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE")] * 2, [3]),
        ([line(0, 5), line(0, 5), line(2, 4), line(2, 4), "rubbish"], [4, 5]),
    ],
)
def test_which_iterations_are_skipped(lines, skipped):
    assert iterations_to_skip(lines) == skipped


# -- This process's machine --


def test_one_machine_a_process():
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    assert get_rerun_state_machine().get_mode() is RerunMode.VALIDATE_RESULTS
    get_rerun_state_machine().set_mode("disabled")
    assert get_rerun_state_machine().get_mode() is RerunMode.DISABLED
    destroy_rerun_state_machine()
    assert get_rerun_state_machine().get_mode() is RerunMode.DISABLED


def test_the_device_of_a_cpu():
    assert verdicts.name_of_device()[1] == "cpu"
