"""Predict two tokens: losses of tokens further on, and how they come to their gradient.

Started by: you, and `minimegatron exercises check`. Beside the next token a model may learn to predict
the one after it, and so on: multi-token prediction (MTP). It has K more layers for that, its depths.
Write what is made of their outputs. The check works out losses and gradients on its own.

    hidden_states   K + 1 tensors [s, b, h]: the model's own, then those of depth 1 to K
    labels          [b, s], int64: at t stands the token after token t
    loss_mask       [b, s]: 1.0 where a label counts, 0.0 where it does not; 0 is a token like others
    f               how much all depths together count (0.1 is usual)

Depth k predicts at t the token that stands k places further on than the label at t. Near the end of a
sequence there is none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def roll_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves everything one place to the front, in the last dimension.

    Position t gets what stood at t + 1, and the last gets 0. Returns (a new tensor of the same shape
    and dtype, its sum).
    """
    raise NotImplementedError("Write roll_tensor: one place, and 0 at the end")


class MTPLossAutoScaler(torch.autograd.Function):
    """Attaches a loss to a tensor that the main loss is made of.

    Forward changes nothing. But when backward comes to the tensor, each number of the loss gets a
    gradient too: `main_loss_backward_scale`.
    """

    main_loss_backward_scale: torch.Tensor | None = None
    """One for the whole process. None counts as 1."""

    @staticmethod
    def forward(ctx, output, mtp_loss):
        raise NotImplementedError("Write MTPLossAutoScaler.forward: the output as it is")

    @staticmethod
    def backward(ctx, grad_output):
        """Returns two gradients: the output's and the loss's."""
        raise NotImplementedError("Write MTPLossAutoScaler.backward: one gradient per argument")

    @staticmethod
    def set_loss_scale(scale: torch.Tensor) -> None:
        """From now on, this is the gradient of losses that are attached, before or after this call."""
        raise NotImplementedError("Write MTPLossAutoScaler.set_loss_scale: keep it on the class")


def attach_mtp_losses(
    hidden_states: Sequence[torch.Tensor],
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    token_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    scaling_factor: float,
    per_token: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Makes the losses of depths 1 to K, and attaches them to the model's own hidden states.

    With n_0 the number of labels that count, n_k the number of those that depth k has, and l [b, s]
    what `token_loss(hidden state of depth k, its labels)` gives, depth k attaches

        per_token False    f / K * mask * l       / max(n_k, 1)    summed up: f / K of the mean
        per_token True     f / K * mask * l * n_0 / max(n_k, 1)    the same, as a sum over n_0 tokens

    with the mask of depth k.

    Args:
        scaling_factor: f.

    Returns (the model's own hidden states with all K losses attached; for the log, each depth's mean
    loss, without f and K, detached).
    """
    raise NotImplementedError("Write attach_mtp_losses: roll, weigh, attach; once for each depth")


def forward_backward(
    model: Any,
    microbatches: Sequence[Mapping[str, torch.Tensor]],
    scaling_factor: float,
    per_token: bool = False,
    loss_scale: float = 1.0,
) -> None:
    """Forward and backward of each microbatch; gradients add up in the parameters' `.grad`.

    The main loss is made of `model.token_loss(hidden state, labels)` and the mask:

        per_token False    its mean over the tokens that count. A step's loss is the mean over the
                           microbatches, of main losses and of MTP losses.
        per_token True     its sum. A step's loss is the sum over the microbatches; somebody else
                           divides all gradients by the number of tokens, later.

    Both kinds of loss are multiplied by `loss_scale`. Those of the depths are attached, by the function
    above; other layers of the model may attach losses, too, and must get the same scale.

    Args:
        model: `model(tokens)` gives the K + 1 hidden states.
        microbatches: each has "tokens", "labels" and "loss_mask". Some token counts in each.
    """
    raise NotImplementedError("Write forward_backward: a loop; both kinds of loss, equally scaled")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
