"""Checks the warm-up count, then trains a GPT with the student's loop: order, losses, gradients."""

import random
import traceback
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.pipeline_parallel import schedule_table
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.exercises.bench_gpt import (
    MICRO_BATCH,
    SEQ,
    GptStep,
    StepCase,
    check_gradients,
    forward_step_func,
    on_these_ranks,
    one_process,
)
from minimegatron.exercises.bench_rendezvous import GET_TRANSPORT, RendezvousTransport
from minimegatron.exercises.check import (
    Case,
    Result,
    Wrong,
    check_numbers,
    check_order,
    check_value,
    installed,
    recorded,
)
from minimegatron.planner.actions import COMMUNICATE
from minimegatron.planner.plan import plan
from minimegatron.tracing.step import Step

OURS = (
    "minimegatron.core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving"
)


def cases(seed: int) -> list[Case]:
    """M < p, M = 1, evaluation, an odd M over two replicas, and last what is replayed: M > p."""
    draw = random.Random(seed)
    sizes = [(4, draw.choice([2, 3]), False), (4, 1, False), (4, draw.choice([2, 5]), True)]
    sizes += [(2, draw.choice([3, 5]), False), (4, draw.choice([6, 7, 8]), False)]
    return [
        Case(
            f"{p} stages, M={M}" + (", evaluation" if only else ", dp=2" if p == 2 else ""),
            p=p,
            M=M,
            forward_only=only,
            seed=seed,
        )
        for p, M, only in sizes
    ]


def run(student: ModuleType, case: Case) -> Result:
    """The count, then one step of a GPT with the student's loop."""
    check_warmup(student)
    step_case = StepCase(pp=case.p, num_microbatches=case.M, seed=case.seed)
    step = on_these_ranks(step_case)
    loop = student.forward_backward_pipelining_without_interleaving
    with installed(RendezvousTransport, GET_TRANSPORT), installed(loop, OURS):
        try:
            with recorded() as recording:
                reports = evaluate(step) if case.forward_only else step.forward_backward()
        except StopIteration as error:
            raise Wrong(_too_many_words(error, student, case)) from None
    done = recording.step(0, dp=step.groups.dp.rank())
    check_calls(done, case)
    check_reports(step, reports)
    if not case.forward_only:
        serial = one_process(step_case, step.groups.dp.size())
        serial.forward_backward()
        check_gradients(step, serial.gradients())
    return Result(achieved(done, case), recording)


def _too_many_words(error: StopIteration, student: ModuleType, case: Case) -> str:
    """More forwards than microbatches, or more backwards than forwards: which, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next(
        (f"line {f.lineno}" for f in reversed(frames) if f.filename == student.__file__), ""
    )
    where = f"rank {dist.get_rank()}: {line} of your file"
    if any(frame.name == "forward_step_func" for frame in frames):
        return (
            f"{where} does a forward of a microbatch that does not exist: the data iterator is "
            f"empty after {case.M}\nAll phases together do {case.M} forwards, numbers 0 to "
            f"{case.M - 1}."
        )
    text = f"{where} does a backward, but no microbatch is in flight"
    if case.forward_only:
        return (
            text + "\nThis is an evaluation (forward_only): nothing is kept, and nobody goes back."
        )
    return text + f"\nEvery microbatch has one forward and one backward: {case.M} of each."


def check_warmup(student: ModuleType) -> None:
    """The count, for a table of sizes."""
    for p, M in ((4, 8), (4, 2), (4, 1), (8, 3), (2, 4), (1, 4)):
        for rank in range(p):
            found = student.get_num_warmup_microbatches(p, rank, M)
            expected = schedule_table.get_num_warmup_microbatches(p, rank, M)
            why = _warmup_words(p, rank, M)
            check_value(f"get_num_warmup_microbatches({p}, {rank}, {M})", found, expected, why)


def _warmup_words(p: int, rank: int, M: int) -> str:
    after = p - rank - 1
    if after == 0:
        return (
            "No stage follows this one: its first backward can come right after its first forward."
        )
    why = (
        f"{after} stage{'s follow' if after > 1 else ' follows'} stage {rank} of {p}; microbatch 0 "
    )
    why += "must go through all of them before its gradient can come back."
    if after > M:
        why += f"\nBut there are only {M} microbatches to forward: take the smaller number."
    return why


def evaluate(step: GptStep) -> list:
    """Forwards only, as `training.evaluate` calls the schedule."""
    with torch.no_grad():
        return get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=[iter(step.data)],
            model=step.chunks,
            num_microbatches=step.case.num_microbatches,
            seq_length=SEQ,
            micro_batch_size=MICRO_BATCH,
            forward_only=True,
            pg_collection=step.groups,
        )


# -- What was done --


def check_calls(done: Step, case: Case) -> None:
    """Forwards and backwards as planned; then the calls between stages."""
    planned = plan("1f1b", case.p, case.M, forward_only=case.forward_only)
    for stage in range(case.p):
        found = [action for action in done.actions(stage) if action.kind != COMMUNICATE]
        wanted = list(planned.work(stage))
        _explained(wanted, found, stage, case)
    for stage in range(case.p):
        wanted, found = planned.ranks[stage], done.actions(stage)
        if not case.forward_only:
            _check_exchanges(wanted, found, done.stages[stage].rank)


def _explained(wanted: list, found: list, stage: int, case: Case) -> None:
    try:
        check_order(wanted, found, stage)
    except Wrong as wrong:
        text = str(wrong).replace(f"rank {stage}:", f"stage {stage} of {case.p}:", 1)
        held, peak = _peak(found), _peak(wanted)
        if case.forward_only:
            text += "\nThis was an evaluation (forward_only): there is nothing to go back for."
        elif len(found) < len(wanted):
            missing = len(wanted) - len(found)
            text += f"\n{missing} of {len(wanted)} forwards and backwards were never done."
        elif held > peak:
            text += f"\nYours holds {held} microbatches at once; 1F1B needs no more than {peak}."
        raise Wrong(text) from None


def _check_exchanges(wanted: list, found: list, rank: int) -> None:
    try:
        check_order(wanted, found, rank, _call_words)
    except Wrong as wrong:
        raise Wrong(
            f"{wrong}\nForwards and backwards are in the right order; the calls between stages are "
            "not. A send waits until the neighbour receives. Where both want to send to each other, "
            "one fused call must do both, or they wait for each other for ever (perhaps only with "
            "more microbatches than here)."
        ) from None


def _peak(actions: list) -> int:
    held = peak = 0
    for action in actions:
        held += 1 if action.kind == "forward" else -1
        peak = max(peak, held)
    return peak


def _call_words(action: Any) -> str:
    """F3 for a forward; the name of a call, and the microbatches that it moves."""
    if action.kind != COMMUNICATE:
        return f"{action.kind[0].upper()}{action.microbatch}"
    moved = [
        f"{message.direction} {'F' if message.payload == 'activation' else 'B'}{message.microbatch}"
        for message in action.messages
    ]
    return f"{action.call}({', '.join(sorted(moved))})"


# -- What came of it --


def check_reports(step: GptStep, reports: Any) -> None:
    """The last stage's losses, microbatch by microbatch; nothing elsewhere."""
    if not isinstance(reports, list):
        raise Wrong(f"rank {dist.get_rank()}: the schedule returned {type(reports).__name__}")
    if step.groups.pp.rank() != step.case.pp - 1:
        return
    serial = one_process(step.case, step.groups.dp.size())
    expected = serial.forward_backward()[step.groups.dp.rank() :: step.groups.dp.size()]
    for number, (report, wanted) in enumerate(zip(reports, expected, strict=True)):
        what = f"the loss of microbatch {number}"
        check_numbers(what, report["loss"], wanted["loss"], dist.get_rank(), step.sizes())


def achieved(done: Step, case: Case) -> dict[str, str]:
    """Counted on the student's own run: peaks, messages, and the bubble of that order."""
    found = [[a for a in done.actions(s) if a.kind != COMMUNICATE] for s in range(case.p)]
    messages = sum(len(a.messages) for s in range(case.p) for a in done.actions(s)) // 2
    if case.forward_only:
        return {"messages": f"{messages}"}
    p, M = case.p, case.M
    return {
        "bubble": f"{(p - 1) / (M + p - 1):.1%} = {p - 1}/{M + p - 1}",
        "microbatches held": ", ".join(str(_peak(actions)) for actions in found),
        "messages": f"{messages}",
    }
