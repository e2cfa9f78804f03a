"""Predict two tokens, solved.

Everything rolls once more from depth to depth: labels, mask, and with the mask the number of tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def roll_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves everything one place to the front, in the last dimension."""
    rolled = torch.zeros_like(tensor)
    rolled[..., :-1] = tensor[..., 1:]
    return rolled, rolled.sum()


class MTPLossAutoScaler(torch.autograd.Function):
    """Attaches a loss to a tensor that the main loss is made of."""

    main_loss_backward_scale: torch.Tensor | None = None

    @staticmethod
    def forward(ctx, output, mtp_loss):
        ctx.save_for_backward(mtp_loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad_output):
        (mtp_loss,) = ctx.saved_tensors
        scale = MTPLossAutoScaler.main_loss_backward_scale
        of_loss = torch.ones_like(mtp_loss)
        return grad_output, of_loss if scale is None else of_loss * scale

    @staticmethod
    def set_loss_scale(scale: torch.Tensor) -> None:
        MTPLossAutoScaler.main_loss_backward_scale = scale


def attach_mtp_losses(
    hidden_states: Sequence[torch.Tensor],
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    token_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    scaling_factor: float,
    per_token: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Makes the losses of depths 1 to K, and attaches them to the model's own hidden states."""
    hidden, depths = hidden_states[0], hidden_states[1:]
    factor = scaling_factor / len(depths)
    if per_token:
        factor = factor * loss_mask.sum()
    means = []
    for state in depths:
        labels, _ = roll_tensor(labels)
        loss_mask, num_tokens = roll_tensor(loss_mask)
        loss = loss_mask * token_loss(state, labels) / num_tokens.clamp(min=1)
        hidden = MTPLossAutoScaler.apply(hidden, factor * loss)
        means.append(loss.detach().sum())
    return hidden, means


def forward_backward(
    model: Any,
    microbatches: Sequence[Mapping[str, torch.Tensor]],
    scaling_factor: float,
    per_token: bool = False,
    loss_scale: float = 1.0,
) -> None:
    """Forward and backward of each microbatch; gradients add up in the parameters' `.grad`."""
    scale = loss_scale if per_token else loss_scale / len(microbatches)
    # Set before each step: the next one may have another number of microbatches.
    MTPLossAutoScaler.set_loss_scale(torch.tensor(scale, dtype=torch.float64))
    for batch in microbatches:
        labels, mask = batch["labels"], batch["loss_mask"]
        states = model(batch["tokens"])
        hidden, _ = attach_mtp_losses(
            states, labels, mask, model.token_loss, scaling_factor, per_token
        )
        loss = (model.token_loss(hidden, labels) * mask).sum()
        if not per_token:
            loss = loss / mask.sum()
        (loss * scale).backward()


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
