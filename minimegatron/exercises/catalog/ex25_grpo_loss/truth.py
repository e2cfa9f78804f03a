"""What GRPO's loss is, written out token by token, and what known mistakes make of it.

Megatron has no counterpart.
"""

from collections.abc import Mapping
from typing import Any

import torch

WAYS = {
    "min of ratios": (
        "It is as if the smaller ratio were taken first, and multiplied by A afterwards. Which of the "
        "two products is the smaller one where A is negative?"
    ),
    "not clipped": "It is as if the ratio were never clipped. What happens above 1 + eps_upper?",
    "no lower bound": "The ratio is clipped above only. What happens below 1 - eps_lower?",
    "no upper bound": "The ratio is clipped below only. What happens above 1 + eps_upper?",
    "only clipped": "Only the clipped product is there. Between which two is the smaller one taken?",
    "bounds exchanged": "Which of the two epsilons belongs to the lower bound?",
    "ratio inverted": "The ratio is the wrong way round. Which policy is above the line?",
    "ratio without gradient": (
        "No gradient comes through the ratio. Which of your lines takes `current` out of the graph?"
    ),
    "sign": "The sign is exchanged. A loss falls: what should become of an answer with A > 0?",
    "kl exchanged": "The KL term has the two policies exchanged. What is `difference`?",
    "kl sign": "The KL term has the other sign. Is it a reward, or does it cost something?",
    "kl k1": "That is another estimate of the KL, which may be negative. What is added to it?",
    "no kl": "The KL term is missing.",
    "entropy sign": "The entropy term has the other sign. Which entropy should the loss favour?",
    "entropy of -logp": "The entropy term lacks a factor. What is the token's share of the entropy?",
    "no entropy": "The entropy term is missing.",
    "no cap": "The weights go beyond the cap. How large may one be?",
    "no weight": "The tokens are not weighted. Which program drew them?",
    "weight inverted": "The weight is the wrong way round. Which policy is above the line there?",
    "weight of current": (
        "The weights are made of `current`, and bring a gradient with them. Of which policies is the "
        "weight made?"
    ),
    "weight on all": "The weight is on the other terms as well. Which term does it belong to?",
}
"""A known mistake, and what is said of it."""


def token_loss(given: Mapping[str, torch.Tensor], sizes: Mapping[str, Any], way: str = "") -> Any:
    """The loss of each token, right, or wrong in one of `WAYS`."""
    current, old, ref = (given[name] for name in ("current", "old", "ref"))
    kl = _kl(current, ref, way)
    entropy = -current if way == "entropy of -logp" else -current.exp() * current
    rest = sizes["kl_beta"] * kl + (1 if way == "entropy sign" else -1) * (
        sizes["entropy_weight"] * entropy * (way != "no entropy")
    )
    weight = _weight(given, sizes, way)
    if way == "weight on all":
        rest = rest * weight
    gain = _gain(current, old, given["advantages"][:, None], sizes, way)
    return (1 if way == "sign" else -1) * weight * gain + rest


def _gain(current: Any, old: Any, A: Any, sizes: Mapping[str, Any], way: str) -> torch.Tensor:
    low, high = sizes["eps_lower"], sizes["eps_upper"]
    if way == "bounds exchanged":
        low, high = high, low
    source = current.detach() if way == "ratio without gradient" else current
    ratio = (old - source if way == "ratio inverted" else source - old).exp()
    least = None if way == "no lower bound" else 1 - low
    most = None if way == "no upper bound" else 1 + high
    clipped = ratio.clamp(least, most)
    if way == "not clipped":
        return ratio * A
    if way == "only clipped":
        return clipped * A
    if way == "min of ratios":
        return torch.minimum(ratio, clipped) * A
    return torch.minimum(ratio * A, clipped * A)


def _kl(current: torch.Tensor, ref: torch.Tensor, way: str) -> torch.Tensor:
    difference = current - ref if way == "kl exchanged" else ref - current
    kl = difference.exp() - difference - 1
    return {"kl sign": -kl, "kl k1": -difference, "no kl": 0 * kl}.get(way, kl)


def _weight(given: Mapping[str, torch.Tensor], sizes: Mapping[str, Any], way: str) -> Any:
    if "inference" not in given or way == "no weight":
        return 1.0
    of = given["current" if way == "weight of current" else "old"]
    difference = of - given["inference"]
    weight = (-difference if way == "weight inverted" else difference).exp()
    return weight if way == "no cap" else weight.clamp(max=sizes["cap"])


def gradient(
    given: Mapping[str, torch.Tensor], sizes: Mapping[str, Any], way: str = ""
) -> torch.Tensor:
    """Of the sum of `given["arrives"]` times the losses, with respect to `current`."""
    leaf = given["current"].clone().requires_grad_()
    loss = token_loss({**given, "current": leaf}, sizes, way)
    if not loss.requires_grad:
        return torch.zeros_like(leaf)
    return torch.autograd.grad((loss * given["arrives"]).sum(), leaf)[0]
