"""Checks the merge, the blocks of pairs, then the ring forward and backward on real ranks."""

import random
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.catalog.ex22_ring_attention.blocks import judge_blocks, run_blocks
from minimegatron.exercises.catalog.ex22_ring_attention.data import WORLD, Tokens
from minimegatron.exercises.catalog.ex22_ring_attention.merging import (
    EQUAL,
    FAR,
    NOTHING,
    judge_merge,
    run_merge,
)
from minimegatron.exercises.catalog.ex22_ring_attention.passing import Ring
from minimegatron.exercises.catalog.ex22_ring_attention.truth import RightRing
from minimegatron.exercises.check import Case, Result, Wrong, data_seed

_RING = "minimegatron.core.transformer.context_parallel."
REPLACES = tuple(_RING + name for name in ("merge", "block_of", "block_gradients", "RingAttention"))
MERGE, BLOCKS, FORWARD, BACKWARD = "the merge", "the blocks", "the forward", "the backward"
GRADIENTS = {
    "query": "the gradient of query",
    "key": "the gradient of key",
    "value": "the gradient of value",
}
TOLERANCES = {"rtol": 1e-7, "atol": 1e-10}


def cases(seed: int) -> list[Case]:
    """Rows of every kind, blocks of several rings, then rings of two and of four ranks."""
    draw, data = random.Random(seed), data_seed(seed)
    sizes = {"heads": 2, "width": 3}
    found = [
        Case(f"{kind} lse", part=MERGE, kind=kind, **sizes, seed=data + number)
        for number, kind in enumerate((EQUAL, FAR, NOTHING))
    ]
    found += [
        Case(f"{c} ranks, {2 * chunk} tokens on each", part=BLOCKS, cp=c, chunk=chunk)
        for c, chunk in ((2, draw.choice([2, 4])), (4, draw.choice([2, 3])), (3, 2))
    ]
    rings = [(part, c, chunk) for part in (FORWARD, BACKWARD) for c, chunk in ((4, 2), (2, 3))]
    for number, (part, c, chunk) in enumerate(rings):
        chunk = draw.choice([chunk, chunk + 1]) if seed else chunk
        scale = (0.8, 0.35)[number % 2] + draw.choice([0.0, 0.05, 0.1]) * bool(seed)
        found.append(_ring(part, c, chunk, data + 10 + number, (1.0, scale)))
    large = _ring(FORWARD, 4, 1, data + 20, (2000.0, 0.6), ", scores of some thousands")
    return [*found[:-2], large, *found[-2:]]


def _ring(
    part: str, c: int, chunk: int, seed: int, scores: tuple[float, float], more: str = ""
) -> Case:
    """`scores` are the size of the queries, and the scale."""
    groups = f"{WORLD // c} rings of {c} ranks" if c < WORLD else f"a ring of {c} ranks"
    name = f"{groups}, {2 * c * chunk} tokens{more}"
    values = {"heads": 2, "width": 3, "size_of_scores": scores[0], "scale": scores[1]}
    return Case(name, part=part, cp=c, chunk=chunk, seed=seed, **values)


def run(student: ModuleType, case: Case) -> Any:
    """One of the parts."""
    if case.part == MERGE:
        return run_merge(student, case)
    if case.part == BLOCKS:
        return run_blocks(student, case)
    parallel_state.initialize_model_parallel(context_parallel_size=case.cp)
    group = parallel_state.get_context_parallel_group()
    return (_run_forward if case.part == FORWARD else _run_backward)(student, case, group)


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """Every rank's numbers."""
    if case.part == MERGE:
        return judge_merge(case, answers)
    if case.part == BLOCKS:
        return judge_blocks(case, answers)
    return (_judge_forward if case.part == FORWARD else _judge_backward)(case, answers)


# -- In the room --


def _own(case: Case) -> tuple[Tokens, list[torch.Tensor]]:
    """The ring's data, and this rank's query, key, value and gradient."""
    given = Tokens(case, dist.get_rank())
    whole = (given.query, given.key, given.value, given.grad)
    return given, [tensor[:, given.own].clone() for tensor in whole]


def _run_forward(student: ModuleType, case: Case, group: Any) -> dict[str, Any]:
    given, (query, key, value, _) = _own(case)
    ring = Ring(group, "ring_forward")
    arguments = (query, key, value, given.scale, ring)
    names = ("query", "key", "value")
    found = _called(
        student.ring_forward, ring, dict(zip(names, arguments, strict=False)), arguments
    )
    return dict(zip(("output", "lse"), found, strict=True)) | _noticed(ring)


def _run_backward(student: ModuleType, case: Case, group: Any) -> dict[str, Any]:
    """With the output and lse of one process, so that forward and backward fail apart."""
    given, (query, key, value, grad) = _own(case)
    output, lse = (tensor[:, given.own] for tensor in _whole_attention(given))
    ring = Ring(group, "ring_backward")
    arguments = (grad, query, key, value, output, lse, given.scale, ring)
    names = ("grad_output", "query", "key", "value", "output", "lse")
    found = _called(
        student.ring_backward, ring, dict(zip(names, arguments, strict=False)), arguments
    )
    return dict(zip(GRADIENTS, found, strict=True)) | _noticed(ring)


def _noticed(ring: Ring) -> dict[str, Any]:
    """What a function sent, computed beside the hops, and multiplied."""
    return {"sent": ring.num_sent, "beside": ring.num_beside, "pairs": ring.pairs}


def _whole_attention(given: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    scores = given.query @ given.key.mT * given.scale
    later = torch.ones(given.length, given.length, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    return torch.softmax(scores, dim=2) @ given.value, scores.logsumexp(dim=2)


def _called(
    function: Callable[..., Any], ring: Ring, given: dict[str, torch.Tensor], arguments: tuple
) -> list[torch.Tensor]:
    """What a function of the ring returned, once all ranks are out of it. `given` are its tensors."""
    query, kept = given["query"], {name: tensor.clone() for name, tensor in given.items()}
    with ring.watched(query, given["key"], given["value"]) as sent:
        returned = function(*arguments)
    if sent.calls:
        raise Wrong(
            f"{ring}, your code sends something past the ring: {sent.words()}\nWith the ring "
            "alone no rank ever holds all keys and values. That is what it is for."
        )
    ring.end()
    for name, tensor in given.items():
        if not torch.equal(tensor, kept[name]):
            raise Wrong(
                f"{ring}: {name} was changed in place\nIt is the caller's, and other numbers stand in "
                "it now. Who else reads it, later?"
            )
    num = 3 if "lse" in given else 2
    names = {2: "(output, lse)", 3: "(of query, of key, of value)"}[num]
    if not isinstance(returned, tuple) or len(returned) != num:
        kind = "None (was `return` forgotten?)" if returned is None else type(returned).__name__
        raise Wrong(f"{ring}: {kind} was returned; {names} is expected")
    for place, one in enumerate(returned):
        wanted = list(query.shape[: 2 if num == 2 and place else 3])
        shape = list(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
        if shape != wanted:
            raise Wrong(f"{ring}: of {names}, number {place} is {shape}; {wanted} is expected")
        if one.dtype != torch.float64:
            raise Wrong(
                f"{ring}: of {names}, number {place} is {one.dtype}; float64 is expected, like "
                "all that you are given\nWhich of your tensors was made without a look at the "
                "query's dtype?"
            )
    return [one.detach().clone() for one in returned]


# -- In the judge --


def _judge_forward(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    for rank, answer in enumerate(answers):
        given = Tokens(case, rank)
        right, rows = RightRing(given), given.own
        known = right.wrong_outputs(given.place)
        found, wanted = answer["output"], right.output[:, rows]
        _is_finite(found, rank)
        check_known("the output", found, wanted, known, rank, **TOLERANCES)
        lse = right.lse[:, rows]
        check_known("the lse", answer["lse"], lse, rank=rank, **TOLERANCES)
    _judge_overlap(case, answers, "ring_forward")
    sent = _sent_words(case, answers[0]["sent"], case.cp - 1)
    return Result({"passed on by a rank": sent} | _beside(answers))


def _judge_overlap(case: Case, answers: Sequence[dict[str, Any]], name: str) -> None:
    """Keys and values make c - 1 hops, each of them while a block is computed."""
    wanted = case.cp - 1
    for rank, answer in enumerate(answers):
        if answer["beside"] < wanted:
            raise Wrong(
                f"rank {rank}: the numbers are right, but {name} computes beside {answer['beside']} of "
                f"{num_of(wanted, 'hop')} of keys and values: while the others travel, the rank waits\n"
                "Which keys does the rank have in the meantime, and what could it do with them?"
            )
    for rank, answer in enumerate(answers):
        own, *others = answer["pairs"]
        if own and sum(others) > 0.75 * own * wanted:
            of_others = "; of those that came: " + ", ".join(map(str, others))
            raise Wrong(
                f"rank {rank}: the numbers are right, but {name} makes about as many scores with keys "
                f"of other ranks as with its own: {own}{of_others}\nOf its own some pairs are masked. "
                "Of the others' it needs every second one. Which slices does block_of_step give?"
            )


def _beside(answers: Sequence[dict[str, Any]]) -> dict[str, str]:
    hidden = min(answer["beside"] for answer in answers)
    return {"hops that were under way while a block was computed": str(hidden)}


def _is_finite(found: torch.Tensor, rank: int) -> None:
    if not torch.isfinite(found).all():
        raise Wrong(
            f"rank {rank}: the output has values that are nan or inf\nAn exp of a large score, -inf "
            "less -inf, or memory that was never written. Which round makes the first of them?"
        )


def _sent_words(case: Case, num_sent: int, least: int) -> str:
    """In units of what one rank has."""
    unit = 2 * (2 * case.chunk * case.heads * case.width)
    few = "" if num_sent == least * unit else f" ({least} are enough)"
    return f"{num_sent / unit:g} x the keys and values of a rank{few}"


def _judge_backward(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    for which, name in GRADIENTS.items():
        for rank, answer in enumerate(answers):
            given = Tokens(case, rank)
            right = RightRing(given)
            wanted = getattr(right.gradients(), which)[:, given.own]
            known = right.wrong_gradients(given.place, which)
            check_known(name, answer[which], wanted, known, rank, **TOLERANCES)
    _judge_overlap(case, answers, "ring_backward")
    sent = _sent_words(case, answers[0]["sent"], 2 * case.cp - 1)
    return Result({"passed on by a rank": sent} | _beside(answers))
