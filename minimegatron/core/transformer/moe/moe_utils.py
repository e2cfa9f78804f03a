"""What a router computes: scores and choice, dropping, losses of balance, and their way into backward.

Counterpart: `megatron.core.transformer.moe.moe_utils`. T is the number of tokens that this rank routes,
(s/t/c) * b; E that of experts; k that of experts per token.

Scores, weights and losses are computed in float32, or in float64 if the logits have it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from minimegatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from minimegatron.core.transformer.moe.permutation import (  # noqa: F401  Megatron has them here
    permute,
    sort_chunks_by_idxs,
    unpermute,
)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# -- Logits --


def router_gating_linear(
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    router_dtype: torch.dtype,
) -> torch.Tensor:
    """inp [..., h] times weight [E, h] transposed, computed in `router_dtype` -> logits [..., E]."""
    bias = None if bias is None else bias.to(router_dtype)
    return F.linear(inp.to(router_dtype), weight.to(router_dtype), bias)


# -- Scores and choice --


def group_limited_topk(
    scores: torch.Tensor,
    topk: int,
    num_tokens: int,
    num_experts: int,
    num_groups: int,
    group_topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `topk` experts of the best `group_topk` groups: scores and numbers, both [T, k].

    A group is `num_experts / num_groups` neighbours. It counts as much as the sum of its best
    `topk / group_topk` scores. If a group is a rank's experts, a token visits `group_topk` ranks at
    most (DeepSeek-V2, https://arxiv.org/abs/2405.04434).
    """
    grouped = scores.view(num_tokens, num_groups, num_experts // num_groups)
    group_scores = grouped.topk(topk // group_topk, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(group_topk, dim=-1).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
    allowed = grouped.masked_fill(is_out.unsqueeze(-1), float("-inf"))
    return allowed.view(num_tokens, num_experts).topk(topk, dim=-1)


def topk_routing_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which `topk` experts each token goes to, and with which weights.

    softmax: over the logits of the chosen experts; with `use_pre_softmax` over those of all experts.
    sigmoid: each expert by itself; if a token has several, their weights are made to sum to 1.

    `expert_bias` [E] is added to the sigmoids for the choice, not for the weights: it moves tokens, and
    leaves what an expert says as loud as it was (https://arxiv.org/abs/2408.15664).

    Equal logits: which of the experts is chosen depends on the device and on the number of tokens.

    Args:
        logits: [T, E].

    Returns probabilities [T, E] in the dtype of `logits`, 0 where not chosen, and the map [T, E], bool.
    Raises ValueError for an unknown score function, and for a bias that softmax has no use for.
    """
    if score_function not in ("softmax", "sigmoid"):
        raise ValueError(f"score_function is {score_function!r}; use 'softmax' or 'sigmoid'")
    is_sigmoid = score_function == "sigmoid"
    if expert_bias is not None and not is_sigmoid:
        raise ValueError("expert_bias goes with score_function 'sigmoid', not with 'softmax'")
    scores = logits.to(_wide(logits))
    if is_sigmoid:
        scores = torch.sigmoid(scores)
    elif use_pre_softmax:
        scores = torch.softmax(scores, dim=-1)

    preferred = scores if expert_bias is None else scores + expert_bias
    if group_topk:
        _, chosen = group_limited_topk(preferred, topk, *logits.shape, num_groups, group_topk)
    else:
        _, chosen = preferred.topk(topk, dim=-1)
    weights = scores.gather(1, chosen)

    if is_sigmoid and topk > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    elif not is_sigmoid and not use_pre_softmax:
        weights = torch.softmax(weights, dim=-1)
    if scaling_factor:
        weights = weights * scaling_factor
    probs = torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype))
    return probs, map_of(chosen, logits)


def map_of(chosen: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Numbers of experts [T, k] -> bool [T, E], the shape of `logits`."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


def sinkhorn(cost: torch.Tensor, tol: float = 0.0001) -> torch.Tensor:
    """Scales the rows and columns of exp(cost) [T, E] until each token and each expert has its share.

    Rows then sum to 1/T, columns to 1/E. It ends when a round moves the columns' factors by `tol` or
    less, on the mean (https://arxiv.org/abs/2202.01169).
    """
    kernel = torch.exp(cost)
    num_tokens, num_experts = kernel.shape
    columns, moved = kernel.new_ones(num_experts), math.inf
    while moved > tol:
        rows = 1 / (num_tokens * ((columns * kernel).sum(dim=1) + 1e-8))
        before = columns
        columns = 1 / (num_experts * ((rows.unsqueeze(1) * kernel).sum(dim=0) + 1e-8))
        moved = (before - columns).abs().mean()
    return columns * kernel * rows.unsqueeze(1)


# -- Capacity --


def get_capacity(
    num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None
) -> int:
    """Fair shares of `num_tokens`, times the factor, rounded up; at least `min_capacity`."""
    return max(math.ceil((num_tokens / num_experts) * capacity_factor), min_capacity or 0)


def apply_router_token_dropping(
    routing_probs: torch.Tensor,
    routing_map: torch.Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each expert keeps as many of the tokens that chose it as it has room for.

    "probs" keeps the most probable, "position" the first. With `pad_to_capacity` other tokens fill the
    places that are left, with probability 0.

    There is room for T k / E tokens times the factor. T is this rank's number of tokens, so what is
    dropped depends on how tokens are divided over ranks and microbatches: by design such a run does not
    equal that of one process.

    Returns probabilities and map, both [T, E], without what is dropped.
    Raises ValueError for another policy.
    """
    keys = {"probs": routing_probs, "position": routing_map.int()}
    if drop_policy not in keys:
        raise ValueError(f"drop_policy is {drop_policy!r}; use 'probs' or 'position'")
    num_tokens, num_experts = routing_map.shape
    capacity = get_capacity(num_tokens * router_topk, num_experts, capacity_factor)
    # Stable, so that among equals the first come first; with "position" all that chose it are equal.
    order = keys[drop_policy].detach().argsort(dim=0, descending=True, stable=True)
    kept = torch.zeros_like(routing_map).scatter(0, order[:capacity], True)
    if not pad_to_capacity:
        kept = kept & routing_map
    return routing_probs * kept, kept


# -- Losses of balance --


def compute_routing_scores_for_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the losses of balance look at: (map, scores), both [T, E].

    Not what the tokens do: scores are over all experts and sum to 1, and the choice is by them alone,
    without bias, groups and capacity. Raises ValueError for an unknown score function.
    """
    scores = logits.to(_wide(logits))
    if score_function == "softmax":
        scores = torch.softmax(scores, dim=-1)
    elif score_function == "sigmoid":
        scores = torch.sigmoid(scores)
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    else:
        raise ValueError(f"score_function is {score_function!r}; use 'softmax' or 'sigmoid'")
    return map_of(scores.topk(topk, dim=-1).indices, logits), scores


def get_tokens_per_expert_and_token_count(
    routing_map: torch.Tensor, reduce_group: dist.ProcessGroup
) -> tuple[torch.Tensor, int, int]:
    """Counts [E] over `reduce_group` (int64), this rank's number of tokens, and the group's."""
    counts = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), reduce_group)
    num_tokens = routing_map.size(0)
    return counts, num_tokens, num_tokens * reduce_group.size()


def switch_load_balancing_loss_func(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
) -> torch.Tensor:
    """coeff * E / (k N^2) * sum over experts of (tokens * sum of scores): about coeff if all is even.

    `probs` [T, E] are the scores of this rank's tokens. `tokens_per_expert` [E] and `total_num_tokens`
    N are of all ranks that share the tokens; the values of those ranks sum to the loss. Only scores
    have a gradient: it takes from experts that many tokens chose (https://arxiv.org/abs/2101.03961).
    """
    weight = moe_aux_loss_coeff * num_experts / (topk * total_num_tokens**2)
    return (probs.sum(dim=0) * tokens_per_expert).sum() * weight


def z_loss_func(logits: torch.Tensor, z_loss_coeff: float) -> torch.Tensor:
    """coeff * mean of logsumexp^2 of `logits` [T, E]: they stay small (https://arxiv.org/abs/2202.08906)."""
    return torch.logsumexp(logits.to(_wide(logits)), dim=-1).square().mean() * z_loss_coeff


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """Hangs a loss on an activation: the activation's backward is the loss's too.

    Use the returned activation; else the loss has no gradient. Its gradient is
    `main_loss_backward_scale`, one number for the process, as the schedules set it after each forward.
    """

    main_loss_backward_scale: torch.Tensor | None = None

    @staticmethod
    def forward(ctx, output: torch.Tensor, aux_loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(aux_loss)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (aux_loss,) = ctx.saved_tensors
        grad, scale = torch.ones_like(aux_loss), MoEAuxLossAutoScaler.main_loss_backward_scale
        return grad_output, grad if scale is None else grad * scale.to(grad).view(())

    @staticmethod
    def set_loss_scale(scale: torch.Tensor) -> None:
        """`scale` is a tensor of one element; it also multiplies the main loss."""
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale


@contextmanager
def scale_put_back() -> Iterator[None]:
    """Of `config.around_step_funcs`: after a step, a loop's own backward finds the scale it had."""
    before = MoEAuxLossAutoScaler.main_loss_backward_scale
    try:
        yield
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = before


# Of `config.aux_loss_scale_funcs`, one or the other. Float64: 1/3 in float32 is off by 1e-8.


def scale_as_mean(scale: torch.Tensor, num_microbatches: int, cp_size: int) -> None:
    """A step has the mean over microbatches and data ranks of the losses of balance.

    Gradients are divided by d * c, but the c ranks' values sum to a loss.
    """
    MoEAuxLossAutoScaler.set_loss_scale(scale.double() * cp_size / num_microbatches)


def scale_as_sum(scale: torch.Tensor, num_microbatches: int, cp_size: int) -> None:
    """The same with `calculate_per_token_loss`: `finalize_model_grads` divides by all tokens.

    The router has multiplied by the microbatch's.
    """
    MoEAuxLossAutoScaler.set_loss_scale(scale.double())
