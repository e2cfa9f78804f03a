"""The first part: which experts a token chooses, their weights, and the weights' gradient.

Megatron has no counterpart.
"""

from types import ModuleType
from typing import Any

import torch

from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.catalog.ex19_router.data import given_logits
from minimegatron.exercises.catalog.ex19_router.truth import best, numeric_gradient, right_route
from minimegatron.exercises.check import Case, Result, Wrong

NAME = "topk_routing_with_score_function"


def run_choice(student: ModuleType, case: Case) -> dict[str, Any]:
    """In the room: probs, map, and the gradient of the logits for a loss that uses every weight."""
    logits, bias = given_logits(case)
    entered = logits.to(getattr(torch, case.dtype), copy=True).requires_grad_()
    returned = student.topk_routing_with_score_function(
        entered,
        case.topk,
        use_pre_softmax=case.pre,
        scaling_factor=case.scaling,
        score_function=case.score,
        expert_bias=bias,
    )
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise Wrong(
            f"{NAME} returned a {type(returned).__name__}; (probs, routing_map) is expected"
        )
    probs, routing_map = returned
    for what, one in (("probs", probs), ("routing_map", routing_map)):
        if not isinstance(one, torch.Tensor) or one.shape != logits.shape:
            shape = list(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
            raise Wrong(f"{what} is {shape}; a tensor [T, E] = {list(logits.shape)} is expected")
    if routing_map.dtype != torch.bool:
        raise Wrong(f"routing_map is {routing_map.dtype}; a torch.bool tensor is expected")
    if probs.dtype != entered.dtype:
        raise Wrong(
            f"probs are {probs.dtype}, and the logits {entered.dtype}\nThe stub says in which dtype to "
            "compute. Which of your tensors is of another one?"
        )
    if not probs.requires_grad:
        raise Wrong(
            "probs have no graph (requires_grad is False): were they detached?\n"
            "The choice has no gradient, but the weights must have one: else no router learns."
        )
    (probs * weigh_up(probs)).sum().backward()
    return {"probs": probs.detach(), "map": routing_map, "gradient": entered.grad}


def weigh_up(probs: torch.Tensor) -> torch.Tensor:
    """A number for each weight, so that all count differently."""
    return torch.arange(1.0, probs.numel() + 1, dtype=torch.float64).reshape(probs.shape)


def judge_choice(case: Case, found: dict[str, Any]) -> Result:
    """The map, the weights, the gradient."""
    logits, bias = given_logits(case)
    probs, routing_map = right_route(case, logits, bias)
    _judge_map(case, logits, bias, found["map"], routing_map)
    known = list(_known_weights(case, logits, bias, routing_map))
    outside = found["probs"][~routing_map]
    if len(outside) and outside.any():
        raise Wrong(
            f"probs has {int((outside != 0).sum())} numbers that are not 0 for experts that were not "
            "chosen\nAn expert that a token does not visit has no weight for it."
        )
    rtol, atol = (1e-5, 1e-6) if case.dtype == "float32" else (1e-6, 1e-9)
    layout = {"k": case.topk}
    check_known("probs", found["probs"], probs, known, layout=layout, rtol=rtol, atol=atol)

    def total(at: torch.Tensor) -> float:
        return float((right_route(case, at, bias)[0] * weigh_up(at)).sum())

    what, right = "the gradient of the logits", numeric_gradient(total, logits)
    # Of float32 weights that are multiplied by numbers up to their number.
    check_known(what, found["gradient"], right, rtol=rtol, atol=max(atol * right.numel(), 1e-6))
    return Result({"tokens per expert": f"{routing_map.sum(dim=0).tolist()}"})


def _judge_map(
    case: Case,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    found: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    if torch.equal(found, expected):
        return
    token = int((found != expected).any(dim=1).nonzero()[0])
    mine, theirs = (row[token].nonzero().reshape(-1).tolist() for row in (found, expected))
    lines = [f"token {token} chooses experts {mine}, expected {theirs}"]
    row = logits[token]
    if case.is_far and set(mine) < set(theirs):
        lines.append(
            "The other one's logit is far smaller, so that its weight comes out as 0. Is a weight of 0 "
            "the same as no choice?"
        )
    elif len(mine) != case.topk:
        lines.append(f"k is {case.topk}: every token chooses as many.")
    elif bias is not None and mine == best(row, case.topk):
        lines.append("It chose as if expert_bias were 0. The bias is there to change the choice.")
    elif bias is not None and mine == best(row + bias, case.topk):
        lines.append("The bias was added to the logits. It belongs to the scores.")
    elif mine == best(-row, case.topk):
        lines.append("These are the smallest scores.")
    else:
        lines.append(f"Its logits are {[round(x, 3) for x in row.tolist()]}.")
    raise Wrong("\n".join(lines))


def _known_weights(
    case: Case, logits: torch.Tensor, bias: torch.Tensor | None, routing_map: torch.Tensor
) -> Any:
    """What usual mistakes give, with the right choice."""
    scaling = case.scaling or 1.0
    softmax = torch.softmax(logits, dim=1) * routing_map
    sigmoid = torch.sigmoid(logits) * routing_map
    own = (softmax if case.score == "softmax" else sigmoid) * scaling
    parts = own / own.sum(dim=1, keepdim=True)
    if scaling != 1.0:
        right, _ = right_route(case, logits, bias)
        yield right / scaling, f"scaling_factor, {scaling:g}, is not in them."
    if bias is not None:
        biased = (torch.sigmoid(logits) + bias) * routing_map
        words = (
            "The bias is in the weights. It says where tokens go, so that the load is even; how much "
            "an expert's output counts is not its business."
        )
        yield biased / biased.sum(dim=1, keepdim=True) * scaling, words
        yield biased * scaling, f"{words} And the weights of a token do not sum to 1."
    if case.score == "sigmoid":
        yield own, "The sigmoids are weights as they are: with k above 1 a token's must sum to 1."
        if case.topk == 1:
            yield (
                parts * scaling,
                (
                    "They were divided by their sum. With k = 1 that makes every weight 1, whatever "
                    "the logit is, and the router gets no gradient."
                ),
            )
        whole = torch.sigmoid(logits)
        yield (
            whole / whole.sum(dim=1, keepdim=True) * routing_map * scaling,
            (
                "They were divided by the sum over all experts: the chosen ones' weights then sum to "
                "less than 1."
            ),
        )
        yield softmax * scaling, "These are a softmax's weights; score_function is sigmoid."
    elif case.pre:
        yield (
            parts * scaling,
            (
                "A token's weights sum to 1. With use_pre_softmax they are what the softmax over all E "
                "experts gives, so they sum to less."
            ),
        )
    else:
        yield (
            own,
            (
                "That is the softmax over all E experts; a token's weights sum to less than 1. Without "
                "use_pre_softmax the softmax knows the chosen experts only."
            ),
        )
        again = torch.zeros_like(logits).masked_fill(~routing_map, -torch.inf) + softmax
        yield (
            torch.softmax(again, dim=1) * scaling,
            ("Softmax was taken twice: over all experts, and of the chosen ones' results again."),
        )
