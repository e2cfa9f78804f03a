"""Runs one interleaved step in the student's order, on 4 ranks."""

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from minimegatron.exercises.bench.gpt_step import StepCase, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.bench.recorded_run import recorded, run_of
from minimegatron.exercises.catalog.ex12_interleaved_table.alone import (
    NAMES,
    REPLACES,
    TABLE,
    figures,
)
from minimegatron.exercises.check import Case, Result, check_order, data_seed, installed
from minimegatron.planner.plan import plan

__all__ = ["REPLACES"]
WORLD = 4


def cases(seed: int) -> list[Case]:
    """One step."""
    M = random.Random(seed).choice([4, 8]) if seed else 4
    step = StepCase(pp=4, vp=2, num_microbatches=M, seed=data_seed(seed)).values
    return [Case(f"for real: p=4, M={M}, v=2, G=4", part="a real step", step=step)]


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """The step, with both functions in place."""
    table, count = (getattr(student, name) for name in NAMES)
    with (
        installed(table, TABLE + NAMES[0]),
        installed(count, TABLE + NAMES[1]),
    ):
        step = on_these_ranks(case.step)
        with recorded() as recording:
            step.forward_backward()
    step.meet()
    return {"gradients": step.gradients(), "recording": recording()}


def judge(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    """Every gradient, and the order."""
    reference, run = Reference(case.step, WORLD).run(), run_of(answers)
    reference.check_gradients([answer["gradients"] for answer in answers])
    planned = plan("interleaved", 4, reference.case.num_microbatches, vpp=2)
    for stage in range(4):
        actions = run.step(0).actions(stage)
        done = [action for action in actions if action.kind in ("forward", "backward")]
        check_order(list(planned.work(stage)), done, stage)
    return Result(figures(planned) | {"gradients": "those of one process"}, run)
