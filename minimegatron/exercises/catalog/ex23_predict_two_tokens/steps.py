"""The last part: what a step leaves in the gradients of a small model.

Megatron has no counterpart.
"""

from collections.abc import Iterator
from typing import Any

import torch

from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.catalog.ex23_predict_two_tokens.data import given_weights
from minimegatron.exercises.catalog.ex23_predict_two_tokens.truth import RightStep, Way
from minimegatron.exercises.check import Case, Result, Wrong

NAMES = {"table": "the token table", "depths": "the depths' layers"}
TOLERANCES = {"rtol": 1e-5, "atol": 1e-7}
OLD_SCALE = 100.0
"""That an earlier step has left."""


def judge_step(case: Case, answer: dict[str, Any]) -> Result:
    """How often the model ran; then the gradients."""
    M = len(case.masks)
    if answer["num_forwards"] != M:
        raise Wrong(
            f"forward_backward ran the model {num_of(answer['num_forwards'], 'time')} for "
            f"{num_of(M, 'microbatch', 'microbatches')}"
        )
    right = RightStep(case, given_weights(case))
    scale = case.loss_scale if case.per_token else case.loss_scale / M
    sizes = {"num_microbatches": M, "loss_scale": case.loss_scale}
    for name, words in NAMES.items():
        found = answer["gradients"][name]
        if found is None:
            raise Wrong(f"{words} have no gradient\n{_dropped()}")
        expected = scale * (right.main[name] + right.mtp[name])
        known = _known(case, right, name)
        what = f"the gradient of {words}"
        check_known(what, found, expected, known, layout=sizes, **TOLERANCES)
    _check_attached(case, answer, M, scale)
    share = float(right.mtp["table"].norm() / (right.main["table"] + right.mtp["table"]).norm())
    return Result({"the depths' part of the embedding's gradient": f"{share:.0%}"})


def _check_attached(case: Case, answer: dict[str, Any], M: int, scale: float) -> None:
    """The gradients are right; did they come by the way that the exercise asks for?"""
    of_own = 0.0 if answer["of_own"] is None else float(answer["of_own"])
    if abs(of_own - M * scale) > 1e-6:
        text = (
            f"a loss that the model itself attaches to its hidden states got a gradient of "
            f"{of_own / M:g} in a microbatch, expected {scale:g}\nIt stands for layers deep inside: "
            "forward_backward does not see their losses. How do these learn of a step's scale?"
        )
        if abs(of_own - M * OLD_SCALE) < 1e-6:
            text += f" {OLD_SCALE:g} is left of an earlier step."
        raise Wrong(text)
    if answer["num_attached"] != M:
        raise Wrong(
            f"forward_backward called attach_mtp_losses {num_of(answer['num_attached'], 'time')} for "
            f"{num_of(M, 'microbatch', 'microbatches')}\nThe gradients are right here, where both "
            "kinds of loss are made in one place. Attached, the losses of the depths need nobody who "
            "adds them up."
        )


def _dropped() -> str:
    return (
        "The losses of the depths give no gradient. They are attached to the tensor that "
        "attach_mtp_losses returns: the main loss must be made of that one."
    )


def _known(case: Case, right: RightStep, name: str) -> Iterator[tuple[torch.Tensor, str]]:
    """What a mistake leaves, and its words."""
    S, M = case.loss_scale, len(case.masks)
    main, mtp = right.main[name], right.mtp[name]
    scale = S if case.per_token else S / M
    yield scale * main, _dropped()
    yield scale * mtp, "That is the gradient of the depths' losses alone: the main loss gives none."
    yield from _other_scales(case, main, mtp)
    ones = right.of_other(Way(mask="ones"))[name]
    yield (
        scale * (main + ones),
        "The losses of the depths know nothing of the mask: they count labels that it leaves out, as "
        "those of padding. The main loss has it, so its number looks right.",
    )
    unmasked = right.other_main(has_mask=False)[name]
    yield scale * (unmasked + mtp), "The mask is not in the main loss."
    moved = right.other_main(times_rolled=1)[name]
    yield scale * (moved + mtp), "The labels of the main loss were rolled; only the depths' are."
    first = right.mtp_of_first()[name]
    yield (
        scale * (main + mtp) + (OLD_SCALE - scale) * first,
        "In the first microbatch the losses of the depths have the scale that an earlier step has set, "
        f"{OLD_SCALE:g}. Set yours before the first backward.",
    )
    if not case.per_token:
        spread = right.other_main(divisor="all")[name]
        yield (
            scale * (spread + mtp),
            "The main loss was divided by the number of all tokens; the mean is over those that count.",
        )
    other = right.other_main(divisor="count" if case.per_token else "1")[name]
    if case.per_token:
        yield (
            scale * (other + mtp),
            "The main loss is a mean; with per_token it is a sum over tokens.",
        )
    else:
        yield (
            scale * (other + mtp),
            "The main loss is a sum over tokens; without per_token it is a mean.",
        )


def _other_scales(
    case: Case, main: torch.Tensor, mtp: torch.Tensor
) -> Iterator[tuple[torch.Tensor, str]]:
    S, M = case.loss_scale, len(case.masks)
    scale = S if case.per_token else S / M
    yield (
        scale * main + OLD_SCALE * mtp,
        f"The losses of the depths have the scale that an earlier step has set, {OLD_SCALE:g}. Every "
        "step sets its own, before its first backward.",
    )
    if case.per_token:
        yield (
            S * main + S / M * mtp,
            f"The losses of the depths were divided by M ({M}), and the main loss was not. With "
            "per_token a step's loss is a sum over tokens; the later division is by their number.",
        )
        yield (
            S / M * (main + mtp),
            f"Everything was divided by M ({M}); with per_token it is a sum.",
        )
    else:
        yield (
            S / M * main + S * mtp,
            f"The losses of the depths count M times too much ({M} here): each of the {M} microbatches "
            "adds some, and a step's loss is their mean. Whoever divides the main loss must say so to "
            "them, with set_loss_scale.",
        )
        yield (
            S * (main + mtp),
            f"The losses of {M} microbatches were summed; a step's loss is the mean.",
        )
        yield S * main + S / M * mtp, f"The main loss was not divided by M ({M})."
        yield S / M * main + S / M / M * mtp, f"The depths' losses were divided by M ({M}) twice."
    if S != 1.0:
        words = f"The loss scale, {S:g}, is in the main loss and not in the losses of the depths. "
        yield scale * main + scale / S * mtp, f"{words}Later all gradients are divided by it."
        yield scale / S * (main + mtp), f"The loss scale, {S:g}, is not in the gradients."
        yield (
            scale * main + S * scale * mtp,
            f"The loss scale, {S:g}, is in the depths' losses twice.",
        )
    yield (
        scale * main + mtp,
        "The losses of the depths are not scaled: neither by M nor by loss_scale.",
    )
