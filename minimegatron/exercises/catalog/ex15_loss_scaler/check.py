"""Checks the loss scale's two methods: the scale's path alone, then real steps with overflows."""

import math
import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.optimizer.grad_scaler import DynamicGradScaler
from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.bench.gpt_step import GptStep, StepCase, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.bench.sent_bytes import groups_noted
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed

UNSCALE = (
    "minimegatron.core.optimizer.optimizer.MegatronOptimizer._unscale_main_grads_and_check_for_nan"
)
UPDATE = "minimegatron.core.optimizer.grad_scaler.DynamicGradScaler.update"
REPLACES = (UNSCALE, UPDATE)
PATHS, TRAINING = "the scale alone", "a training"
OK, INF, MINUS_INF, NAN = "ok", "Inf", "-Inf", "NaN"
FAULTS = {INF: (math.inf, "an Inf"), MINUS_INF: (-math.inf, "a -Inf"), NAN: (math.nan, "a NaN")}
"""The number, and how it is called."""
BIAS = "decoder.layers.1.mlp.linear_fc2.bias"
WORLD = 4
SCALERS = [(2, 2, 2.0, 0.5, 128.0), (3, 1, 4.0, 0.5, 256.0), (4, 3, 2.0, 0.25, 16.0)]
"""Window, hysteresis, growth and backoff factor, least scale; it begins at 1024."""


def cases(seed: int) -> list[Case]:
    """Long paths of the scale, then short trainings; the seed draws how paths end."""
    draw = random.Random(seed)
    paths = [
        Case(
            f"window {window}, hysteresis {hysteresis}",
            part=PATHS,
            path=_path(draw, window, hysteresis),
            window=window,
            hysteresis=hysteresis,
            up=up,
            down=down,
            least=least,
        )
        for window, hysteresis, up, down, least in SCALERS
    ]
    both = {"seed": data_seed(seed), "loss_scale": 1024.0, "num_microbatches": 1}
    # In the last step of the first one a parameter has no gradient.
    where = {
        "2 stages, 2 tensor-parallel ranks": (StepCase(tp=2, pp=2, **both), BIAS),
        "2 stages, ZeRO-1 over 2 replicas": (
            StepCase(pp=2, distributed_optimizer=True, **both),
            "",
        ),
    }
    # Every rank but the first is once the only one that sees it.
    faults = [(OK, 0), (INF, 3), (NAN, 1), (MINUS_INF, 2), (OK, 0)]
    return paths + [
        Case(name, part=TRAINING, step=step.values, faults=faults, without=without)
        for name, (step, without) in where.items()
    ]


def _path(draw: random.Random, window: int, hysteresis: int) -> list[bool]:
    """Where steps overflow: each rule once, down to the least scale and up again; then drawn."""
    ok, overflow = [False], [True]
    down = ok * window + overflow + ok + overflow * (hysteresis + 4)
    up = ok * window + overflow + ok * (window - 1) + overflow + ok * (2 * window)
    return down + up + draw.choices([True, False], [1, 2], k=10)


def run(student: ModuleType, case: Case) -> Any:
    """The scale's path, or a short training."""
    if case.part == PATHS:
        return _run_path(student, case)
    step, steps = on_these_ranks(case.step), []
    for number, (_, rank) in enumerate(case.faults):

        def agreeing(optimizer: Any, number: int = number, rank: int = rank) -> bool:
            grads = _Gradients(optimizer)
            with groups_noted() as asked:
                found = student._unscale_main_grads_and_check_for_nan(optimizer)
            _check_agreement(found, number, rank, case.faults[number][0])
            _check_groups(optimizer, number, asked)
            grads.check(number, found)
            return found

        with installed(agreeing, UNSCALE), installed(student.update, UPDATE):
            steps.append(_train(step, case, number, is_here=dist.get_rank() == rank))
    weights = {name: param.detach().clone() for name, param in step.parameters()}
    return {"steps": steps, "weights": weights}


def judge(case: Case, answers: Sequence[Any]) -> Result:
    """The first rank's path; every rank's training."""
    if case.part == PATHS:
        return _judge_path(case, answers[0])
    reference = Reference(case.step, WORLD)
    for number in range(len(case.faults)):
        expected = _train(reference.step, case, number, is_here=True)
        for rank, answer in enumerate(answers):
            _judge_step(reference, rank, number, answer["steps"][number], expected)
    full = {name: param.detach() for name, param in reference.step.parameters()}
    for rank, answer in enumerate(answers):
        for name, wanted in reference.pieces(rank, full).items():
            who = reference.who(rank)
            check_numbers(f"{name} at the end", answer["weights"].get(name), wanted, who)
    skipped = sum(fault != OK for fault, _ in case.faults)
    steps = f"{len(case.faults) - skipped} made, {skipped} skipped"
    return Result({"steps": steps, "last scale": f"{answers[0]['steps'][-1]['scale']:g}"})


# -- The scale alone --


def _scaler(case: Case) -> DynamicGradScaler:
    return DynamicGradScaler(
        initial_scale=2.0**10,
        min_scale=case.least,
        growth_factor=case.up,
        backoff_factor=case.down,
        growth_interval=case.window,
        hysteresis=case.hysteresis,
    )


def _run_path(student: ModuleType, case: Case) -> list[tuple[float, int]]:
    """The scale, and what is left of the hysteresis, after each step."""
    theirs, path = _scaler(case), []
    for found_inf in case.path:
        student.update(theirs, found_inf)
        path.append((float(theirs._scale), int(theirs._hysteresis_tracker)))
    return path


def _judge_path(case: Case, found: list[tuple[float, int]]) -> Result:
    ours, path = _scaler(case), ["1024"]
    for number, (found_inf, (scale, left)) in enumerate(zip(case.path, found, strict=True)):
        before = ours._scale
        ours.update(found_inf)
        path.append(f"{'overflow' if found_inf else 'ok'} -> {scale:g}")
        if scale != ours._scale:
            raise Wrong(
                f"after step {number} the scale is {scale:g}, expected {ours._scale:g}\n"
                f"  window {case.window}, hysteresis {case.hysteresis}, growth_factor {case.up:g}, "
                f"backoff_factor {case.down:g}, least scale {case.least:g}\n"
                f"  {_last_steps(path)}\n{_why_path(ours, before, scale, left, found_inf)}"
            )
    return Result({"last scale": f"{scale:g}"})


def _last_steps(path: list[str], most: int = 10) -> str:
    """The scale before step 0 and after each step; of a long path the last steps."""
    if len(path) <= most:
        return f"so far: {', '.join(path)}"
    last = len(path) - 2
    return f"steps {last - most + 1} to {last}: {', '.join(path[-most:])}"


def _why_path(
    ours: DynamicGradScaler, before: float, scale: float, left: int, found_inf: bool
) -> str:
    window = ours.growth_interval
    if scale < ours.min_scale:
        return "The scale may not go below min_scale."
    if (scale - before) * (ours._scale - before) > 0:
        if scale < before and ours._scale > ours.min_scale:
            return f"It was multiplied by {scale / before:g}; what says how far it falls?"
        if scale > before:
            return f"It was multiplied by {scale / before:g}; what says how far it grows?"
        return "It may fall to min_scale; who says where that is?"
    if found_inf and scale < ours._scale:
        return (
            "That overflow should not lower the scale yet: only when the hysteresis is used up "
            f"({ours._hysteresis_tracker} of {ours.hysteresis} are left)."
        )
    if found_inf and left == ours._hysteresis_tracker:
        return (
            f"That overflow should lower the scale: `_hysteresis_tracker` is {left} now, and at 0 or "
            "below each overflow lowers it."
        )
    if found_inf:
        return (
            "That overflow should lower the scale: the hysteresis is used up, and only a growth "
            f"restores it (`_hysteresis_tracker` should be {ours._hysteresis_tracker} now, yours "
            f"is {left})."
        )
    if scale > ours._scale:
        return (
            f"It grew too early: growth needs {window} steps without an overflow in a row, and an "
            f"overflow starts the count again (`_growth_tracker` should be {ours._growth_tracker} now)."
        )
    return f"It should grow now: {window} steps without an overflow came in a row."


# -- A training --


PLACES = [(0.0, 0.0), (1.0, 1.0), (0.0, 0.5), (0.5, 1.0)]
"""Which gradient is spoilt, and where in it, by the step's number: 0 for the first, 1 for the last."""


def _train(step: GptStep, case: Case, number: int, is_here: bool) -> dict[str, Any]:
    """One step, with one element of a gradient spoilt before the optimizer looks."""
    step.forward_backward()
    fault, _ = case.faults[number]
    if number == len(case.faults) - 1:
        for name, param in step.parameters():
            if name == case.without:
                param.main_grad = None
    # Without ZeRO-1 replicas would hold the same Inf; those cases have one replica.
    if fault != OK and is_here:
        shards, (which, where) = step.optimizer.shards, PLACES[number % len(PLACES)]
        gradient = shards[int(which * (len(shards) - 1))].model_grad().view(-1)
        gradient[int(where * (len(gradient) - 1))] = FAULTS[fault][0]
    success, norm, _ = step.optimizer.step()
    return {"made": success, "norm": norm, "scale": float(step.optimizer.grad_scaler._scale)}


class _Gradients:
    """The gradients as they are before the student's function sees them."""

    def __init__(self, optimizer: Any):
        self.inverse = optimizer.grad_scaler.inv_scale.item()
        self.held = [
            (param, param.grad, param.grad.clone())
            for param in optimizer.get_parameters()
            if param.grad is not None
        ]

    def check(self, number: int, found: bool) -> None:
        """Raises Wrong unless all of them are divided, where they lie; after an overflow, too."""
        who, many = f"step {number}: rank {dist.get_rank()}", len(self.held)
        moved = [param.grad is not grad for param, grad, _ in self.held]
        if any(moved):
            raise Wrong(
                f"{who}: {sum(moved)} of {many} gradients are other tensors now; divide them in place\n"
                "Whoever holds the tensor that `.grad` was (a buffer, a view of it) still has the "
                "scaled numbers."
            )
        same = [
            torch.allclose(grad, old * self.inverse, equal_nan=True) for _, grad, old in self.held
        ]
        if not all(same):
            why = self._why(same)
            if found:
                why += " There was an overflow; does the docstring leave such a step out?"
            raise Wrong(
                f"{who}: {same.count(False)} of {many} gradients were not divided by the loss scale, "
                f"{1 / self.inverse:g}\n{why}"
            )

    def _why(self, same: list[bool]) -> str:
        first = same.index(False)
        _, grad, old = self.held[first]
        is_finite = old.isfinite() & grad.isfinite()
        grad, old = grad[is_finite], old[is_finite]
        ratio = float(grad.norm() / old.norm()) if old.any() else 1.0
        text = f"Gradient {first} of get_parameters() was multiplied by {ratio:.6g}."
        if any(same):
            right = [str(number) for number, is_right in enumerate(same) if is_right]
            text += f" Right are: {', '.join(right)}. What does your loop do for each of them?"
        return text


def _check_groups(optimizer: Any, number: int, asked: list[list[int]]) -> None:
    """Raises Wrong where ranks were asked together that no group of the optimizer holds together."""
    groups = [
        sorted(dist.get_process_group_ranks(group))
        for group in optimizer.grad_stats_parallel_groups
    ]
    for ranks in asked:
        if ranks not in groups:
            raise Wrong(
                f"step {number}: rank {dist.get_rank()} asks ranks {ranks} together; the groups of "
                f"grad_stats_parallel_groups are {groups}\nOther ranks of a job may hold a copy, or "
                "nothing of this optimizer. Which ranks hold another part of this gradient?"
            )


UNSEEN = {
    NAN: ": isinf() is False for NaN. What do Inf and NaN have in common?",
    MINUS_INF: ", although an Inf was seen. Which of the elements answer your question?",
}


def _check_agreement(found: Any, number: int, rank: int, fault: str) -> None:
    """Raises Wrong, on all ranks alike, unless all ranks answer alike and right."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, found)
    is_fault = fault != OK
    if all(answer is is_fault for answer in answers):
        return
    said = ", ".join(f"rank {r} says {answer!r}" for r, answer in enumerate(answers))
    if not all(isinstance(answer, bool) for answer in answers):
        raise Wrong(f"step {number}: {said}; return a bool")
    what = f"rank {rank} has {FAULTS[fault][1]}" if is_fault else "no overflow"
    lines = [f"step {number} ({what}): {said}"]
    if not is_fault:
        lines.append("Every gradient is finite, so all should say False.")
    elif not answers[rank]:
        lines.append(f"Rank {rank} itself did not see it{UNSEEN.get(fault, '.')}")
    else:
        lines.append(
            "Ranks that say True skip the step, the others update: from now on their weights are "
            "of different steps. And those that go on wait for the others in the gradient norm. "
            "Which ranks does each group of grad_stats_parallel_groups reach?"
        )
    raise Wrong("\n".join(lines))


def _judge_step(
    reference: Reference, rank: int, number: int, got: dict[str, Any], expected: dict[str, Any]
) -> None:
    who = reference.who(rank)
    if got["scale"] != expected["scale"]:
        raise Wrong(
            f"rank {who}: after step {number} the loss scale is {got['scale']:g}, expected "
            f"{expected['scale']:g}"
        )
    if got["made"] != expected["made"]:
        made, wanted = ("made" if one["made"] else "skipped" for one in (got, expected))
        raise Wrong(f"rank {who}: step {number} was {made}; it should have been {wanted}")
    if expected["made"]:
        scale = int(expected["scale"])
        what = f"the gradient norm in step {number}"
        check_numbers(what, got["norm"], expected["norm"], who, {"loss scale": scale})
