"""A router and its auxiliary loss: which experts a token goes to, and what keeps their load even.

Started by: you, and `minimegatron exercises check`. A mixture-of-experts layer has E MLPs, the experts,
and a token goes through k of them. The router is one matrix that gives each token E numbers, the
logits. Write what is made of them, on one process. The check compares with numbers worked out by hand,
and gradients with finite differences in float64.

    logits        [T, E]         T tokens, E experts
    probs         [T, E]         an expert's weight for a token; 0 where the token did not choose it
    routing_map   [T, E], bool   True where it did

Compute in the dtype that you are given.
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
    """Chooses `topk` experts for each token and weighs them; returns (probs, routing_map).

        score_function   use_pre_softmax   chosen by         weight of a chosen expert
        "softmax"        False             logit             softmax over the chosen experts' logits
        "softmax"        True              softmax over E    that softmax, as it is
        "sigmoid"        (not looked at)   sigmoid + bias    sigmoid without bias, divided by the sum
                                                             of the chosen ones if topk is above 1

    `expert_bias` [E] comes with "sigmoid" only, or is None. At the end, weights are multiplied by
    `scaling_factor` if it is not None.
    """
    raise NotImplementedError("Write topk_routing_with_score_function: choose, then weigh")


def switch_load_balancing_loss_func(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
) -> torch.Tensor:
    """coeff * E / (k N^2) * sum over experts i of f_i * (sum over tokens of probs[token, i]).

    f_i is `tokens_per_expert[i]`, N is `total_num_tokens`. `probs` [N, E] are scores over all experts.
    Returns a scalar.
    """
    raise NotImplementedError("Write switch_load_balancing_loss_func: the formula")


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """Hangs an auxiliary loss on a tensor that the model's loss depends on.

    Forward changes nothing. But when backward comes to the tensor, the auxiliary loss gets a gradient
    too: `main_loss_backward_scale`. So a layer deep in the model needs nobody who adds its loss.
    """

    main_loss_backward_scale: torch.Tensor | None = None
    """One for the whole process. None counts as 1."""

    @staticmethod
    def forward(ctx, output, aux_loss):
        raise NotImplementedError("Write MoEAuxLossAutoScaler.forward: the output as it is")

    @staticmethod
    def backward(ctx, grad_output):
        """Returns two gradients: the output's and the auxiliary loss's."""
        raise NotImplementedError("Write MoEAuxLossAutoScaler.backward: one gradient per argument")

    @staticmethod
    def set_loss_scale(scale: torch.Tensor) -> None:
        """From now on, this is the auxiliary losses' gradient, also of those attached before."""
        raise NotImplementedError("Write MoEAuxLossAutoScaler.set_loss_scale: keep it on the class")


def routing(self: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts, as a method of a router; returns (probs, routing_map).

        self.topk, self.use_pre_softmax, self.scaling_factor      for your function above
        self.score_function, self.expert_bias
        self.aux_loss_coeff              weight of the auxiliary loss
        self.training                    False while the model is evaluated
        self.local_tokens_per_expert     [E]: tokens that each expert has got since the last update

    While it trains, that is if `self.training` and `torch.is_grad_enabled()`:

    * adds to `local_tokens_per_expert`, in place, how many tokens go to each expert;
    * makes the auxiliary loss, and hangs it on probs. Its scores are softmax over all E, or for
      "sigmoid" the sigmoids divided by the sum over all E. Its f_i are counted as if each token chose
      by these scores alone, without the bias.

    Otherwise it does neither. Recomputation runs forward twice, first without gradients: a token must
    not be counted twice.
    """
    raise NotImplementedError("Write routing: choose; while training, count and attach the loss")


def forward_backward(
    layer: Callable[[torch.Tensor], torch.Tensor],
    loss_func: Callable[[torch.Tensor], torch.Tensor],
    microbatches: Sequence[torch.Tensor],
    loss_scale: float = 1.0,
) -> None:
    """Forward and backward of each microbatch; gradients add up in the parameters' `.grad`.

    The step's loss is the mean over the microbatches, of the main loss `loss_func(layer(x))` and of the
    auxiliary losses in the layer, times `loss_scale`. The layer calls your `routing`.
    """
    raise NotImplementedError("Write forward_backward: a loop; both kinds of loss, equally scaled")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
