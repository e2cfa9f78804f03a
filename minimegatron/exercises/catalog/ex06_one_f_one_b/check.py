"""Trains a GPT with the student's loop: order, freed outputs, losses, gradients."""

import random
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.gpt_step import (
    MICRO_BATCH,
    SEQ,
    GptStep,
    StepCase,
    forward_step_func,
    on_these_ranks,
)
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.bench.noting import note
from minimegatron.exercises.bench.recorded_run import recorded, run_of
from minimegatron.exercises.bench.untagged_messages import without_tags
from minimegatron.exercises.catalog.ex06_one_f_one_b.watch import (
    COMPLAINT,
    END,
    OUTCOME,
    PARTS,
    Watch,
    named_shapes,
)
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed, wrong_order
from minimegatron.planner.actions import COMMUNICATE, COOLDOWN, STEADY, WARMUP, Action
from minimegatron.planner.plan import Plan, plan
from minimegatron.tracing.step import Step

LOOP = "one_f_one_b"
OURS = f"minimegatron.core.pipeline_parallel.loops.{LOOP}"
WHOLE = "forward_backward_pipelining_without_interleaving"
"""What an older stub asked for: the whole function, with the loop in the middle."""
REPLACES = (OURS,)
PHASES = dict(zip((WARMUP, STEADY, COOLDOWN), PARTS, strict=False))
WORLD = 4


def cases(seed: int) -> list[Case]:
    """M < p, M = 1, evaluation, an odd M over two replicas, and last what is replayed: M > p."""
    draw = random.Random(seed)
    sizes = [(4, draw.choice([2, 3]), False), (4, 1, False), (4, draw.choice([2, 5]), True)]
    sizes += [(2, draw.choice([3, 5]), False), (4, draw.choice([6, 7, 8]), False)]
    return [
        Case(
            f"{p} stages, M={M}" + (", evaluation" if only else ", dp=2" if p == 2 else ""),
            step=StepCase(pp=p, num_microbatches=M, seed=data_seed(seed)).values,
            p=p,
            M=M,
            forward_only=only,
        )
        for p, M, only in sizes
    ]


# -- In the student's room --


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """One step of a GPT with the student's loop."""
    step = on_these_ranks(case.step)
    watch = Watch(student, step.groups.pp.rank(), case.p, case.M, case.forward_only)
    with (
        without_tags(),
        _installed(student),
        watch.watching(),
    ):
        try:
            with recorded() as recording:
                reports = _one_step(step, case.forward_only)
                note([END, None])
        except (StopIteration, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if (cause := watch.cause()) is not None:
                raise cause from None
            if not isinstance(error, StopIteration):
                raise
            words, what = _too_many_words(error, case, student.__file__)
            raise Wrong(words, watch.phase(what)) from None
    return {
        "recording": recording(),
        "reports": reports,
        "num_freed": watch.num_freed,
        "kept": watch.kept[:1],
        "complaints": watch.complaints,
        "gradients": {} if case.forward_only else step.gradients(),
    }


def _installed(student: ModuleType) -> AbstractContextManager:
    """The student's loop in the place of ours; or the whole function, if the file has that one."""
    if hasattr(student, LOOP) or not hasattr(student, WHOLE):
        return installed(getattr(student, LOOP), OURS)
    return installed(
        getattr(student, WHOLE), f"minimegatron.core.pipeline_parallel.schedules.{WHOLE}"
    )


def _one_step(step: GptStep, forward_only: bool) -> list:
    """One training step; or forwards only, as `training.evaluate` calls the schedule."""
    function = get_forward_backward_func()
    function = partial(function, adjust_tensor_shapes_fn=named_shapes)
    if not forward_only:
        return step.forward_backward(function)
    with torch.no_grad():
        return function(
            forward_step_func=forward_step_func,
            data_iterator=[iter(step.data)],
            model=step.chunks,
            num_microbatches=step.case.num_microbatches,
            seq_length=SEQ,
            micro_batch_size=MICRO_BATCH,
            forward_only=True,
            pg_collection=step.groups,
        )


def _too_many_words(error: StopIteration, case: Case, file: str) -> tuple[str, str]:
    """More forwards than microbatches, or more backwards than forwards: where; and "F" or "B"."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f"line {f.lineno}" for f in reversed(frames) if f.filename == file), "")
    where = f"rank {dist.get_rank()}, {line} of your file:"
    if any(frame.name == "forward_step_func" for frame in frames):
        return (
            f"{where} does a forward of a microbatch that does not exist: the data iterator is "
            f"empty after {case.M}\nAll phases together do {num_of(case.M, 'forward')}, numbers 0 to "
            f"{case.M - 1}."
        ), "F"
    why = f"Every microbatch has one forward and one backward: {case.M} of each."
    if case.forward_only:
        why = "This is an evaluation (forward_only): nothing is kept, and nobody goes back."
    return f"{where} does a backward, but no microbatch is in flight\n{why}", "B"


# -- Judged --


def judge(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    """The order, phase by phase; then what came of it."""
    run, dp = run_of(answers), WORLD // case.p
    steps = [run.step(0, dp=replica) for replica in range(dp)]
    for step in steps:
        _judge_order(case, _done_in(step, case), [True] * case.p)
    _judge_complaints([answer["complaints"] for answer in answers])
    try:
        _judge_outcome(case, answers)
    except Wrong as wrong:
        raise Wrong(str(wrong), OUTCOME) from None
    return Result(_achieved(steps[0], case), run)


def judge_hang(case: Case, notes: Sequence[list[Any]]) -> None:
    """What the ranks did until they hung, against the plan. A hang's cause is often earlier."""
    done = [_numbered(words) for words in notes]
    is_over = [any(name == END for name, _ in words) for words in notes]
    # Ranks of one pipeline are dp apart.
    dp = WORLD // case.p
    for replica in range(dp):
        _judge_order(case, done[replica::dp], is_over[replica::dp])
    _judge_complaints([[it for name, it in words if name == COMPLAINT] for words in notes])


def _judge_complaints(complaints: Sequence[list[list[str]]]) -> None:
    """Raises Wrong for the first rank's complaint about the first part."""
    for part in PARTS:
        for of, text in (one for mine in complaints for one in mine):
            if of == part:
                raise Wrong(text, part)


def _done_in(step: Step, case: Case) -> list[list[str]]:
    return [[_call_words(action) for action in step.actions(stage)] for stage in range(case.p)]


def _numbered(notes: Sequence[Any]) -> list[str]:
    """Noted calls as words; backwards are numbered in their order."""
    words, num_backwards = [], 0
    for name, microbatch in notes:
        if name == "F":
            words.append(f"F{microbatch}")
        elif name == "B":
            words.append(f"B{num_backwards}")
            num_backwards += 1
        elif name not in (COMPLAINT, END):
            words.append(str(name))
    return words


def _call_words(action: Action) -> str:
    """F3 for a forward; the name of a call."""
    if action.kind == COMMUNICATE:
        return str(action.call)
    return f"{action.kind[0].upper()}{action.microbatch}"


def _judge_order(case: Case, done: list[list[str]], is_over: list[bool]) -> None:
    """Raises Wrong at the first phase in which a stage leaves the plan.

    Forwards and backwards of all stages first: where they are right, the calls between them.
    """
    planned = plan("1f1b", case.p, case.M, forward_only=case.forward_only)
    for looks_at_calls in (False, True):
        for phase, part in PHASES.items():
            for stage, words in enumerate(done):
                actions = _planned_words(planned, stage, looks_at_calls)
                found = [word for word in words if looks_at_calls or word[0] in "FB"]
                if (wrong := _left_plan(actions, found, phase, is_over[stage])) is not None:
                    raise Wrong(_order_words(case, planned, stage, looks_at_calls, *wrong), part)


def _planned_words(planned: Plan, stage: int, has_calls: bool) -> list[tuple[str, str]]:
    """(word, phase) of each of a stage's actions."""
    return [
        (_call_words(action), action.phase)
        for action in planned.ranks[stage]
        if has_calls or action.kind != COMMUNICATE
    ]


def _left_plan(
    planned: list[tuple[str, str]], found: list[str], phase: str, is_over: bool
) -> tuple[list[str], list[str]] | None:
    """Plan and run up to the phase's end, if they differ there; None if they do not."""
    phases = list(PHASES)
    later = phases[phases.index(phase) + 1 :]
    wanted = [word for word, of in planned]
    end = next((i for i, (_, of) in enumerate(planned) if of in later), len(planned))
    if phase == phases[-1]:
        end = max(end, len(found))
    here, there = wanted[:end], found[:end]
    # Of ranks that hang, one that is still in its loop is not the one that left the plan.
    is_behind = not is_over and there == here[: len(there)]
    return None if here == there or is_behind else (here, there)


def _order_words(
    case: Case, planned: Plan, stage: int, has_calls: bool, wanted: list[str], found: list[str]
) -> str:
    text = str(wrong_order(wanted, found, stage))
    text = text.replace(f"rank {stage}:", f"stage {stage} of {case.p}:", 1)
    if case.forward_only and any(word[0] == "B" or "backward" in word for word in found):
        return f"{text}\nThis is an evaluation (forward_only): there is nothing to go back for."
    if has_calls:
        return f"{text}\n{_calls_words(wanted, found)}"
    held, peak = _peak(found), planned.peak_in_flight(stage)
    if held > peak:
        text += (
            f"\nYours holds {num_of(held, 'microbatch', 'microbatches')} at once; 1F1B needs no "
            f"more than {peak}."
        )
    elif len(found) < len(wanted) and found == wanted[: len(found)]:
        missing = len(wanted) - len(found)
        text += f"\nYour loop ended: {missing} of {len(wanted)} forwards and backwards are missing."
        if wanted[len(found)][0] == "B":
            text += " Each microbatch that was forwarded needs its backward."
    return text


def _calls_words(wanted: list[str], found: list[str]) -> str:
    """What is wrong with the first call between stages that differs."""
    pairs = zip_longest(wanted, found, fillvalue="")
    first, (planned, called) = next((i, (a, b)) for i, (a, b) in enumerate(pairs) if a != b)
    if not planned:
        return f"The loop should be over here, but it calls {called}. No neighbour answers it."
    if not called:
        return f"{planned} was never called. The neighbour waits for it."
    if planned.startswith(f"{called}_recv"):
        return (
            "Here both neighbours want to send to each other, and a send waits until the neighbour "
            "receives. Separate calls hang; or, if every second stage receives first, one message "
            "waits for the other. The stub asks for messages that cross: one fused call must do both."
        )
    if called.startswith(f"{planned}_recv"):
        return _nothing_left_words(planned, called)
    if called == "recv_forward" and not any(word[0] == "F" for word in wanted[first:]):
        return "After its last forward a stage receives no input any more."
    if wanted[first + 1 : first + 2] == [called]:
        return f"{planned} is left out before {called}. The neighbour waits for it."
    if found[first + 1 : first + 2] == [planned]:
        return f"{called} is one call too many before {planned}. No neighbour answers it."
    return "Forwards and backwards are right up to here; the calls between stages are not."


def _nothing_left_words(planned: str, called: str) -> str:
    what = called.partition("_recv_")[2]
    if what == "forward":
        why = "After its last forward a stage receives no input any more"
    else:
        why = "In the warm-up no gradient comes back yet"
    return f"{called} sends, then waits for one more {what} message. {why}: call {planned}."


def _peak(words: Sequence[str]) -> int:
    held = peak = 0
    for word in words:
        held += {"F": 1, "B": -1}.get(word[0], 0)
        peak = max(peak, held)
    return peak


# -- What came of it --


def _judge_outcome(case: Case, answers: Sequence[dict[str, Any]]) -> None:
    reference = Reference(case.step, WORLD).run()
    for rank, answer in enumerate(answers):
        if not case.forward_only and not reference.is_last_stage(rank):
            _judge_freed(reference.who(rank), answer["num_freed"], case.M, answer["kept"])
    reference.check_losses([answer["reports"] for answer in answers])
    if not case.forward_only:
        reference.check_gradients([answer["gradients"] for answer in answers])


def _judge_freed(who: str, num_freed: int, M: int, kept: Sequence[str]) -> None:
    if num_freed == M:
        for words in kept:
            raise Wrong(
                f"rank {who}: {words}, although it has been sent\n"
                "All outputs are freed in the end, but a stage's memory is fullest while it computes. "
                "From which line on does nobody need an output's numbers?"
            )
        return
    raise Wrong(
        f"rank {who}: free_output was called for {num_freed} of {M} outputs\n"
        "An output that has been sent is needed no more: what backward needs is in the graph. Each "
        "one that is kept costs the memory of a message, for as long as its microbatch is in flight."
    )


def _achieved(done: Step, case: Case) -> dict[str, str]:
    """Counted on the student's own run: peaks, messages, and the bubble of that order."""
    found = _done_in(done, case)
    messages = sum(len(a.messages) for s in range(case.p) for a in done.actions(s)) // 2
    if case.forward_only:
        return {"messages": f"{messages}"}
    p, M = case.p, case.M
    return {
        "bubble": f"{(p - 1) / (M + p - 1):.1%} = {p - 1}/{M + p - 1}",
        "microbatches held": ", ".join(str(_peak(words)) for words in found),
        "messages": f"{messages}",
    }
