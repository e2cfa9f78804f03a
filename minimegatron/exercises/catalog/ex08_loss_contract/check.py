"""Checks every row of the contract, then a GPT's gradients with uneven numbers of tokens."""

import math
import random
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.exercises.bench.gpt_step import GptStep, StepCase, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference, is_close
from minimegatron.exercises.bench.noting import note
from minimegatron.exercises.catalog.ex08_loss_contract.table import judge_table, run_table
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed

CALC_LOSS = "minimegatron.core.pipeline_parallel.steps.forward_step_calc_loss"
DIVIDE = "minimegatron.core.distributed.finalize_model_grads._divide_by_num_tokens"
REPLACES = (CALC_LOSS, DIVIDE)
TABLE, STEP = "the table, row by row", "a training step"
SCALE = (
    "minimegatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
    ".scale_gradients"
)
DIVISIONS = {
    "5 tokens on each replica": (5, 5),
    "no tokens at all": (0, 0),
    "70001 tokens on each replica": (70_001, 70_001),
    "no tokens on the first replica": (0, 5),
}
"""Tokens of the first replica and of each other, where `_divide_by_num_tokens` is asked alone."""
TOLERANCE = 1e-6
"""A factor that was computed with int or float32 tensors is rounded."""
MASKED = 1
"""Of the global batch's microbatches, the one without a token that counts."""
WORLD = 4
NOT_SCALED = (
    "_divide_by_num_tokens never called scale_gradients here. Gradients lie in the chunk's buffer "
    "(param.main_grad), and param.grad is None: call chunk.scale_gradients(factor) for each chunk."
)


def cases(seed: int) -> list[Case]:
    """The table, then GPT steps: both options, with stages and without, odd M, M = 1."""
    draw, data = random.Random(seed), data_seed(seed)
    M, c = draw.choice([5, 7]), draw.choice([2, 4])
    found = [Case(TABLE, part=TABLE, M=M, c=c, total=10.0 + data % 5)]
    # No two of M, p and the number of replicas are equal where it can be avoided: a wrong factor
    # must be told from the others.
    some, few = draw.choice([3, 5]), draw.choice([2, 3])
    # Tensor-parallel ranks hold the same tokens: a sum over all ranks would count them twice.
    sizes = [(2, 1, some, False), (2, 1, some, True), (1, 2, few, True), (1, 1, 1, False)]
    for p, t, M, on in sizes:
        cut = {"pp": p, "tp": t, "num_microbatches": M, "num_layers": 2}
        step = StepCase(**cut, per_token=on, seed=data).values
        of = f"pp={p}, " + f"tp={t}, " * (t > 1) + f"dp={WORLD // p // t}"
        words = f"GPT, {of}, M={M}, calculate_per_token_loss {'on' if on else 'off'}"
        found.append(Case(words, part=STEP, step=step))
    return found


def run(student: ModuleType, case: Case) -> Any:
    """What each row gives, or one step."""
    if case.part == TABLE:
        return run_table(student, case)
    step = on_these_ranks(case.step)
    if step.groups.dp.rank() == MASKED % step.groups.dp.size():
        step.data[MASKED // step.groups.dp.size()]["mask"].zero_()
    factors: list[float] = []

    def scale_gradients(self: DistributedDataParallel, scaling_factor: float) -> None:
        factors.append(float(scaling_factor))
        original(self, scaling_factor)

    original = DistributedDataParallel.scale_gradients
    with (
        installed(student.forward_step_calc_loss, CALC_LOSS),
        installed(_watched(student._divide_by_num_tokens), DIVIDE),
        installed(scale_gradients, SCALE),
    ):
        step.forward_backward()
    found = {"gradients": step.gradients(), "num_scalings": len(factors)}
    if step.case.per_token:
        found |= {words: _run_division(student, step, words) for words in DIVISIONS}
    return found


class _Chunk(torch.nn.Module):
    """A chunk without gradients: it notes how they would be scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def scale_gradients(self, scaling_factor: float) -> None:
        self.factor *= float(scaling_factor)


def _run_division(student: ModuleType, step: GptStep, words: str) -> list[float] | None:
    """What two chunks are scaled by, with `DIVISIONS[words]` tokens; None for a division by 0."""
    chunks, groups = [_Chunk(), _Chunk()], step.groups
    num = DIVISIONS[words][groups.dp.rank() > 0]
    is_last = groups.pp.rank() == groups.pp.size() - 1
    mine = torch.tensor(num if is_last else 0, dtype=torch.int)
    try:
        student._divide_by_num_tokens(chunks, mine, groups.pp, groups.dp_cp)
    except ZeroDivisionError:
        return None
    finally:
        note(words)
    return [chunk.factor for chunk in chunks]


def judge_hang(case: Case, notes: Sequence[list[Any]]) -> None:
    """Ranks that have left `_divide_by_num_tokens`, and ranks that wait in it."""
    for words, (first, others) in DIVISIONS.items():
        inside = [rank for rank, said in enumerate(notes) if words not in said]
        if inside and len(inside) < len(notes):
            outside = [rank for rank in range(len(notes)) if rank not in inside]
            raise Wrong(
                f"ranks {outside} have left _divide_by_num_tokens, and ranks {inside} wait in it "
                f"({words}: {first} on the first, {others} on each other one)\nA collective needs "
                "every rank of its group. Which of your lines lets a rank leave before, and what does "
                "that rank know of the other replicas?"
            )


def _watched(divide: Callable) -> Callable:
    """`divide`, which must leave the number of tokens as it is."""

    def watched(model: Any, num_tokens: torch.Tensor, *groups: Any) -> None:
        before = num_tokens.clone()
        divide(model, num_tokens, *groups)
        if not torch.equal(before, num_tokens):
            raise Wrong(
                f"rank {torch.distributed.get_rank()}: _divide_by_num_tokens changed num_tokens "
                f"from {before.tolist()} to {num_tokens.tolist()}\nIt is the caller's: the tokens of "
                "this replica, which are logged afterwards. broadcast and all_reduce work in place. "
                "In whose memory may the sum be made?"
            )

    return watched


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """Each row, or every gradient."""
    if case.part == STEP:
        return _judge_step(case, answers)
    judge_table(case, answers[0])
    return None


# -- A training step, judged --


def _judge_step(case: Case, answers: Sequence[Any]) -> Result:
    """A GPT whose microbatches have unequal numbers of tokens, one of them none."""
    reference = Reference(case.step, WORLD)
    reference.step.data[MASKED]["mask"].zero_()
    reference.run()
    full, counts = reference.gradients, [int(b["mask"].sum()) for b in reference.step.data]
    for rank, found in enumerate(answers):
        mine = sum(counts[reference.places[rank]["dp"] :: reference.dp])
        for name, wanted in reference.pieces(rank, full).items():
            got = found["gradients"].get(name)
            if is_close(got, wanted, TOLERANCE):
                continue
            wrong = _wrong_gradient(reference, rank, name, got, wanted, (mine, sum(counts)))
            if reference.case.per_token and not found["num_scalings"]:
                raise Wrong(f"{str(wrong).splitlines()[0]}\n{NOT_SCALED}")
            raise wrong
    if reference.case.per_token:
        for words in DIVISIONS:
            for rank, found in enumerate(answers):
                _judge_division(reference.who(rank), found[words], words, reference.dp)
    how = f"the mean over {sum(counts)} tokens" if case.step["per_token"] else "a mean of means"
    return Result({"tokens": f"{counts} in the global batch's microbatches; gradients of {how}"})


def _judge_division(who: str, factors: list[float] | None, words: str, dp: int) -> None:
    """Two chunks, on each of `dp` replicas with `DIVISIONS[words]` tokens."""
    first, others = DIVISIONS[words]
    total = first + others * (dp - 1)
    right = 1.0 / max(total, 1)
    if factors and all(math.isclose(factor, right, rel_tol=TOLERANCE) for factor in factors):
        return
    if total == 0:
        what = "a division by 0" if factors is None else f"scale_gradients got {factors[0]:g}"
        raise Wrong(
            f"rank {who}: there are no tokens in the whole global batch: {what}\nThe gradients are "
            "0 then, and stay 0 if they are divided by a number. Which does the stub name?"
        )
    off = f"{words}: of two model chunks, the gradients were scaled by {factors}; expected 1 / {total}"
    why = (
        "`model` is a list. With interleaving a stage has several chunks: call scale_gradients of "
        "each, once."
    )
    if factors == [1.0, 1.0]:
        why = "Nothing was divided here. What does this rank know of the other replicas' tokens?"
    elif factors and factors[0] == factors[1]:
        why = (
            "Both got the same factor. Which numbers were added up for it, and can the dtype in which "
            "they were hold a number of this size?"
        )
    raise Wrong(f"rank {who}: {off} for both\n{why}")


def _wrong_gradient(
    reference: Reference,
    rank: int,
    name: str,
    got: Any,
    wanted: torch.Tensor,
    tokens: tuple[int, int],
) -> Wrong:
    """Names the factor, if there is one."""
    shown = reference.wrong_gradient(rank, name, got, wanted)
    if not reference.case.per_token or getattr(got, "shape", None) != wanted.shape:
        return shown
    large = wanted.abs() > 1e-6 * wanted.abs().max()
    ratios = got[large] / wanted[large]
    for factor, words in _guesses(reference, *tokens):
        if factor != 1 and torch.allclose(ratios, torch.full_like(ratios, factor), rtol=1e-5):
            first = str(shown).splitlines()[0]
            return Wrong(f"{first}\nratio got / expected = {words}")
    return shown


def _guesses(reference: Reference, mine: int, everyones: int) -> list[tuple[float, str]]:
    """A factor by which all gradients are wrong, and where it comes from."""
    M, p, dp = reference.case.num_microbatches, reference.case.pp, reference.dp
    t = reference.case.tp
    by_stages = f"the tokens were added up over the {p} stages, but only the last stage knows them"
    by_replicas = f"it was divided by the {dp} replicas too, but their gradients are a plain sum"
    by_tensors = (
        f"the tokens were added up over the {t} tensor-parallel ranks, which have the same ones. Over "
        "which ranks are you asked to sum?"
    )
    if t == dp:
        by_tensors = by_replicas = f"{by_tensors} Or {by_replicas}"
    if p == dp:
        by_stages = by_replicas = f"{by_replicas}; or {by_stages}"
    return [
        (
            everyones,
            f"x {everyones}, the tokens of the global batch: on this stage nothing was divided by "
            "them. Only the last stage has counted; the others have 0 and must be told.",
        ),
        (
            everyones / max(mine, 1),
            f"x {everyones} / {mine}: divided by the {mine} tokens of this replica, but gradients "
            f"were summed over {dp} replicas, which have {everyones}. Sum the numbers too.",
        ),
        (
            1 / M,
            f"1 / M (1/{M}): with the option on, sums are divided once, by all tokens, at the end; "
            "do not divide by the number of microbatches as well.",
        ),
        (1 / t, f"1 / {t}: {by_tensors}"),
        (1 / p, f"1 / {p}: {by_stages}."),
        (1 / dp, f"1 / {dp}: {by_replicas}."),
        (everyones**2, f"{everyones} x {everyones}: multiplied by the tokens, not divided."),
    ]
