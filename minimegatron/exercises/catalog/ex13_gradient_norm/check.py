"""Checks the gradient norm: on vectors of known norm, then inside the real optimizer's step.

Called by: the exercises' engine, on 4 ranks. Calls: `bench_gpt`.
"""

import math
import random
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.exercises.bench_gpt import GptStep, StepCase, on_these_ranks, one_process
from minimegatron.exercises.check import Case, Result, Wrong, check_numbers, installed

SELECTION = "minimegatron.core.optimizer.optimizer.MegatronOptimizer.get_main_grads_for_grad_norm"
NORM = "minimegatron.core.optimizer.clip_grads.get_grad_norm_fp32"
EMBEDDING = "embedding.word_embeddings.weight"


def cases(seed: int) -> list[Case]:
    """Plain vectors; then cuts whose copies lie on different ranks."""
    draw = random.Random(seed)
    clip = draw.choice([0.02, 0.05, 0.1])

    def step(**sizes: Any) -> StepCase:
        return StepCase(clip_grad=clip, seed=seed, num_microbatches=draw.randint(2, 3), **sizes)

    cuts = {
        "2 stages, tied embedding": step(pp=2),
        "2 replicas, 2 tensor-parallel ranks": step(tp=2, num_layers=2),
        "2 stages, 2 tensor-parallel ranks": step(tp=2, pp=2, sequence_parallel=bool(seed % 2)),
        "2 stages, ZeRO-1 over 2 replicas": step(pp=2, distributed_optimizer=True),
        "nothing tied, SwiGLU": step(tp=2, pp=2, tied=False, swiglu=True),
    }
    vectors = [Case(f"{p:g}-norm of a vector", p=p, seed=seed) for p in (2.0, 1.0, 3.0, math.inf)]
    return vectors + [Case(name, step=cut) for name, cut in cuts.items()]


def run(student: ModuleType, case: Case) -> Result:
    """A vector's norm, or the norm and the clipped weights of a step."""
    if "p" in case.values:
        return _check_vector(student, case.p, case.seed)
    step = on_these_ranks(case.step)
    reference = one_process(case.step, step.groups.dp.size())
    reference.forward_backward()
    squares = {name: grad.square().sum().item() for name, grad in reference.gradients().items()}
    whole = [name for name, param in reference.parameters() if not param.tensor_model_parallel]
    _, expected, _ = reference.optimizer.step()
    step.forward_backward()
    gradients = step.gradients()
    with (
        installed(student.get_main_grads_for_grad_norm, SELECTION),
        installed(student.get_grad_norm_fp32, NORM),
    ):
        _, norm, _ = step.optimizer.step()
    step.meet()
    own = sum(grad.square().sum().item() for grad in gradients.values())
    copies = {
        "tied": squares[EMBEDDING] if case.step.tied and case.step.pp > 1 else 0.0,
        "replicated": sum(squares[name] for name in whole),
    }
    _check_norm(step, norm, expected, own, copies)
    weights = {name: param.detach() for name, param in reference.parameters()}
    for name, param in step.parameters():
        wanted = step.mine(weights[name], param)
        check_numbers(f"{name} after clipping and the update", param, wanted, step.place())
    return Result({"norm": f"{norm:.6f}", "one process": f"{expected:.6f}"})


# -- A vector --


def _check_vector(student: ModuleType, p: float, seed: int) -> Result:
    """Rank r holds r pieces of it, so rank 0 holds none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed + 3)
    pieces = [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(6)]
    first = rank * (rank - 1) // 2
    mine = [piece.clone() for piece in pieces[first : first + rank]] if rank else []
    expected = torch.linalg.vector_norm(torch.cat(pieces).reshape(-1), p).item()
    own = [torch.linalg.vector_norm(piece, p).item() for piece in mine]
    norm = student.get_grad_norm_fp32(iter(mine), p, dist.group.WORLD)
    dist.barrier()
    wanted = "the norm of all ranks' gradients"
    _require_number(norm, f"{p:g}-norm")
    if not math.isclose(norm, expected, rel_tol=1e-9):
        raise Wrong(
            f"rank {rank}: the {p:g}-norm is {norm:.6g}, expected {expected:.6g}, {wanted}\n"
            + _why_vector(norm, p, pieces, own)
        )
    alone = student.get_grad_norm_fp32(iter(mine), p, None)
    expected = 0.0
    if mine:
        expected = torch.linalg.vector_norm(torch.cat(mine).reshape(-1), p).item()
    check_numbers(f"the {p:g}-norm without a group", alone, expected, rank)
    return Result({"norm": f"{norm:.6g}", "ranks": world})


def _require_number(norm: Any, what: str) -> None:
    if not isinstance(norm, int | float):
        raise Wrong(
            f"rank {dist.get_rank()}: the {what} is {norm!r}, a {type(norm).__name__}; return a "
            "Python number (tensor.item())"
        )


def _why_vector(norm: float, p: float, pieces: list[torch.Tensor], own: list[float]) -> str:
    ranks = [torch.cat(pieces[r * (r - 1) // 2 :][:r]).reshape(-1) for r in (1, 2, 3)]
    of_ranks = [torch.linalg.vector_norm(vector, p).item() for vector in ranks]
    whole = torch.linalg.vector_norm(torch.cat(pieces).reshape(-1), p).item()
    mine = of_ranks[dist.get_rank() - 1] if dist.get_rank() else 0.0
    if p == math.inf:
        return (
            "For p = inf: the largest absolute value of any element, and ReduceOp.MAX over ranks."
        )
    if math.isclose(norm, mine, rel_tol=1e-9, abs_tol=1e-12):
        return "That is the norm of this rank's own part: the sum over the group is missing."
    if math.isclose(norm, sum(of_ranks), rel_tol=1e-9):
        return (
            f"That is the sum of the ranks' norms, {' + '.join(f'{x:.4g}' for x in [0, *of_ranks])}. "
            f"Norms do not add up, |x|^{p:g} does: take the root after the sum over ranks."
        )
    if math.isclose(norm, whole**p, rel_tol=1e-9):
        return f"That is its {p:g}-th power: the root is missing."
    if p == math.inf:
        return (
            "For p = inf: the largest absolute value of any element, and ReduceOp.MAX over ranks."
        )
    return f"Wanted: (sum of |x|^{p:g} over all elements of all ranks)^(1/{p:g})."


# -- A step --


def _check_norm(
    step: GptStep, norm: Any, expected: float, own: float, copies: dict[str, float]
) -> None:
    """`own` is the square of this rank's gradients, `copies` that of what several ranks hold."""
    _require_number(norm, "gradient norm")
    if math.isclose(norm, expected, rel_tol=1e-9):
        return
    excess = norm**2 - expected**2
    why = _why(step, excess, copies)
    if math.isclose(norm**2, own, rel_tol=1e-6):
        why = (
            "That is the norm of this rank's own gradients. Every rank would clip by a factor of "
            "its own, and their weights would drift apart: sum over grad_stats_parallel_group."
        )
    raise Wrong(
        f"rank {step.place()}: the norm is {norm:.6g}, but one process finds {expected:.6g}\n"
        f"squared: {norm**2:.6g}, expected {expected**2:.6g}, difference {excess:+.6g}\n{why}"
    )


def _why(step: GptStep, excess: float, copies: dict[str, float]) -> str:
    """Compares the difference of the squares with what a known mistake would make of it."""
    t, tied, replicated = step.case.tp, copies["tied"], copies["replicated"]
    often = (t - 1) * replicated
    known = [
        (
            tied,
            f"{tied:.6g} is the square of the tied embedding's gradient: it lies on the first "
            "stage and on the last, and both counted it. Leave out the copy that is marked "
            "`shared`.",
        ),
        (
            often,
            f"{often:.6g} is {t - 1} x the squares of what the {t} tensor-parallel ranks hold "
            "whole (layer norms, some biases, position embeddings): each of them counted it. "
            "Only tensor rank 0 may.",
        ),
        (
            often + tied,
            "Both kinds of copies are counted too often: the tied embedding by two stages, and "
            f"what tensor-parallel ranks hold whole by {t} ranks.",
        ),
        (-tied, "The tied embedding is not counted at all: the first stage's copy must be."),
        (
            -replicated,
            "What all tensor-parallel ranks hold whole is not counted at all: tensor rank 0 must.",
        ),
    ]
    for difference, words in known:
        if difference and math.isclose(excess, difference, rel_tol=1e-6):
            return words
    if step.case.distributed_optimizer:
        return (
            "With ZeRO-1 grad_stats_parallel_group holds two groups: sum over the one (shards on "
            "data-parallel ranks), then over the other (parts of the model)."
        )
    return "Each gradient of the model must be counted on exactly one rank of the group."
