"""GRPO's loss, solved.

Logits lose their last position and tokens their first: entry i is of token i + 1.
"""

import torch


def answer_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, answer_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each token that was predicted, and which of them are an answer's."""
    predicted = tokens[:, 1:].unsqueeze(-1)
    logprobs = logits[:, :-1].log_softmax(dim=-1).gather(-1, predicted).squeeze(-1)
    return logprobs, answer_mask[:, 1:]


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """How much better each answer is than the others to the same prompt."""
    groups = rewards.view(-1, group_size)
    mean, deviation = groups.mean(1, keepdim=True), groups.std(1, correction=0, keepdim=True)
    return ((groups - mean) / (1e-4 + deviation)).view(-1)


def grpo_token_loss(
    current: torch.Tensor,
    old: torch.Tensor,
    ref: torch.Tensor,
    advantages: torch.Tensor,
    eps_lower: float,
    eps_upper: float,
    kl_beta: float = 0.0,
    entropy_weight: float = 0.0,
    inference: torch.Tensor | None = None,
    cap: float = 1.0,
) -> torch.Tensor:
    """The loss of each token, before any mask or mean."""
    advantages = advantages.unsqueeze(-1)
    ratio = (current - old).exp()
    clipped = ratio.clamp(1 - eps_lower, 1 + eps_upper)
    weight = 1.0
    if inference is not None:
        weight = (old - inference).exp().clamp(max=cap)
    difference = ref - current
    kl = difference.exp() - difference - 1
    entropy = -current.exp() * current
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    return -weight * gain + kl_beta * kl - entropy_weight * entropy


def loss_func(
    mask: torch.Tensor, token_loss: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """What the loss function returns of one microbatch, with `calculate_per_token_loss` on."""
    total, count = (token_loss * mask).sum(), mask.sum()
    return total, count, {"lm loss": torch.stack([total.detach(), count])}


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
