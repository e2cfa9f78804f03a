"""Checks the gradient norm: on vectors of known norm, then inside the real optimizer's step."""

import functools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.exercises.bench.apart import meet
from minimegatron.exercises.bench.feedback_numbers import check_numbers, told_apart
from minimegatron.exercises.bench.gpt_step import GptStep, StepCase, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.bench.sent_bytes import SentTensors, all_sent_counted
from minimegatron.exercises.catalog.ex13_gradient_norm.differences import (
    Squares,
    differ,
    rounding_words,
)
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed

OPTIMIZER = "minimegatron.core.optimizer.optimizer.MegatronOptimizer."
SELECTION = OPTIMIZER + "get_main_grads_for_grad_norm"
NORM = "minimegatron.core.optimizer.clip_grads.get_grad_norm_fp32"
REPLACES = (SELECTION, NORM, OPTIMIZER + "_counted_params")
BIAS = "decoder.layers.1.mlp.linear_fc2.bias"
VECTORS, STEPS = "norms of vectors", "norms in a step"
VECTOR_CASES = [
    *((p, "a vector", "float64", 1) for p in (2.0, 1.0, 3.0, math.inf)),
    (math.inf, "a vector, over a list of two groups", "float64", 2),
    (3.0, "a vector, over a list of two groups", "float64", 2),
    (2.0, "large float32 gradients", "float32", 1),
]
"""p, in words, the gradients' dtype, and over how many groups in turn."""
LARGE = 1e25
"""Its square is no float32."""
WORLD = 4
PAIRS = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
"""Two ways to divide the ranks: pairs of the first, then of the second, reach all."""
MOST_SENT = 64
"""Bytes that a rank gives to the collectives of one norm: some numbers, and no gradient."""


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
        "2 stages, 2 tensor-parallel ranks": step(tp=2, pp=2, sequence_parallel=True),
        "2 stages, ZeRO-1 over 2 replicas": step(pp=2, distributed_optimizer=True),
        "nothing tied, SwiGLU": step(tp=2, pp=2, tied=False, swiglu=True),
    }
    vectors = [
        Case(f"{p:g}-norm of {what}", part=VECTORS, p=p, seed=data, dtype=dtype, groups=groups)
        for p, what, dtype, groups in VECTOR_CASES
    ]
    steps = [Case(name, part=STEPS, step=cut, without="") for name, cut in cuts.items()]
    name = "2 stages, a parameter without a gradient"
    return [*vectors, *steps, Case(name, part=STEPS, step=step(pp=2), without=BIAS)]


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """A vector's norm, or the norm and the clipped weights of a step."""
    if case.part == VECTORS:
        return _run_vector(student, case)
    step = on_these_ranks(case.step)
    step.forward_backward()
    _take_gradient(step, case.without)
    faults: list[str] = []
    sent = SentTensors()
    select, take_norm = _watched(student, faults, sent)
    with installed(select, SELECTION), installed(take_norm, NORM):
        _, norm, _ = step.optimizer.step()
    step.meet()
    weights = {name: param.detach().clone() for name, param in step.parameters()}
    return {"norm": norm, "weights": weights, "faults": faults, "sent": _plain(sent)}


def judge(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    """Every rank's norm, then the weights."""
    if case.part == VECTORS:
        return _judge_vector(case, answers)
    return _judge_step(case, answers)


def _require_number(norm: Any, what: str, rank: int) -> None:
    if norm is None:
        raise Wrong(f"rank {rank}: the {what} is None (was `return` forgotten?)")
    if not isinstance(norm, int | float):
        raise Wrong(
            f"rank {rank}: the {what} is {norm!r}, a {type(norm).__name__}; return a Python number"
        )
    if isinstance(norm, int) and norm.bit_length() > 1000:
        raise Wrong(
            f"rank {rank}: the {what} is an int of {norm.bit_length()} bits; return a float"
        )


# -- A vector --


def _pieces(case: Case, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All pieces, and the rank's own: rank r holds r of them, so rank 0 holds none."""
    generator = torch.Generator().manual_seed(case.seed + 3)
    pieces = [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(6)]
    if case.dtype == "float32":
        pieces = [(piece * LARGE).float() for piece in pieces]
    first = rank * (rank - 1) // 2
    return pieces, pieces[first : first + rank] if rank else []


def _run_vector(student: ModuleType, case: Case) -> dict[str, Any]:
    _, mine = _pieces(case, dist.get_rank())
    groups = dist.group.WORLD if case.groups == 1 else list(_pairs())
    with all_sent_counted() as sent:
        norm = student.get_grad_norm_fp32(iter(mine), case.p, groups)
    meet()
    _, mine = _pieces(case, dist.get_rank())
    alone = student.get_grad_norm_fp32(iter(mine), case.p, None)
    return {"norm": norm, "alone": alone, "sent": _plain(sent)}


@functools.cache
def _pairs() -> list[dist.ProcessGroup]:
    """This rank's pair of each of the two ways; made by all ranks together."""
    return [dist.new_subgroups_by_enumeration(pairs)[0] for pairs in PAIRS]


def _plain(sent: SentTensors) -> list[Any]:
    return [sent.num_bytes, sent.words()]


def _check_sent(who: Any, sent: list[Any]) -> None:
    num_bytes, words = sent
    if num_bytes > MOST_SENT:
        raise Wrong(
            f"rank {who}: the norm is right, but {num_bytes} bytes were sent for it: {words}\n"
            "The gradients of a real model fill the memory of many ranks, and none has room for those "
            "of all. How little of its own part must a rank tell the others?"
        )


def _judge_vector(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    p = case.p
    norms = [answer["norm"] for answer in answers]
    for rank, norm in enumerate(norms):
        _require_number(norm, f"{p:g}-norm", rank)
    for rank, answer in enumerate(answers):
        pieces, mine = ([one.double() for one in some] for some in _pieces(case, rank))
        expected = torch.linalg.vector_norm(torch.cat(pieces).reshape(-1), p).item()
        if not math.isclose(norms[rank], expected, rel_tol=1e-9):
            found, wanted = told_apart(norms[rank], expected)
            raise Wrong(
                f"rank {rank}: the {p:g}-norm is {found}, expected {wanted}, the norm of "
                f"all ranks' gradients\n{_why_vector(norms, case, pieces, rank)}"
            )
        own = torch.linalg.vector_norm(torch.cat(mine).reshape(-1), p).item() if mine else 0.0
        check_numbers(f"the {p:g}-norm without a group", answer["alone"], own, rank)
        _check_sent(rank, answer["sent"])
    return Result({"norm": f"{answers[0]['norm']:.6g}", "ranks": WORLD})


def _why_vector(norms: list[float], case: Case, pieces: list[torch.Tensor], rank: int) -> str:
    norm, p = norms[rank], case.p
    if not math.isfinite(norm) and case.dtype == "float32":
        return (
            f"These gradients are float32, and about {LARGE:g}. What is the largest number that "
            "float32 has, and in which dtype are your powers?"
        )
    ranks = [torch.cat(pieces[r * (r - 1) // 2 :][:r]).reshape(-1) for r in (1, 2, 3)]
    of_ranks = [torch.linalg.vector_norm(vector, p).item() for vector in ranks]
    whole = torch.linalg.vector_norm(torch.cat(pieces).reshape(-1), p).item()
    mine = of_ranks[rank - 1] if rank else 0.0
    if words := rounding_words(norm, whole):
        return words
    if case.groups == 2 and (words := _of_one_pair(norm, p, ranks)):
        return words
    if p == math.inf:
        return (
            "For p = inf the norm is the size of one element. Given that of one rank and that of "
            "another, what is it for both ranks together, and does your exchange make that?"
        )
    if differ(norms) and math.isclose(norm, mine, rel_tol=1e-9, abs_tol=1e-12):
        return (
            "That is the norm of this rank's own part. Where does it hear of the other ranks' "
            "elements?"
        )
    if math.isclose(norm, sum(of_ranks), rel_tol=1e-9):
        return (
            f"That is the sum of the ranks' norms, {' + '.join(f'{x:.4g}' for x in [0, *of_ranks])}. "
            f"Norms do not add up; |x|^{p:g} does. So what is to be summed over ranks, and what "
            f"comes last?"
        )
    if math.isclose(norm, sum(of_ranks) ** (1 / p), rel_tol=1e-9):
        return (
            "The root was taken twice: on each rank before the sum over the group, and again after it. "
            f"What may be added up over ranks is the sum of |x|^{p:g}. Which of the two roots is too "
            "early?"
        )
    if math.isclose(norm, max(of_ranks), rel_tol=1e-9):
        return (
            "That is the largest of the ranks' norms. Each rank has other elements of one vector."
        )
    of_tensors = [torch.linalg.vector_norm(piece, p).item() for piece in pieces]
    if math.isclose(norm, sum(of_tensors), rel_tol=1e-9):
        return (
            "That is the sum of the tensors' norms. Norms do not add up: when is the root to be "
            "taken?"
        )
    if words := _why_sum(norm, p, torch.cat(pieces), whole):
        return words
    return (
        "No usual slip gives that number. Take two ranks that have (3) and (4): what has each of them "
        "before the exchange, after it, and at the end?"
    )


def _why_sum(norm: float, p: float, elements: torch.Tensor, whole: float) -> str:
    """Words for another sum of powers than the right one, or another root of it; else ""."""
    for k in range(2, 17):
        if math.isclose(norm, whole * k ** (1 / p), rel_tol=1e-9):
            return (
                f"The sum of |x|^{p:g} is {k} times the right one. Over which ranks did each of your "
                "sums run, and over which were they to?"
            )
    if math.isclose(norm, whole**p, rel_tol=1e-9):
        return f"That is the right number to the power of {p:g}. What is still to be done to it?"
    if math.isclose(norm, whole ** (p / 2), rel_tol=1e-9):
        return (
            f"That is the square root of the sum of |x|^{p:g}. Which root does norm_type ask for?"
        )
    # The power, and not the root: that sum may be negative.
    if abs(norm) < 1e99 and math.isclose(norm**p, elements.pow(p).sum().item(), rel_tol=1e-9):
        return (
            "In that sum negative elements were taken away from the others. What of an element does "
            f"the formula raise to the power of {p:g}?"
        )
    return ""


def _of_one_pair(norm: float, p: float, ranks: list[torch.Tensor]) -> str:
    """Words for a norm that only one of the two groups has made; else ""."""
    held = [ranks[0][:0], *ranks]
    for pairs, which in zip(PAIRS, ("first", "second"), strict=True):
        for pair in pairs:
            theirs = torch.cat([held[rank] for rank in pair])
            if math.isclose(norm, torch.linalg.vector_norm(theirs, p).item(), rel_tol=1e-9):
                return (
                    f"That is the norm of ranks {pair[0]} and {pair[1]}, a group of the {which} of the "
                    "two in grad_stats_parallel_group. Which elements does the other one bring?"
                )
    return ""


# -- A step --


def _take_gradient(step: GptStep, name: str) -> None:
    """The named parameter has no gradient, as if it were frozen."""
    for other, param in step.parameters():
        if other == name:
            param.main_grad = None


def _watched(
    student: ModuleType, faults: list[str], sent: SentTensors
) -> tuple[Callable, Callable]:
    """The student's two functions; what the step could not go on with is noted, and put right."""
    before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note_changes(name: str) -> None:
        if any(not torch.equal(grad, copy) for grad, copy in before):
            faults.append(f"{name} changed gradients in place; it may only read them")
            before.clear()

    def select(optimizer: Any, *kinds: Any) -> Any:
        grads = [shard.main_param.grad for shard in optimizer.shards]
        before.extend((grad, grad.clone()) for grad in grads if grad is not None)
        with all_sent_counted(sent):
            selection = _gradients(student.get_main_grads_for_grad_norm(optimizer), faults)
        note_changes("get_main_grads_for_grad_norm")
        return selection

    def take_norm(*arguments: Any, **options: Any) -> Any:
        with all_sent_counted(sent):
            norm = student.get_grad_norm_fp32(*arguments, **options)
        note_changes("get_grad_norm_fp32")
        return norm

    return select, take_norm


def _gradients(selection: Any, faults: list[str]) -> Any:
    """The selection without what is not a tensor; that is noted."""
    name = "get_main_grads_for_grad_norm"
    if selection is None or not isinstance(selection, Iterable):
        what = f"a {type(selection).__name__}"
        if selection is None:
            what = "None (was `return` forgotten?)"
        faults.append(f"{name} returned {what}; return a list of tensors")
        return []
    if isinstance(selection, torch.Tensor):
        return selection
    found = list(selection)
    for index, grad in enumerate(found):
        if grad is None:
            faults.append(
                f"[{index}] of what {name} returned is None: the gradient of a parameter that has "
                "none. Leave it out"
            )
        elif not isinstance(grad, torch.Tensor):
            faults.append(
                f"[{index}] of what {name} returned is a {type(grad).__name__}; return a list of "
                "gradients, which are tensors"
            )
    return [grad for grad in found if isinstance(grad, torch.Tensor)]


def _judge_step(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    reference = Reference(case.step, WORLD).run()
    for rank, answer in enumerate(answers):
        for fault in answer["faults"]:
            raise Wrong(f"rank {reference.who(rank)}: {fault}")
    gradients = reference.gradients
    if case.without:
        gradients[case.without].zero_()
        _take_gradient(reference.step, case.without)
    parameters = reference.step.parameters()
    _, expected, _ = reference.step.optimizer.step()
    squares = Squares(reference, gradients)
    norms = [answer["norm"] for answer in answers]
    for rank, norm in enumerate(norms):
        _require_number(norm, "gradient norm", rank)
    for rank, norm in enumerate(norms):
        if not math.isclose(norm, expected, rel_tol=1e-9):
            raise Wrong(squares.words(rank, norms, expected))
    weights = {name: param.detach() for name, param in parameters}
    for rank, answer in enumerate(answers):
        for name, wanted in reference.pieces(rank, weights).items():
            what = f"{name} after clipping and the update"
            check_numbers(what, answer["weights"].get(name), wanted, reference.who(rank))
        _check_sent(reference.who(rank), answer["sent"])
    return Result({"norm": f"{answers[0]['norm']:.6f}", "one process": f"{expected:.6f}"})
