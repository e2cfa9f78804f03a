"""Checks the loss scale's two methods: the scale's path alone, then real steps with overflows.

Called by: the exercises' engine, on 4 ranks. Calls: `bench_gpt`.
"""

import math
import random
from types import ModuleType
from typing import Any

import torch.distributed as dist

from minimegatron.core.optimizer.grad_scaler import DynamicGradScaler
from minimegatron.exercises.bench_gpt import GptStep, StepCase, on_these_ranks, one_process
from minimegatron.exercises.check import Case, Result, Wrong, check_numbers, installed

UNSCALE = (
    "minimegatron.core.optimizer.optimizer.MegatronOptimizer._unscale_main_grads_and_check_for_nan"
)
UPDATE = "minimegatron.core.optimizer.grad_scaler.DynamicGradScaler.update"
OK, INF, NAN = "ok", "Inf", "NaN"


def cases(seed: int) -> list[Case]:
    """Long paths of the scale, then short trainings; the seed draws where the overflows are."""
    draw = random.Random(seed)
    rules = [(2, 2), (3, 1), (4, 3)]
    paths = [
        Case(
            f"the scale alone, window {window}, hysteresis {hysteresis}",
            path=draw.choices([True, False], [1, 2], k=30),
            window=window,
            hysteresis=hysteresis,
        )
        for window, hysteresis in rules
    ]
    both = {"seed": seed, "loss_scale": 1024.0}
    where = {
        "2 stages, 2 tensor-parallel ranks": StepCase(tp=2, pp=2, num_microbatches=1, **both),
        "2 stages, ZeRO-1 over 2 replicas": StepCase(
            pp=2, num_microbatches=1, distributed_optimizer=True, **both
        ),
    }
    trainings = []
    for name, step in where.items():
        faults = [OK, draw.choice([INF, NAN]), INF, NAN, OK]
        ranks = [draw.randrange(4) for _ in faults]
        trainings.append(Case(name, step=step, faults=list(zip(faults, ranks, strict=True))))
    return paths + trainings


def run(student: ModuleType, case: Case) -> Result:
    """The scale's path, or a short training."""
    if "path" in case.values:
        return _check_path(student, case)
    step = on_these_ranks(case.step)
    reference = one_process(case.step, step.groups.dp.size())
    for number, (fault, rank) in enumerate(case.faults):
        expected = _train(reference, fault, is_here=True)

        def agreeing(optimizer: Any, number: int = number, rank: int = rank) -> bool:
            found = student._unscale_main_grads_and_check_for_nan(optimizer)
            _check_agreement(step, found, number, rank, case.faults[number][0])
            return found

        with installed(agreeing, UNSCALE), installed(student.update, UPDATE):
            got = _train(step, fault, is_here=dist.get_rank() == rank)
        _check_step(step, number, got, expected)
    weights = {name: param.detach() for name, param in reference.parameters()}
    for name, param in step.parameters():
        check_numbers(f"{name} at the end", param, step.mine(weights[name], param), step.place())
    skipped = sum(fault != OK for fault, _ in case.faults)
    scale = step.optimizer.grad_scaler._scale
    steps = f"{len(case.faults) - skipped} made, {skipped} skipped"
    return Result({"steps": steps, "last scale": f"{scale:g}"})


# -- The scale alone --


def _check_path(student: ModuleType, case: Case) -> Result:
    rules = {
        "initial_scale": 2.0**10,
        "min_scale": 2.0**7,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": case.window,
        "hysteresis": case.hysteresis,
    }
    ours, theirs = DynamicGradScaler(**rules), DynamicGradScaler(**rules)
    path = ["1024"]
    for number, found_inf in enumerate(case.path):
        ours.update(found_inf)
        student.update(theirs, found_inf)
        path.append(f"{'overflow' if found_inf else 'ok'} -> {theirs._scale:g}")
        if theirs._scale != ours._scale:
            raise Wrong(
                f"after step {number} the scale is {theirs._scale:g}, expected {ours._scale:g}\n"
                f"  window {case.window}, hysteresis {case.hysteresis}, least scale 128\n"
                f"  so far: {', '.join(path[-10:])}\n"
                + _why_path(ours, theirs, case.path[: number + 1])
            )
    return Result({"last scale": f"{theirs._scale:g}"})


def _why_path(ours: DynamicGradScaler, theirs: DynamicGradScaler, path: list[bool]) -> str:
    if theirs._scale < ours.min_scale:
        return "The scale may not go below min_scale."
    if path[-1] and theirs._scale < ours._scale:
        return (
            "That overflow should not lower the scale yet: only when the hysteresis is used up "
            f"({ours._hysteresis_tracker} of {ours.hysteresis} are left)."
        )
    if path[-1]:
        return (
            "That overflow should lower the scale: the hysteresis is used up, and only a growth "
            f"restores it (`_hysteresis_tracker` should be {ours._hysteresis_tracker} now, yours "
            f"is {theirs._hysteresis_tracker})."
        )
    if theirs._scale > ours._scale:
        return (
            "It grew too early: growth needs that many good steps in a row, and an overflow starts "
            f"the count again (`_growth_tracker` should be {ours._growth_tracker} now)."
        )
    return "It should grow now: that many good steps came in a row."


# -- A training --


def _train(step: GptStep, fault: str, is_here: bool) -> dict[str, Any]:
    """One step, with one element of a gradient spoilt before the optimizer looks."""
    step.forward_backward()
    # Without ZeRO-1 replicas would hold the same Inf; those cases have one replica.
    if fault != OK and is_here:
        bad = math.inf if fault == INF else math.nan
        step.optimizer.shards[0].model_grad().view(-1)[0] = bad
    success, norm, _ = step.optimizer.step()
    return {"made": success, "norm": norm, "scale": step.optimizer.grad_scaler._scale}


def _check_agreement(step: GptStep, found: Any, number: int, rank: int, fault: str) -> None:
    """Raises Wrong, on all ranks alike, unless all ranks answer alike and right."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, found)
    is_fault = fault != OK
    if all(answer is is_fault for answer in answers):
        return
    said = ", ".join(f"rank {r} says {answer!r}" for r, answer in enumerate(answers))
    if not all(isinstance(answer, bool) for answer in answers):
        raise Wrong(f"step {number}: {said}; return a bool")
    what = f"rank {rank} has {'an Inf' if fault == INF else 'a NaN'}" if is_fault else "no overflow"
    lines = [f"step {number} ({what}): {said}"]
    if not is_fault:
        lines.append("Every gradient is finite, so all should say False.")
    elif not answers[rank]:
        lines.append(
            f"Rank {rank} itself did not see it: isinf() is False for NaN; isfinite() finds both."
            if fault == NAN
            else f"Rank {rank} itself did not see it."
        )
    else:
        lines.append(
            "Ranks that say True skip the step, the others update: from now on their weights are "
            "of different steps. And those that go on wait for the others in the gradient norm. "
            "Take the maximum over every group of grad_stats_parallel_groups."
        )
    raise Wrong("\n".join(lines))


def _check_step(step: GptStep, number: int, got: dict[str, Any], expected: dict[str, Any]) -> None:
    rank = step.place()
    if got["scale"] != expected["scale"]:
        raise Wrong(
            f"rank {rank}: after step {number} the loss scale is {got['scale']:g}, expected "
            f"{expected['scale']:g}"
        )
    if expected["made"]:
        scale = int(expected["scale"])
        what = f"the gradient norm in step {number}"
        check_numbers(what, got["norm"], expected["norm"], rank, {"loss scale": scale})
