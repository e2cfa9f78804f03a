"""Runs the student's schedule on 4 real ranks, as it was planned."""

import random
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from minimegatron.exercises.bench.gpt_step import StepCase, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.bench.recorded_run import recorded, run_of
from minimegatron.exercises.catalog.ex18_memory_cap.alone import judged, planned
from minimegatron.exercises.check import Case, Result, Wrong, data_seed
from minimegatron.planner.actions import Action
from minimegatron.planner.plan import Plan
from minimegatron.planner.stage import Stage
from minimegatron.training.pipeline_schedule import get_planned_forward_backward_func

WORLD = 4


def cases(seed: int) -> list[Case]:
    """One step."""
    draw, M, caps = random.Random(seed), 6, [3, 3, 2, 1]
    if seed:
        M, caps = draw.randint(4, 8), [draw.randint(2, 3), 3, 2, 1]
    step = StepCase(pp=4, num_microbatches=M, seed=data_seed(seed)).values
    words = f"p=4, M={M}, room for {', '.join(map(str, caps))}"
    return [Case(words, part="a real step", step=step, M=M, caps=caps)]


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """The plan, and the step that follows it."""
    mine = planned(student, case.M, case.caps)
    step = on_these_ranks(case.step)
    with recorded() as recording:
        step.forward_backward(get_planned_forward_backward_func(_replaying(mine.ranks)))
    step.meet()
    return {"plan": mine.to_json(), "gradients": step.gradients(), "recording": recording()}


def _replaying(ranks: list[list[Action]]) -> Callable:
    """The schedule that was planned, whatever the student's function would say a second time."""

    def your_schedule(stage: Stage) -> Iterator[Action]:
        return iter(ranks[stage.pp_rank])

    return your_schedule


def judge(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    """The plan, which must be the same on all ranks, and every gradient."""
    if any(answer["plan"] != answers[0]["plan"] for answer in answers):
        raise Wrong(
            "your schedule gives another plan on some ranks than on rank 0\n"
            "Every rank plans all stages for itself: it must depend on nothing but its arguments."
        )
    achieved = judged(Plan.from_json(answers[0]["plan"]), case.M, case.caps)
    reference = Reference(case.step, WORLD).run()
    reference.check_gradients([answer["gradients"] for answer in answers])
    return Result(achieved | {"gradients": "those of one process"}, run_of(answers))
