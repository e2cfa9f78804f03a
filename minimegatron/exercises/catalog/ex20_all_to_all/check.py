"""Checks the exchange, the order of the tokens, and a layer of experts with both."""

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.exercises.bench.apart import meet
from minimegatron.exercises.bench.counted_collectives import Counter
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.bench.sent_bytes import all_sent_counted
from minimegatron.exercises.catalog.ex20_all_to_all.data import (
    HIDDEN,
    WORLD,
    Tokens,
    expert_weight,
    grads_of,
    members,
    rows_of,
    run_expert,
)
from minimegatron.exercises.catalog.ex20_all_to_all.exchanges import Phase, agreed
from minimegatron.exercises.catalog.ex20_all_to_all.layer import (
    judge_layer,
    judge_order,
    judge_sent,
)
from minimegatron.exercises.check import Case, Result, Wrong, data_seed

_PERMUTATION = "minimegatron.core.transformer.moe.permutation."
REPLACES = (
    "minimegatron.core.tensor_parallel.uneven_rows._AllToAll",
    "minimegatron.core.tensor_parallel.uneven_rows.all_to_all",
    *(_PERMUTATION + name for name in ("permute", "unpermute", "sort_chunks_by_idxs")),
)
EXCHANGE, ORDER, LAYER = "the exchange", "the order", "a layer"


def cases(seed: int) -> list[Case]:
    """Uneven exchanges, tokens in order, then layers in which some ranks get or send nothing."""
    draw, data = random.Random(seed), data_seed(seed)
    wide, deep = [HIDDEN], [8, HIDDEN // 8]
    exchanges = {
        "a group of 4": (4, "float64", wide, _uneven(draw, 4)),
        "two groups of 2, float32": (2, "float32", deep, _uneven(draw, 2)),
        "a group of 4, one of each kind": (4, "float64", wide, _of_each_kind(draw)),
    }
    found = [
        Case(name, part=EXCHANGE, ep=ep, dtype=dtype, row=row, matrix=matrix, seed=data + number)
        for number, (name, (ep, dtype, row, matrix)) in enumerate(exchanges.items())
    ]
    # Nobody chooses expert 3, and one token chooses nobody.
    chosen = [_choices(draw, 6, (0, 1, 2, 4), 2) for _ in range(WORLD)]
    chosen[0][2] = []
    found.append(
        Case("6 tokens, 5 experts", part=ORDER, ep=1, local=5, chosen=chosen, seed=data + 2)
    )
    return [*found, *_layers(draw, data)]


def _layers(draw: random.Random, data: int) -> list[Case]:
    nobody: list[list[int]] = [[] for _ in range(4)]
    drawn = [_choices(draw, 4, range(2, 8), 2) for _ in range(4)]
    # A rank's last token chooses nobody: how many there are is not told by those that were sent.
    first = [[*_choices(draw, 5, range(8), 2)[: 4 + (i != 1)], *[[]] * (i == 1)] for i in range(4)]
    kinds = {
        "2 experts on each of 4 ranks": (2, 4, first),
        "two groups of 2 ranks, 3 experts on each": (
            3,
            2,
            [_choices(draw, 4, range(6), topk) for topk in (2, 3, 3, 2)],
        ),
        "all tokens to one expert": (1, 4, [_choices(draw, 3, [2], 1) for _ in range(4)]),
        "a rank whose tokens choose nobody": (2, 4, [*drawn[:3], nobody]),
        # Nobody has chosen rank 0's experts, 0 and 1, either: it neither sends nor gets.
        "a rank that sends nothing and gets nothing": (2, 4, [nobody, *drawn[1:]]),
        "a rank without tokens": (2, 4, [[], *drawn[1:]]),
    }
    return [
        Case(name, part=LAYER, ep=ep, local=local, chosen=chosen, seed=data + 10 + number)
        for number, (name, (local, ep, chosen)) in enumerate(kinds.items())
    ]


def _choices(draw: random.Random, num_tokens: int, experts: Any, topk: int) -> list[list[int]]:
    return [sorted(draw.sample(list(experts), topk)) for _ in range(num_tokens)]


def _uneven(draw: random.Random, size: int) -> list[list[int]]:
    """Rows from i to j, with a zero; no rank gets as many as it sends."""
    while True:
        matrix = [[draw.randint(0, 4) for _ in range(size)] for _ in range(size)]
        sums = [(sum(matrix[i]), sum(row[i] for row in matrix)) for i in range(size)]
        has_zero = any(0 in row for row in matrix)
        if has_zero and all(sent != got and sent and got for sent, got in sums):
            return matrix


def _of_each_kind(draw: random.Random) -> list[list[int]]:
    """Rank 0 neither sends nor gets, rank 1 only sends, rank 2 only gets, rank 3 does both."""
    a, b, c, d = (draw.randint(1, 4) for _ in range(4))
    return [[0, 0, 0, 0], [0, 0, a, b], [0, 0, 0, 0], [0, 0, c, d]]


def run(student: ModuleType, case: Case) -> Any:
    """One of the parts."""
    if case.part == ORDER:
        return _run_order(student, case)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=case.ep)
    group, phase = parallel_state.get_expert_model_parallel_group(), Phase()
    with agreed(student, phase):
        if case.part == EXCHANGE:
            return _run_exchange(student, case, group, phase)
        return _run_layer(student, case, group, phase)


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """Every rank's numbers."""
    if case.part == ORDER:
        return judge_order(case, answers)
    return judge_layer(case, answers) if case.part == LAYER else _judge_exchange(case, answers)


def _backward(phase: Phase, output: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
    """Backward; what autograd itself refuses is told."""
    if not isinstance(output, torch.Tensor) or not output.requires_grad:
        raise Wrong(
            f"{phase}: what comes out has no graph (requires_grad is False)\n"
            "collectives have no gradient: rows must go through your all_to_all."
        )
    phase.begin("backward")
    try:
        output.backward(grad)
    except RuntimeError as error:
        if "returned an" in str(error) or "incorrect number of gradients" in str(error):
            raise Wrong(f"{phase}, autograd refuses a gradient: {error}") from error
        raise
    phase.end(group)
    # A rank that is done must not meet the others' next call.
    meet()


def _is_tensor(value: Any, shape: Sequence[int], what: str) -> None:
    if not isinstance(value, torch.Tensor) or list(value.shape) != list(shape):
        is_tensor = isinstance(value, torch.Tensor)
        kind = f"has shape {list(value.shape)}" if is_tensor else f"is a {type(value).__name__}"
        raise Wrong(f"rank {dist.get_rank()}: {what} {kind}; a tensor {list(shape)} is expected")


def _sent(counter: Counter) -> list[list[Any]]:
    """[name, bytes] of each collective and message."""
    return [[call.name, call.num_bytes] for call in counter.calls]


# -- The exchange --


def _run_exchange(student: ModuleType, case: Case, group: Any, phase: Phase) -> dict[str, Any]:
    rank, me = dist.get_rank(), group.rank()
    entered = rows_of(case, rank).requires_grad_()
    sent, got = list(case.matrix[me]), [row[me] for row in case.matrix]
    with all_sent_counted() as counter:
        output = student.all_to_all(group, entered, got, sent)
    phase.end(group)
    _is_tensor(output, (sum(got), *entered.shape[1:]), "what all_to_all returned")
    if output.dtype != entered.dtype:
        raise Wrong(
            f"rank {rank}: all_to_all made {output.dtype} of {entered.dtype}; the dtype stays"
        )
    found = {"output": output.detach().clone(), "sent": _sent(counter)}
    meet()
    # Another exchange, over another group maybe, before the backward of this one.
    student.all_to_all(dist.group.WORLD, torch.ones(WORLD, 1), [1] * WORLD, [1] * WORLD)
    _backward(phase, output, grads_of(case, rank), group)
    if entered.grad is None:
        raise Wrong(f"rank {rank}: the backward of all_to_all returned no gradient for its input")
    return found | {"gradient": entered.grad}


def _judge_exchange(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    matrix = case.matrix
    for rank, answer in enumerate(answers):
        group, me = members(case, rank), rank % case.ep
        rows = [rows_of(case, other).split(matrix[i]) for i, other in enumerate(group)]
        wanted = torch.cat([rows[i][me] for i in range(case.ep)])
        _is_no_copy(answer["output"], rows_of(case, rank), wanted, rank)
        check_known("what all_to_all returned", answer["output"], wanted, rank=rank)
    for rank, answer in enumerate(answers):
        group, me = members(case, rank), rank % case.ep
        grads = [
            grads_of(case, other).split([row[i] for row in matrix]) for i, other in enumerate(group)
        ]
        wanted = torch.cat([grads[i][me] for i in range(case.ep)])
        check_known("the gradient of all_to_all's input", answer["gradient"], wanted, rank=rank)
    for rank, answer in enumerate(answers):
        size = rows_of(case, rank).nbytes
        judge_sent(f"rank {rank}: all_to_all", "row", size, size, answer["sent"])
    return Result({"rows": f"from each rank to each: {matrix}"})


def _is_no_copy(found: torch.Tensor, own: torch.Tensor, wanted: torch.Tensor, rank: int) -> None:
    """Raises Wrong if the first rows are those that the rank has sent."""
    n = min(len(own), len(found))
    if n and torch.equal(found[:n], own[:n]) and not torch.equal(wanted[:n], own[:n]):
        raise Wrong(
            f"rank {rank}: what all_to_all returned begins with this rank's own {num_of(n, 'row')}, in "
            "their order\nThey are for other ranks, too. Which rows have come from rank 0 of the group?"
        )


# -- The order --


def _run_order(student: ModuleType, case: Case) -> dict[str, Any]:
    """permute with gradients, then unpermute of rows that tell themselves apart."""
    given = Tokens(case, dist.get_rank())
    hidden, probs = given.hidden.clone().requires_grad_(), given.probs.clone().requires_grad_()
    returned = student.permute(hidden, given.map, probs)
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise Wrong("permute must return (tokens, probs, numbers of the tokens)")
    n = int(given.map.sum())
    tokens, weights, indices = returned
    num_weighed = int((given.probs > 0).sum())
    if isinstance(tokens, torch.Tensor) and len(tokens) == num_weighed != n:
        raise Wrong(
            f"rank {dist.get_rank()}: permute made {num_of(num_weighed, 'row')} of {n} choices: "
            "one has a weight of 0\nA weight may be too small for its dtype. Which argument says who "
            "chose whom?"
        )
    for what, value, shape in (
        ("tokens", tokens, (n, hidden.size(1))),
        ("probs", weights, (n,)),
        ("numbers", indices, (n,)),
    ):
        _is_tensor(value, shape, f"of what permute returned, {what}")
    total = student.unpermute(tokens, indices, len(hidden))
    _is_tensor(total, hidden.shape, "what unpermute returned")
    for what, value in (("tokens", total), ("probs", weights)):
        if not value.requires_grad:
            raise Wrong(f"no gradient comes through the {what}: what is returned has no graph")
    (total.sum() + (weights * torch.arange(1.0, n + 1)).sum()).backward()
    return {
        "tokens": tokens.detach(),
        "probs": weights.detach(),
        "indices": indices,
        "total": total.detach(),
        "of_tokens": hidden.grad,
        "of_probs": probs.grad,
    }


# -- A layer --


def _run_layer(student: ModuleType, case: Case, group: Any, phase: Phase) -> dict[str, Any]:
    rank, me = dist.get_rank(), group.rank()
    given = Tokens(case, rank)
    hidden, probs = given.hidden.clone().requires_grad_(), given.probs.clone().requires_grad_()
    phase.begin("dispatch")
    with all_sent_counted() as counter:
        returned = student.dispatch(hidden, given.map, probs, group)
    phase.end(group)
    tokens, counts, weights, state = _checked(returned, case)
    sent = _sent(counter)
    found = {"tokens": tokens.detach().clone(), "counts": counts, "probs": weights.detach().clone()}
    numbers = range(me * case.local, (me + 1) * case.local)
    experts = [expert_weight(case, rank, number).requires_grad_() for number in numbers]
    parts = zip(tokens.split(counts), experts, weights.split(counts), strict=True)
    outputs = torch.cat([run_expert(*part) for part in parts])
    before = _combined_before_another(student, given, outputs, state, group, phase)
    phase.begin("combine")
    with all_sent_counted() as counter:
        output = student.combine(outputs, state)
    phase.end(group)
    _is_tensor(output, hidden.shape, "what combine returned")
    found |= {"sent": sent, "sent_back": _sent(counter), "output": output.detach().clone()}
    found |= {"before": before}
    meet()
    _backward(phase, output, given.grad, group)
    gradients = {"of_hidden": hidden.grad, "of_probs": probs.grad}
    return found | gradients | {"of_experts": [expert.grad for expert in experts]}


def _combined_before_another(
    student: ModuleType, given: Tokens, outputs: torch.Tensor, state: Any, group: Any, phase: Phase
) -> torch.Tensor:
    """What combine gives before other tokens are dispatched; then they are."""
    phase.begin("combine")
    before = student.combine(outputs.detach(), state)
    phase.end(group)
    phase.begin("dispatch")
    student.dispatch(given.hidden.flip(0), given.map.flip(0), given.probs.flip(0), group)
    phase.end(group)
    _is_tensor(before, given.hidden.shape, "what combine returned")
    return before.detach().clone()


def _checked(returned: Any, case: Case) -> tuple[torch.Tensor, list[int], torch.Tensor, Any]:
    """What dispatch returned, if it can be given to experts."""
    who = f"rank {dist.get_rank()}: dispatch"
    if not isinstance(returned, tuple) or len(returned) != 4:
        raise Wrong(f"{who} must return (tokens, tokens_per_expert, probs, state)")
    tokens, counts, weights, state = returned
    if isinstance(counts, torch.Tensor):
        counts = counts.tolist()
    counts = [int(count) for count in counts]
    if len(counts) != case.local:
        raise Wrong(
            f"{who} returned {len(counts)} tokens_per_expert, {counts}; this rank has "
            f"{case.local} expert{'s' * (case.local > 1)}"
        )
    n = sum(counts)
    for what, value in (("tokens", tokens), ("probs", weights)):
        if not isinstance(value, torch.Tensor) or len(value) != n:
            size = (
                f"{num_of(len(value), 'row')}"
                if isinstance(value, torch.Tensor)
                else type(value).__name__
            )
            raise Wrong(
                f"{who} returned {what} of {size}, but tokens_per_expert {counts} are {n} in all\n"
                "A row, and its probability, for each token that came to an expert of this rank."
            )
    return tokens, counts, weights.reshape(-1), state
