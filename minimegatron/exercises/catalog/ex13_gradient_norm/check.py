"""Checks the gradient norm: on vectors of known norm, then inside the real optimizer's step."""

import math
import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.exercises.bench_gpt import StepCase, on_these_ranks
from minimegatron.exercises.bench_gpt_judge import Reference
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed
from minimegatron.exercises.feedback_numbers import check_numbers

SELECTION = "minimegatron.core.optimizer.optimizer.MegatronOptimizer.get_main_grads_for_grad_norm"
NORM = "minimegatron.core.optimizer.clip_grads.get_grad_norm_fp32"
REPLACES = (SELECTION, NORM)
EMBEDDING = "embedding.word_embeddings.weight"
VECTORS, STEPS = "norms of vectors", "norms in a step"
WORLD = 4


def cases(seed: int) -> list[Case]:
    """Plain vectors; then cuts whose copies lie on different ranks."""
    draw, data = random.Random(seed), data_seed(seed)
    clip = draw.choice([0.02, 0.05, 0.1])

    def step(**sizes: Any) -> dict[str, Any]:
        num_microbatches = draw.randint(2, 3)
        return StepCase(
            clip_grad=clip, seed=data, num_microbatches=num_microbatches, **sizes
        ).values

    cuts = {
        "2 stages, tied embedding": step(pp=2),
        "2 replicas, 2 tensor-parallel ranks": step(tp=2, num_layers=2),
        "2 stages, 2 tensor-parallel ranks": step(tp=2, pp=2, sequence_parallel=bool(seed % 2)),
        "2 stages, ZeRO-1 over 2 replicas": step(pp=2, distributed_optimizer=True),
        "nothing tied, SwiGLU": step(tp=2, pp=2, tied=False, swiglu=True),
    }
    powers = (2.0, 1.0, 3.0, math.inf)
    vectors = [Case(f"{p:g}-norm of a vector", part=VECTORS, p=p, seed=data) for p in powers]
    return vectors + [Case(name, part=STEPS, step=cut) for name, cut in cuts.items()]


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """A vector's norm, or the norm and the clipped weights of a step."""
    if case.part == VECTORS:
        return _run_vector(student, case)
    step = on_these_ranks(case.step)
    step.forward_backward()
    with (
        installed(student.get_main_grads_for_grad_norm, SELECTION),
        installed(student.get_grad_norm_fp32, NORM),
    ):
        _, norm, _ = step.optimizer.step()
    step.meet()
    weights = {name: param.detach().clone() for name, param in step.parameters()}
    return {"norm": norm, "weights": weights}


def judge(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    """Every rank's norm, then the weights."""
    if case.part == VECTORS:
        return _judge_vector(case, answers)
    return _judge_step(case, answers)


def _require_number(norm: Any, what: str, rank: int) -> None:
    if not isinstance(norm, int | float):
        raise Wrong(
            f"rank {rank}: the {what} is {norm!r}, a {type(norm).__name__}; return a "
            "Python number (tensor.item())"
        )


# -- A vector --


def _pieces(case: Case, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All pieces, and the rank's own: rank r holds r of them, so rank 0 holds none."""
    generator = torch.Generator().manual_seed(case.seed + 3)
    pieces = [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(6)]
    first = rank * (rank - 1) // 2
    return pieces, pieces[first : first + rank] if rank else []


def _run_vector(student: ModuleType, case: Case) -> dict[str, Any]:
    _, mine = _pieces(case, dist.get_rank())
    norm = student.get_grad_norm_fp32(iter(mine), case.p, dist.group.WORLD)
    dist.barrier()
    return {"norm": norm, "alone": student.get_grad_norm_fp32(iter(mine), case.p, None)}


def _judge_vector(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    p = case.p
    for rank, answer in enumerate(answers):
        pieces, mine = _pieces(case, rank)
        expected = torch.linalg.vector_norm(torch.cat(pieces).reshape(-1), p).item()
        norm = answer["norm"]
        _require_number(norm, f"{p:g}-norm", rank)
        if not math.isclose(norm, expected, rel_tol=1e-9):
            raise Wrong(
                f"rank {rank}: the {p:g}-norm is {norm:.6g}, expected {expected:.6g}, the norm of "
                f"all ranks' gradients\n{_why_vector(norm, p, pieces, rank)}"
            )
        own = torch.linalg.vector_norm(torch.cat(mine).reshape(-1), p).item() if mine else 0.0
        check_numbers(f"the {p:g}-norm without a group", answer["alone"], own, rank)
    return Result({"norm": f"{answers[0]['norm']:.6g}", "ranks": WORLD})


def _why_vector(norm: float, p: float, pieces: list[torch.Tensor], rank: int) -> str:
    ranks = [torch.cat(pieces[r * (r - 1) // 2 :][:r]).reshape(-1) for r in (1, 2, 3)]
    of_ranks = [torch.linalg.vector_norm(vector, p).item() for vector in ranks]
    whole = torch.linalg.vector_norm(torch.cat(pieces).reshape(-1), p).item()
    mine = of_ranks[rank - 1] if rank else 0.0
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
    return f"Wanted: (sum of |x|^{p:g} over all elements of all ranks)^(1/{p:g})."


# -- A step --


def _judge_step(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    reference = Reference(case.step, WORLD).run()
    gradients = reference.gradients
    squares = {name: grad.square().sum().item() for name, grad in gradients.items()}
    parameters = reference.step.parameters()
    whole = [name for name, param in parameters if not param.tensor_model_parallel]
    _, expected, _ = reference.step.optimizer.step()
    copies = {
        "tied": squares[EMBEDDING] if reference.case.tied and reference.case.pp > 1 else 0.0,
        "replicated": sum(squares[name] for name in whole),
    }
    for rank, answer in enumerate(answers):
        own = sum(grad.square().sum().item() for grad in reference.pieces(rank, gradients).values())
        _judge_norm(reference, rank, answer["norm"], expected, own, copies)
    weights = {name: param.detach() for name, param in parameters}
    for rank, answer in enumerate(answers):
        for name, wanted in reference.pieces(rank, weights).items():
            what = f"{name} after clipping and the update"
            check_numbers(what, answer["weights"].get(name), wanted, reference.who(rank))
    return Result({"norm": f"{answers[0]['norm']:.6f}", "one process": f"{expected:.6f}"})


def _judge_norm(
    reference: Reference,
    rank: int,
    norm: Any,
    expected: float,
    own: float,
    copies: dict[str, float],
) -> None:
    """`own` is the square of this rank's gradients, `copies` that of what several ranks hold."""
    _require_number(norm, "gradient norm", rank)
    if math.isclose(norm, expected, rel_tol=1e-9):
        return
    excess = norm**2 - expected**2
    why = _why(reference.case, excess, copies)
    if not reference.case.distributed_optimizer and math.isclose(norm**2, own, rel_tol=1e-6):
        why = (
            "That is the norm of this rank's own gradients. Every rank would clip by a factor of "
            "its own, and their weights would drift apart: sum over grad_stats_parallel_group."
        )
    raise Wrong(
        f"rank {reference.who(rank)}: the norm is {norm:.6g}, but one process finds {expected:.6g}\n"
        f"squared: {norm**2:.6g}, expected {expected**2:.6g}, difference {excess:+.6g}\n{why}"
    )


def _why(case: StepCase, excess: float, copies: dict[str, float]) -> str:
    """Compares the difference of the squares with what a known mistake would make of it."""
    t, tied, replicated = case.tp, copies["tied"], copies["replicated"]
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
    if case.distributed_optimizer:
        return (
            "With ZeRO-1 grad_stats_parallel_group holds two groups: sum over the one (shards on "
            "data-parallel ranks), then over the other (parts of the model)."
        )
    return "Each gradient of the model must be counted on exactly one rank of the group."
