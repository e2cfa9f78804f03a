"""GRPO's loss: four functions between the model's logits and what the schedule is given.

Started by: you, and `minimegatron exercises check`. The model has answered prompts, and each answer
got a reward. Write what a microbatch is made of: log-probabilities, advantages, the loss of each token,
and what the loss function returns. The check works out values and gradients on its own.

    tokens       [b, s], int64: prompt, answer, padding
    answer_mask  [b, s]: 1.0 at each token of an answer, its end-of-sequence token too; 0.0 elsewhere
    logits       [b, s, v]: those at position i were computed from tokens 0 to i
"""

import torch


def answer_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, answer_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each token that was predicted, and which of them are an answer's.

    Returns two tensors [b, s - 1]; entry i of both is of token i + 1.
    """
    raise NotImplementedError("Write answer_logprobs: which logits predicted token i + 1?")


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """How much better each answer is than the others to the same prompt.

    (r - mean) / (1e-4 + std), with the mean and the population standard deviation of its group.

    Args:
        rewards: float [b]; the answers to one prompt are `group_size` rows that follow each other.

    Returns [b].
    """
    raise NotImplementedError("Write group_advantages: one mean and one deviation for each group")


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
    """The loss of each token, before any mask or mean.

    With ratio = exp(current - old) and difference = ref - current:

        loss = - weight * min(ratio * A, clip(ratio, 1 - eps_lower, 1 + eps_upper) * A)
               + kl_beta * (exp(difference) - difference - 1)
               - entropy_weight * (- exp(current) * current)

    weight is min(exp(old - inference), cap), or 1 without `inference`.

    Args:
        current, old, ref, inference: log-probabilities [b, s - 1]; only `current` has a gradient.
        advantages: A, [b], one for each row.

    Returns [b, s - 1].
    """
    raise NotImplementedError("Write grpo_token_loss: the formula, term by term")


def loss_func(
    mask: torch.Tensor, token_loss: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """What the loss function returns of one microbatch, with `calculate_per_token_loss` on.

    Args:
        mask: [b, s - 1], 1.0 where a token counts. There may be none.
        token_loss: [b, s - 1], with a graph.

    Returns (the sum over tokens that count; their number, a tensor; a report for the log). The report
    is {"lm loss": the tensor [sum, number]}, without a graph.
    """
    raise NotImplementedError("Write loss_func: a sum, a number, a report; nothing is divided")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
