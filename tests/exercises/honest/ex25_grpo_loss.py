"""GRPO's loss: whole distributions, groups one by one, the clip as a choice of the smaller product."""

import torch


def answer_logprobs(logits, tokens, answer_mask):
    length = tokens.shape[1]
    everything = torch.log_softmax(logits, dim=-1)
    found = [everything[torch.arange(len(tokens)), i, tokens[:, i + 1]] for i in range(length - 1)]
    return torch.stack(found, dim=1), answer_mask[:, 1:length]


def group_advantages(rewards, group_size):
    found = []
    for group in rewards.split(group_size):
        centred = group - group.mean()
        found.append(centred / (centred.pow(2).mean().sqrt() + 1e-4))
    return torch.cat(found)


def grpo_token_loss(
    current,
    old,
    ref,
    advantages,
    eps_lower,
    eps_upper,
    kl_beta=0.0,
    entropy_weight=0.0,
    inference=None,
    cap=1.0,
):
    ratio = torch.exp(current - old)
    a = advantages[:, None].expand_as(ratio)
    bounded = torch.clip(ratio, min=1 - eps_lower, max=1 + eps_upper)
    gain = torch.where(ratio * a < bounded * a, ratio * a, bounded * a)
    if inference is not None:
        with torch.no_grad():
            weight = torch.exp(old - inference)
            weight[weight > cap] = cap
        gain = gain * weight
    loss = -gain
    if kl_beta:
        apart = ref - current
        loss = loss + kl_beta * (torch.exp(apart) - apart - 1)
    if entropy_weight:
        loss = loss + entropy_weight * (torch.exp(current) * current)
    return loss


def loss_func(mask, token_loss):
    number = mask.sum()
    total = (mask * token_loss).sum()
    with torch.no_grad():
        report = torch.stack((total, number))
    return total, number, {"lm loss": report}


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
