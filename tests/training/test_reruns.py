"""Steps that are run again on real ranks: weights, exit codes, checkpoints, every kind of schedule."""

import tempfile
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch

from minimegatron.tracing.trace_view import Trace
from minimegatron.training import exit_conditions, rerun_state
from minimegatron.training.train_state import TrainState
from tests.asked import asked_for
from tests.ranks import run_ranks
from tests.training.rerun_runs import FLAGS, Fault, run, saved_in
from tests.training.short_runs import PP2, TP2, VP2, ZERO1

STEPS = 4
LAYOUT = f"{PP2} {FLAGS} --train-iters {STEPS}"


def same(first: dict, second: dict) -> bool:
    """Whether two runs ended with the same weights, to the bit."""
    pairs = zip(first["weights"], second["weights"], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# -- Verdicts, at p=2, d=2 --


def runs_recorded(folder: Path) -> list[tuple[int, bool]]:
    """Of the schedule's runs: which one of its training step each was, and whether it went as planned.

    Those of the second copy's pipeline, in whose first run of step 2 the fault was.
    """
    found = Trace.load(folder)
    numbers = range(STEPS + 1)
    runs = [found.step(number, dp=1).run for number in numbers]
    return [
        (run, not found.compare_with_plan(n, dp=1)) for n, run in zip(numbers, runs, strict=True)
    ]


def every_verdict(folder: Path) -> dict:
    """In a rank of four: a clean run, then each kind of fault, then what a resumed run does."""
    found = {"clean": run(LAYOUT)}
    found["not fatal"] = run(f"{LAYOUT} --trace {folder / 'trace'}", Fault(fatal=False))
    found["again, not fatal"] = run(LAYOUT, Fault(comes_again=True, fatal=False))
    found["first step"] = run(LAYOUT, Fault(iteration=1))
    kept = f"--save {folder / 'transient'} --save-interval 1"
    found["transient"] = run(f"{LAYOUT} {kept}", Fault(iteration=3))
    found["saved"] = saved_in(folder / "transient")
    found["transient, resumed"] = run(f"{LAYOUT} {kept} --load {folder / 'transient'}")
    # -- It comes again: the checkpoint is of the step before, whether or not one was due --
    kept = f"--save {folder / 'persistent'} --result-rejected-tracker-filename {folder / 'lines'}"
    found["persistent"] = run(f"{LAYOUT} {kept}", Fault(comes_again=True, iteration=3))
    found["saved for the third run"] = saved_in(folder / "persistent")
    kept += f" --load {folder / 'persistent'}"
    again = Fault(comes_again=True, iteration=3)
    found["same device"] = run(f"{LAYOUT} {kept}", again)
    found["other device"] = run(f"{LAYOUT} {kept}", device="another")
    found["other device, same result"] = run(f"{LAYOUT} {kept}", again, device="another")
    plain = f"--load {folder / 'persistent'} --rerun-mode disabled"
    found["not examined"] = run(f"{LAYOUT} {plain}")
    found["skipped"] = run(f"{LAYOUT} {kept} --rerun-mode disabled")
    found["lines"] = (folder / "lines").read_text()
    return found


@pytest.fixture(scope="module")
def verdicts() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(every_verdict, 4, Path(folder), timeout=300)
        return [rank | {"recorded": runs_recorded(Path(folder) / "trace")} for rank in found]


CODES = {
    "clean": 0,
    "not fatal": 0,
    "again, not fatal": 0,
    "first step": 0,
    "transient": 17,
    "transient, resumed": 0,
    "persistent": 16,
    "same device": 16,
    "other device": 17,
    "other device, same result": 17,
    "skipped": 0,
    "not examined": 0,
}


def test_all_ranks_end_with_the_same_code(verdicts):
    for rank in verdicts:
        assert {name: rank[name]["code"] for name in CODES} == CODES


def test_the_schedule_runs_once_more_on_all_ranks(verdicts):
    runs = {"clean": 4, "not fatal": 5, "again, not fatal": 5, "first step": 4, "transient": 4}
    runs |= {"persistent": 4, "same device": 1, "other device": 1, "skipped": 1, "not examined": 2}
    for rank in verdicts:
        assert {name: rank[name]["num_schedules"] for name in runs} == runs


def test_a_fault_that_passes_leaves_no_trace_in_the_weights(verdicts):
    for rank in verdicts:
        assert same(rank["not fatal"], rank["clean"])
        assert rank["not fatal"]["losses"] == rank["clean"]["losses"]


def test_a_resumed_run_ends_as_a_clean_one(verdicts):
    """With dropout: its random numbers go on where those of the run that ended stood."""
    for rank in verdicts:
        assert same(rank["transient, resumed"], rank["clean"])
        assert same(rank["not examined"], rank["clean"])
        assert rank["saved"] == ["iter_0000001", "iter_0000002"]
        assert rank["saved for the third run"] == ["iter_0000002"]


def test_a_fault_that_stays_counts_if_it_is_not_fatal(verdicts):
    """The test itself: a spoilt loss does change the weights, also where nobody looks at it."""
    for name in ("again, not fatal", "first step"):
        assert not any(same(rank[name], rank["clean"]) for rank in verdicts)


WORDS = {
    # on the last stage of copy 1, which is rank 3
    "not fatal": "iteration 2: transient error: the same device computes another result (first ",
    "first step": "planted; the first step of a process is not judged",
    "transient": "iteration 3: transient error: ",
    "persistent": "iteration 3: no transient error: the same device computes the same (first ",
    "same device": "iteration 3: this is the suspected device again; resume the run on another one",
    "other device": "iteration 3: persistent error of ",
    "other device, same result": "iteration 3: correct result: this device computes the same",
}


@pytest.mark.parametrize("name", WORDS)
def test_the_rank_that_has_seen_it_says_so(verdicts, name):
    *others, last = (rank[name]["said"] for rank in verdicts)
    assert WORDS[name] in last
    assert not [text for text in others if "error" in text or "result (" in text]


def test_rank_0_says_what_happens_next(verdicts):
    first = verdicts[0]
    assert (
        "exiting after iteration 2, with code 17: a result was rejected"
        in (first["transient"]["said"])
    )
    assert (
        "with code 16: a result was rejected again; resume on another device"
        in (first["persistent"]["said"])
    )
    assert (
        "rerun.json is not used: a rejected result is not examined (--rerun-mode)"
        in (first["not examined"]["said"])
    )


def test_the_tracker_has_a_line_for_each(verdicts):
    lines = verdicts[0]["lines"].splitlines()
    assert [line.split("status=")[1].split()[0] for line in lines] == [
        "initial_run",
        "first_rerun_reproducible",
        "second_rerun_not_reproducible",
        "second_rerun_reproducible",
    ]
    assert all("rank=3 iteration=3 " in line and "message='planted'" in line for line in lines)


def test_each_run_of_a_step_is_labelled_and_follows_its_plan(verdicts):
    as_planned = [(1, True), (1, True), (2, True), (1, True), (1, True)]
    assert verdicts[0]["recorded"] == as_planned


def test_an_iteration_that_failed_twice_on_one_rank_is_skipped(verdicts):
    for rank in verdicts:
        assert len(rank["skipped"]["losses"]) <= 1
    said = verdicts[0]["skipped"]["said"]
    assert "> iterations that are skipped: [3]" in said and " iteration 3 is skipped" in said


# -- Every kind of step, each one run twice --

TWICE = "--rerun-mode report_stats --train-iters 3"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1"
KINDS = {
    "dropout, p=2": f"{PP2} --attention-dropout 0.1 --hidden-dropout 0.1",
    "t=2, dropout": f"{TP2} --sequence-parallel --attention-dropout 0.1 --hidden-dropout 0.1",
    "c=2": "--context-parallel-size 2",
    "interleaving with overlap": f"{PP2} {VP2} --overlap-p2p-communication",
    "a planned schedule": f"{PP2} --pipeline-schedule gpipe",
    "ZeRO-1 with both overlaps": f"{ZERO1} --overlap-grad-reduce --overlap-param-gather",
    "experts": f"{EXPERTS} --expert-model-parallel-size 2",
    "experts with biases": f"{EXPERTS} --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid",
    "further tokens": f"{PP2} --mtp-num-layers 1 --position-embedding-type rope",
    "fp16": f"{PP2} --fp16 --loss-scale 128",
    "fp16, two chunks, deferred": f"{PP2} {VP2} --fp16 --loss-scale 128 "
    "--defer-embedding-wgrad-compute",
    "combined": f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--overlap-moe-expert-parallel-comm",
    "recompute": f"{PP2} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --hidden-dropout 0.1",
    "torch's DDP": "--DDP-impl torch",
}


LEFT_TO_FULL = (
    "t=2, dropout",
    "interleaving with overlap",
    "a planned schedule",
    "experts with biases",
    "fp16",
    "recompute",
    "torch's DDP",
)
"""Much of each is in another kind."""


def once_and_twice(names: list[str]) -> dict:
    """In a rank of two: kinds of step, plain and with each step run twice."""
    found = {}
    for name in names:
        flags = KINDS[name]
        plain = run(f"{flags} --train-iters 3", Fault(iteration=0))
        twice = run(f"{flags} {TWICE}", Fault(iteration=0))
        found[name] = (plain, twice)
    return found


@pytest.fixture(scope="module")
def kinds(request) -> list[dict]:
    """By rank, of the kinds that this session asks for."""
    names = asked_for(request, "test_a_repeated_step_gives_the_same", "name")
    return run_ranks(once_and_twice, 2, names, timeout=300)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name in LEFT_TO_FULL else [])
        for name in KINDS
    ],
)
def test_a_repeated_step_gives_the_same(kinds, name):
    for rank in kinds:
        plain, twice = rank[name]
        assert plain["code"] == 0, plain["said"]
        assert (plain["num_schedules"], twice["num_schedules"]) == (3, 6)
        assert plain["losses"] == twice["losses"] and same(plain, twice)
    assert "planted: " in kinds[0][name][1]["said"]
    assert "identical; relative" not in kinds[0][name][1]["said"]


# -- Without a checkpoint of now --


@pytest.mark.parametrize(("should_checkpoint", "written"), [(True, []), (False, ["F"])])
def test_a_new_examination_is_not_written_beside_an_older_one(should_checkpoint, written):
    """The run was resumed from F, examined there, went on, and has no --save."""
    state, folders = TrainState(iteration=9, rerun_folder="F"), []
    stand_ins = {
        "get_args": lambda: Namespace(save=None),
        "get_train_state": lambda: state,
        "print_rank_0": print,
    }
    saves = mock.patch.object(
        rerun_state, "save_rerun_state", lambda folder: folders.append(str(folder))
    )
    with mock.patch.multiple(exit_conditions, **stand_ins), saves:
        assert exit_conditions.end_after_rejected_result(
            should_checkpoint, True, 16, [], None, None
        )
    assert folders == written and state.exit_code == 16
