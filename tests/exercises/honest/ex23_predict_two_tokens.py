"""Predict two tokens: with slices of labels, and one attachment of all depths together."""

import torch
import torch.nn.functional as F


def roll_tensor(tensor):
    moved = F.pad(tensor[..., 1:], (0, 1))
    return moved, moved.sum()


class MTPLossAutoScaler(torch.autograd.Function):
    main_loss_backward_scale = torch.tensor(1.0)

    @staticmethod
    def forward(ctx, output, mtp_loss):
        ctx.shape, ctx.dtype = mtp_loss.shape, mtp_loss.dtype
        return output.clone()

    @staticmethod
    def backward(ctx, grad_output):
        scale = MTPLossAutoScaler.main_loss_backward_scale
        return grad_output, torch.ones(ctx.shape, dtype=ctx.dtype) * scale

    @staticmethod
    def set_loss_scale(scale):
        MTPLossAutoScaler.main_loss_backward_scale = scale


def attach_mtp_losses(
    hidden_states, labels, loss_mask, token_loss, scaling_factor, per_token=False
):
    own, *depths = hidden_states
    tokens_of_main = loss_mask.sum().item()
    total, means = 0.0, []
    for state in depths:
        (labels, _), (loss_mask, count) = roll_tensor(labels), roll_tensor(loss_mask)
        mean = (token_loss(state, labels) * loss_mask).sum() / max(count.item(), 1)
        means.append(mean.item())
        total = total + mean * scaling_factor / len(depths)
    if per_token:
        total = total * tokens_of_main
    # one number for all depths is as good as one for each token
    return MTPLossAutoScaler.apply(own, total), means


def forward_backward(model, microbatches, scaling_factor, per_token=False, loss_scale=1.0):
    M = len(microbatches)
    for batch in microbatches:
        mask = batch["loss_mask"]
        states = model(batch["tokens"])
        own, _ = attach_mtp_losses(
            states, batch["labels"], mask, model.token_loss, scaling_factor, per_token
        )
        losses = model.token_loss(own, batch["labels"])
        if per_token:
            loss, scale = (losses * mask).sum(), loss_scale
        else:
            loss, scale = (losses * mask).sum() / mask.sum(), loss_scale / M
        MTPLossAutoScaler.set_loss_scale(torch.tensor(scale))
        loss.mul(scale).backward()


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
