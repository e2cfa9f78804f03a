"""The last part: what a step leaves in the router's gradient and counts.

Megatron has no counterpart.
"""

from collections.abc import Iterator
from typing import Any

import torch

from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.known_mistakes import check_known, is_same
from minimegatron.exercises.catalog.ex19_router.data import given_layer
from minimegatron.exercises.catalog.ex19_router.truth import RightStep, right_route
from minimegatron.exercises.check import Case, Result, Wrong

NAME = "the gradient of the router's weight"


def judge_step(case: Case, found: dict[str, Any]) -> Result:
    """How often the layer ran, the gradient, the counts; then where nothing may be counted."""
    right = RightStep(case, given_layer(case))
    if len(found["routed"]) != case.M:
        raise Wrong(
            f"forward_backward ran the layer {num_of(len(found['routed']), 'time')} for "
            f"{num_of(case.M, 'microbatch', 'microbatches')}"
        )
    _check_routed(case, right, found["routed"])
    # Summed over the microbatches; a step's loss is their mean.
    scale = case.loss_scale / case.M
    expected = scale * (right.main + right.aux)
    sizes = {"num_microbatches": case.M, "loss_scale": case.loss_scale}
    check_known(
        NAME,
        found["gradient"],
        expected,
        _known(case, right, found["gradient"]),
        layout=sizes,
        rtol=1e-5,
        atol=1e-7,
    )
    counts = _check_counts(case, right, found)
    share = float((scale * right.aux).norm() / expected.norm())
    return Result(
        {
            "tokens per expert": f"{counts.long().tolist()}",
            "the auxiliary loss's part of the gradient": f"{share:.0%}",
        }
    )


def _check_routed(
    case: Case, right: RightStep, routed: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """What routing returned for each microbatch."""
    for i, (x, (probs, routing_map)) in enumerate(
        zip(right.given.microbatches, routed, strict=True)
    ):
        logits = x @ right.given.weight.t()
        weights, chosen = right_route(case, logits, right.given.bias)
        where = f"microbatch {i}: the routing_map that routing returned"
        numbers = routing_map.sum(dim=1).tolist()
        if numbers != [case.topk] * len(x):
            raise Wrong(
                f"{where} has {numbers} experts for the tokens; self.topk is {case.topk}\nThe router "
                "says how your first function is to be called: which of its values did you hand on?"
            )
        if not torch.equal(routing_map, chosen):
            raise Wrong(
                f"{where} has other experts than your first function should choose for these logits\n"
                f"self.score_function is {case.score!r}; self.expert_bias is "
                f"{'given' if case.has_bias else 'None'}. Which of its values did you hand on?"
            )
        scaling = case.scaling or 1.0
        unscaled = [(weights / scaling, f"self.scaling_factor, {scaling:g}, is not in them.")]
        check_known(f"microbatch {i}: probs that routing returned", probs, weights, unscaled)


def _known(case: Case, right: RightStep, found: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
    """What a mistake leaves, and its words."""
    S, M = case.loss_scale, case.M
    main, aux = S / M * right.main, S / M * right.aux
    yield (
        main,
        "That is the main loss's gradient alone: the auxiliary losses give none. Backward begins at "
        "the main loss, and comes to what the layer's output was made of, and to nothing else. Which "
        "tensor carries your auxiliary loss, and does the layer use that very tensor?",
    )
    yield aux, "That is the auxiliary losses' gradient alone: the main loss gives none."
    yield (
        main + S * right.aux,
        f"The auxiliary losses count M times too much ({M} here): each of the {M} microbatches adds "
        "one, and a step's loss is their mean. Whoever divides the main loss must say so to them.",
    )
    yield (
        main + aux / M,
        f"The auxiliary losses were divided by M ({M}) twice.",
    )
    yield (
        main + right.aux / M,
        f"The loss scale, {S:g}, is in the main loss's gradient and not in the auxiliary losses'. "
        "Later all gradients are divided by it.",
    )
    yield (
        main + right.aux,
        f"The auxiliary losses' gradient is not scaled: neither the mean over M ({M}) is in it nor the "
        f"loss scale ({S:g}).",
    )
    yield (
        main + 100.0 * right.aux,
        "The auxiliary losses have the scale that the step before has set, 100. Every step sets its "
        "own.",
    )
    yield (
        M * (main + aux),
        f"The losses of {M} microbatches were summed; a step's loss is the mean.",
    )
    yield (main + aux) / S, f"The loss scale, {S:g}, is not in the gradients."
    yield (
        M / S * main + 100.0 * right.aux,
        f"Neither loss is scaled as the stub says. A step's loss is the mean over M = {M} "
        f"microbatches, "
        f"times the loss scale ({S:g}); and who tells the auxiliary losses? They have the scale that "
        "the step before has set, 100.",
    )
    for instead, words in _other_losses(case, right):
        yield main + S / M * instead, words
    largest = int(aux.abs().argmax())
    ratio = float(((found - main) / aux).reshape(-1)[largest])
    yield (
        main + ratio * aux,
        f"The auxiliary losses' part is {ratio:.6g} times what it should be. In its factor stand E "
        f"({case.experts}), k ({case.topk}), N ({case.tokens}) and the coefficient ({case.coeff:g}): "
        "which of them did you not take from the router and its logits?",
    )


def _other_losses(case: Case, right: RightStep) -> Iterator[tuple[torch.Tensor, str]]:
    """Another auxiliary loss than the one that is asked for."""
    counted = (
        "f_i is a number of tokens: a whole number, which does not move when the weight moves a "
        "little, so nothing is pulled through it. The scores P are there for the gradient."
    )
    yield right.soft_counts(is_detached=False), f"f_i was made of the scores' sums. {counted}"
    yield right.soft_counts(is_detached=True), f"f_i was made of the scores' sums. {counted}"
    yield right.sums_of_weights(), f"f_i was made of the weights that probs holds. {counted}"
    yield (
        right.scores_of_chosen(),
        "P was made of the layer's weights, which are 0 for an expert that a token did not choose. "
        "The loss must also say to the others that they may have more: it needs scores over all E.",
    )
    for k in range(1, case.experts + 1):
        yield (
            right.counts_of(k),
            f"The auxiliary loss is made as if each token chose {num_of(k, 'expert')}; self.topk is "
            f"{case.topk}.",
        )
    if case.has_bias:
        yield (
            right.counts_with_bias(),
            "f_i was counted with the bias. The auxiliary loss is about the scores as they are.",
        )


def _check_counts(case: Case, right: RightStep, found: dict[str, Any]) -> torch.Tensor:
    """Tokens per expert in all microbatches; and none where the model does not train."""
    if not found["in_place"]:
        raise Wrong(
            "routing put another tensor into self.local_tokens_per_expert; add in place\n"
            "It is a buffer of the model: the update at the step's end looks at the first one."
        )
    expected = torch.zeros(case.experts, dtype=torch.float64)
    for x in right.given.microbatches:
        logits = x @ right.given.weight.t()
        expected += right_route(case, logits, right.given.bias)[1].sum(dim=0)
    name = "local_tokens_per_expert after the step"
    check_known(name, found["training"], expected, layout={"num_microbatches": case.M})
    for what, where in (
        ("evaluation", "in an evaluation (self.training is False)"),
        ("no_grad", "in a forward without gradients (torch.is_grad_enabled() is False)"),
    ):
        if found[what].any():
            raise Wrong(
                f"tokens were counted {where}: {int(found[what].sum())}\n"
                "Only what trains counts. An evaluation would move the balance by tokens that train "
                "nothing, and recomputation would count each token twice."
            )
    main = _evaluation(case)
    if not is_same(found["evaluation_gradient"], main, rtol=1e-5, atol=1e-7):
        raise Wrong(
            "in an evaluation (self.training is False) the auxiliary loss is hung on probs all the "
            "same\nThe layer's output must depend on nothing but the main loss there."
        )
    return expected


def _evaluation(case: Case) -> torch.Tensor:
    """The main loss's gradient of the first microbatch."""
    given = given_layer(case)
    given.microbatches = given.microbatches[:1]
    return RightStep(case, given).main
