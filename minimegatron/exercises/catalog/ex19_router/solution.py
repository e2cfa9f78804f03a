"""A router and its auxiliary loss, solved.

Choosing has no gradient; weights have. The same holds for the loss: f_i is counted, so only the
scores beside it move. They are pushed down most where most tokens go.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def topk_routing_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses `topk` experts for each token and weighs them; returns (probs, routing_map)."""
    if score_function == "sigmoid":
        scores = torch.sigmoid(logits)
        biased = scores if expert_bias is None else scores + expert_bias
        chosen = biased.topk(topk, dim=1).indices
        weights = scores.gather(1, chosen)
        if topk > 1:
            weights = weights / weights.sum(dim=1, keepdim=True)
    elif use_pre_softmax:
        weights, chosen = torch.softmax(logits, dim=1).topk(topk, dim=1)
    else:
        best, chosen = logits.topk(topk, dim=1)
        weights = torch.softmax(best, dim=1)
    if scaling_factor is not None:
        weights = weights * scaling_factor
    probs = torch.zeros_like(logits).scatter(1, chosen, weights)
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
    return probs, routing_map


def switch_load_balancing_loss_func(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
) -> torch.Tensor:
    """coeff * E / (k N^2) * sum over experts i of f_i * (sum over tokens of probs[token, i])."""
    factor = num_experts * moe_aux_loss_coeff / (topk * total_num_tokens**2)
    return (probs.sum(dim=0) * tokens_per_expert).sum() * factor


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """Hangs an auxiliary loss on a tensor that the model's loss depends on."""

    main_loss_backward_scale: torch.Tensor | None = None

    @staticmethod
    def forward(ctx, output, aux_loss):
        ctx.save_for_backward(aux_loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad_output):
        (aux_loss,) = ctx.saved_tensors
        aux_grad = torch.ones_like(aux_loss)
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        if scale is not None:
            aux_grad = aux_grad * scale
        return grad_output, aux_grad

    @staticmethod
    def set_loss_scale(scale: torch.Tensor) -> None:
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale


def routing(self: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts, as a method of a router; returns (probs, routing_map)."""
    probs, routing_map = topk_routing_with_score_function(
        logits,
        self.topk,
        self.use_pre_softmax,
        self.scaling_factor,
        self.score_function,
        self.expert_bias,
    )
    if self.training and torch.is_grad_enabled():
        self.local_tokens_per_expert += routing_map.sum(dim=0)
        probs = MoEAuxLossAutoScaler.apply(probs, _aux_loss(self, logits))
    return probs, routing_map


def _aux_loss(self: Any, logits: torch.Tensor) -> torch.Tensor:
    num_tokens, num_experts = logits.shape
    if self.score_function == "softmax":
        scores = torch.softmax(logits, dim=1)
    else:
        scores = torch.sigmoid(logits)
        scores = scores / scores.sum(dim=1, keepdim=True)
    chosen = scores.topk(self.topk, dim=1).indices
    counts = torch.bincount(chosen.reshape(-1), minlength=num_experts)
    return switch_load_balancing_loss_func(
        scores, counts, num_tokens, self.topk, num_experts, self.aux_loss_coeff
    )


def forward_backward(
    layer: Callable[[torch.Tensor], torch.Tensor],
    loss_func: Callable[[torch.Tensor], torch.Tensor],
    microbatches: Sequence[torch.Tensor],
    loss_scale: float = 1.0,
) -> None:
    """Forward and backward of each microbatch; gradients add up in the parameters' `.grad`."""
    scale = loss_scale / len(microbatches)
    # Set before each step: the next one may have another number of microbatches.
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale))
    for microbatch in microbatches:
        loss = loss_func(layer(microbatch)) * scale
        loss.backward()


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
