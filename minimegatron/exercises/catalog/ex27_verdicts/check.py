"""Checks pairs of results, one rank's verdicts, what two ranks decide, and their steps."""

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.exercises.bench.noting import note
from minimegatron.exercises.catalog.ex27_verdicts.rows import (
    AGAIN,
    CHECKPOINT,
    ELSEWHERE,
    END,
    EXITS,
    GO_ON,
    NOTHING,
    Row,
    decision_of,
    is_same,
    pairs,
    rows,
    verdict_of,
    why_not_same,
    why_verdict,
)
from minimegatron.exercises.check import Case, Result, Wrong, wrong_value

REPLACES = (
    "minimegatron.core.rerun.differences.relative_difference",
    "minimegatron.core.rerun.verdicts.ResultJudge.judge_again",
    "minimegatron.core.rerun.step_runs.of_any_rank",
)
SAME, VERDICT, DECISION, STEP = "the same?", "the verdict", "the decision", "the step"
PHASES = {
    "after the first run": (NOTHING, AGAIN),
    "after the second run": (NOTHING, GO_ON, CHECKPOINT, END),
    "after the third run": (NOTHING, GO_ON, ELSEWHERE, END),
}
STEPS = {
    "no rank has a bad result": [[NOTHING], [NOTHING]],
    "a fault that passes, on rank 0": [[AGAIN, GO_ON], [NOTHING, NOTHING]],
    "a fault that passes, on rank 1": [[NOTHING, NOTHING], [AGAIN, GO_ON]],
    "a fatal fault, on rank 0": [[AGAIN, END], [NOTHING, NOTHING]],
    "a fault that stays, on rank 1": [[NOTHING, NOTHING], [AGAIN, CHECKPOINT]],
    "a fault on each rank": [[AGAIN, GO_ON], [AGAIN, CHECKPOINT]],
}


def cases(seed: int) -> list[Case]:
    """First what one rank computes; then what two decide, and whether they do it together."""
    draw = random.Random(seed)
    found = [
        Case("pairs of numbers", part=SAME, pairs=pairs(draw)),
        Case("with NaN", part=SAME, pairs=pairs(draw, "nan")),
        Case("with Inf", part=SAME, pairs=pairs(draw, "inf")),
    ]
    for number in range(4):
        words = ("no bad result", "one run", "two runs", "three runs")[number]
        found.append(Case(words, part=VERDICT, rows=rows(draw, number)))
    for words, asks in PHASES.items():
        both = [[a, b] for a in asks for b in asks]
        both = [pair for pair in both if pair != [NOTHING, NOTHING] or AGAIN in asks]
        found.append(Case(words, part=DECISION, both=both))
    for words, asks in STEPS.items():
        found.append(Case(words, part=STEP, asks=asks, seed=draw.randrange(100)))
    return found


# -- On a rank --


class _Step:
    """Does what a script says. Its runs and its update have messages of different groups."""

    def __init__(self, asks: list[str], seed: int):
        self._asks, self.done = asks, []
        self._numbers = torch.full((3,), float(seed))

    def run(self) -> None:
        self._note("run")
        dist.all_reduce(self._numbers, group=parallel_state.get_data_parallel_group())

    def ask(self) -> str:
        num_runs = self.done.count("run")
        if not num_runs:
            raise Wrong("step.ask was called before step.run: there is no result yet")
        return self._asks[min(num_runs, len(self._asks)) - 1]

    def put_back(self) -> None:
        self._note("put_back")

    def update(self) -> None:
        self._note("update")
        dist.all_reduce(self._numbers[:1].clone())

    def _note(self, what: str) -> None:
        note(what)
        self.done.append(what)
        if len(self.done) > 10:
            raise Wrong(f"rank {dist.get_rank()}: the step does not end: {', '.join(self.done)}")


def run(student: ModuleType, case: Case) -> Any:
    """This rank's answers."""
    if case.part == SAME:
        return [_plain("is_same", student.is_same(*pair), bool) for pair in case.pairs]
    if case.part == VERDICT:
        return [_verdict(student.verdict(list(row[0]), *row[1:])) for row in case.rows]
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel()
    if case.part == DECISION:
        return [_asked(student, pair, rank) for pair in case.both]
    step = _Step(case.asks[rank], case.seed)
    found = student.train_step(step, dist.group.WORLD)
    return {"exits": found, "done": step.done}


def _asked(student: ModuleType, pair: list[str], rank: int) -> str:
    note([*pair, "begins"])
    found = _plain("decide", student.decide(pair[rank], dist.group.WORLD), str)
    note([*pair, "ends"])
    # Or a rank that leaves early would meet the other one in the next decision.
    dist.barrier(parallel_state.get_data_parallel_group())
    return found


def _plain(name: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        returned = " (was `return` forgotten?)" if value is None else ""
        raise Wrong(
            f"{name} returned a {type(value).__name__}{returned}; a {kind.__name__} is expected"
        )
    return value


def _verdict(value: Any) -> list[Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        given = f"{len(value)} values" if isinstance(value, tuple) else type(value).__name__
        raise Wrong(f"verdict returned {given}; (verdict or None, what is asked for) is expected")
    return list(value)


def judge_hang(case: Case, notes: Sequence[list[Any]]) -> None:
    """A rank that is in `decide` while another one has left it."""
    if case.part == DECISION and len({len(said) for said in notes}) > 1:
        most = max(range(len(notes)), key=lambda rank: len(notes[rank]))
        raise Wrong(
            f"rank {most} has left decide, and rank {1 - most} waits in it (rank 0 asks for "
            f"{notes[1 - most][-1][0]!r}, rank 1 for {notes[1 - most][-1][1]!r})\nA collective needs "
            "every rank of its group. Which of your lines lets a rank leave before?"
        )


# -- Judging --


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """Each answer of each rank."""
    if case.part == STEP:
        return _judge_step(case, answers)
    for answer in answers:
        if case.part == SAME:
            _judge_pairs(case, answer)
        elif case.part == VERDICT:
            _judge_rows(case, answer)
    if case.part == DECISION:
        _judge_decisions(case, answers)
    return None


def _judge_pairs(case: Case, answer: list[bool]) -> None:
    for pair, found in zip(case.pairs, answer, strict=True):
        if found != is_same(*pair):
            first, second, tolerance = pair
            what = f"is_same({first:g}, {second:g}, tolerance={tolerance:g})"
            raise wrong_value(what, found, not found, why_not_same(*pair))


def _judge_rows(case: Case, answer: list[list[Any]]) -> None:
    for given, found in zip(case.rows, answer, strict=True):
        row, expected = Row(*given), verdict_of(Row(*given))
        if tuple(found) != expected:
            device = f", on the {'suspected' if row.on_suspected_device else 'other'} device"
            shown = ", ".join(f"{result:g}" for result in row.results)
            what = (
                f"verdict([{shown}], tolerance {row.tolerance:g}, "
                f"{'fatal' if row.fatal else 'not fatal'}{device if len(row.results) > 2 else ''})"
            )
            raise wrong_value(what, tuple(found), expected, why_verdict(row, tuple(found)))


def _judge_decisions(case: Case, answers: Sequence[list[str]]) -> None:
    own = [[decision_of([pair[rank]]) for pair in case.both] for rank in range(len(answers))]
    for rank, answer in enumerate(answers):
        for (first, second), found in zip(case.both, answer, strict=True):
            expected = decision_of([first, second])
            if found == expected:
                continue
            why = "Which of the two requests counts more?"
            if found == NOTHING:
                why = "What happens if no rank asks for anything?"
            elif list(map(list, answers)) == own:
                why = "Each rank does what it asks for itself. How does it hear of the other one?"
            asked = f"rank 0 asks for {first!r}, rank 1 for {second!r}"
            raise wrong_value(f"rank {rank}: the decision where {asked}", found, expected, why)


def _judge_step(case: Case, answers: Sequence[Any]) -> Result:
    asks = [list(of_rank) for of_rank in zip(*case.asks, strict=True)]
    decisions = [decision_of(pair) for pair in asks]
    last, undone = decisions[-1], ["put_back"] if decisions[-1] != GO_ON else ["update"]
    wanted = ["run", *["put_back", "run"] * (len(decisions) - 1), *undone]
    for rank, answer in enumerate(answers):
        done, what = list(answer["done"]), f"rank {rank}: what train_step called, {case}"
        if done != wanted:
            why = _why_step(done, wanted, case.asks[rank][0] == NOTHING)
            raise wrong_value(what, done, wanted, why)
        exits = answer["exits"]
        if exits != EXITS[last]:
            why = f"All ranks have decided {last!r}. Which row of EXITS is it?"
            raise wrong_value(
                f"rank {rank}: what train_step returned, {case}", exits, EXITS[last], why
            )
    return Result({"runs": str(len(decisions)), "decided": last})


def _why_step(done: list[str], wanted: list[str], is_fine: bool) -> str:
    if done.count("run") < wanted.count("run"):
        return (
            "This rank's own result was fine. Who else needs it in the step?"
            if is_fine
            else "The step was to run again. Who said so, and what was done with it?"
        )
    if done.count("run") > wanted.count("run"):
        return "The step ran more often than was decided. When does your loop end?"
    if "update" in done and "update" not in wanted:
        return "The run ends here, and the weights were changed. Whose results are these gradients?"
    if done.count("put_back") < wanted.count("put_back"):
        return (
            "The run ends here. Of which moment is a checkpoint that is saved now?"
            if done[-1:] == ["run"]
            else "What would a second run read, and which random numbers would it draw?"
        )
    return "All the right calls are expected in their order, and no others."
