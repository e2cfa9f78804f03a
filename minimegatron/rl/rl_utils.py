"""GRPO in formulas: log-probabilities of tokens, advantages of answers, the loss of each token.

Counterpart: `megatron.rl.rl_utils`, same names (Shao et al. 2024, https://arxiv.org/abs/2402.03300).

Rows are [b, s] tokens; what belongs to a token that was predicted is [b, s - 1]: entry i is of token
i + 1, which the model predicts after reading tokens 0 to i.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch

from minimegatron.core import parallel_state
from minimegatron.core.tensor_parallel import gather_from_sequence_parallel_region
from minimegatron.core.transformer.zigzag import positions_of_rank, take_part
from minimegatron.core.utils import get_attr_wrapped_model
from minimegatron.training.global_vars import get_args

# -- Log-probabilities --


def selective_log_softmax(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """log softmax(logits) at `index`: [..., v] and int64 [...] -> [...], of the logits' dtype.

    >>> selective_log_softmax(torch.zeros(2, 4), torch.tensor([0, 3])).exp()
    tensor([0.2500, 0.2500])
    """
    chosen = index.unsqueeze(-1)
    if logits.dtype in (torch.float16, torch.bfloat16):
        # The difference below would lose most digits of 8.
        return logits.log_softmax(dim=-1).gather(-1, chosen).squeeze(-1)
    return logits.gather(-1, chosen).squeeze(-1) - torch.logsumexp(logits, dim=-1)


def gather_sequence(tensor: torch.Tensor, sums_gradients: bool = True) -> torch.Tensor:
    """From each context-parallel rank's part, [b, s/c, ...], the whole [b, s, ...] on all of them.

    Backward, a rank's part gets the sum of what the c ranks have computed for it, c times as much as
    one of them has if all compute the same; or, without `sums_gradients`, what this rank has.
    """
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return tensor
    in_order_of_ranks = gather_from_sequence_parallel_region(
        tensor.transpose(0, 1).contiguous(), tensor_parallel_output_grad=sums_gradients, group=group
    )
    length = in_order_of_ranks.size(0)
    places = [positions_of_rank(length, rank, group.size()) for rank in range(group.size())]
    back = torch.cat(places).argsort().to(tensor.device)
    return in_order_of_ranks[back].transpose(0, 1)


def get_logprobs(
    model: torch.nn.Module, tokens: torch.Tensor, position_ids: torch.Tensor, no_grad: bool = False
) -> torch.Tensor:
    """One chunk's forward: on the last one the log-probability of each token but the first, [b, s - 1].

    Other chunks return their hidden states, for the next stage.

    Args:
        tokens, position_ids: int64 [b, s]; whole rows also where ranks share sequences.
        no_grad: for scores; otherwise autograd records.

    The logits are divided by `--rl-default-temperature`, as they were when the tokens were drawn, and
    padding of the vocabulary does not count. (Megatron: neither.) float32, or float64 for a float64
    model. Where ranks share sequences, gradients are summed over them: see `gather_sequence`.
    """
    args, group = get_args(), parallel_state.get_context_parallel_group()
    with torch.no_grad() if no_grad else nullcontext():
        parts = (take_part(tokens, 1, group), take_part(position_ids, 1, group))
        output = model(*parts, None, runtime_gather_output=True)
        if not get_attr_wrapped_model(model, "post_process"):
            return output
        logits = output[..., : args.unpadded_vocab_size] / args.rl_default_temperature
        if logits.dtype != torch.float64:
            logits = logits.float()
        following = take_part(tokens.roll(-1, dims=1), 1, group)
        # The last token of a row is followed by nothing, hence [:, :-1].
        return gather_sequence(selective_log_softmax(logits, following))[:, :-1]


def logprobs_forward_step(
    data_iterator: Iterator, model: torch.nn.Module
) -> tuple[torch.Tensor, None]:
    """A `forward_step_func` for scores: without a loss function, the schedule returns what it computes.

    The iterator gives (tokens, position_ids).
    """
    tokens, position_ids = next(data_iterator)
    return get_logprobs(model, tokens, position_ids, no_grad=True), None


# -- Advantages --


def calculate_grpo_advantages(
    rewards: list[list[float]], num_turns: list[list[int]]
) -> list[float]:
    """How much better each answer is than the others to the same prompt, in standard deviations.

    (r - mean of its group) / (1e-4 + the group's population standard deviation), in order; an answer
    of several turns has one advantage for each of them.

    Args:
        rewards: of each group, those of its answers.
        num_turns: how many turns each answer has: 1, where the model is not spoken to again.

    Raises ValueError for a group of one, which has nothing to be compared with.

    >>> [round(a, 3) for a in calculate_grpo_advantages([[0.0, 1.0], [1.0, 1.0]], [[1, 2], [1, 1]])]
    [-1.0, 1.0, 1.0, 0.0, 0.0]
    """
    advantages = []
    for group, turns in zip(rewards, num_turns, strict=True):
        if len(group) < 2:
            raise ValueError(
                f"a group has {len(group)} answer, whose advantage over its group is always 0; give 2 "
                "answers or more to each prompt"
            )
        values = torch.tensor(group, dtype=torch.float64)
        found = (values - values.mean()) / (1e-4 + values.std(correction=0))
        advantages += found.repeat_interleave(torch.tensor(turns)).tolist()
    return advantages


# -- The loss --


def calculate_grpo_loss(
    current_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clamp_eps_lower: float,
    clamp_eps_upper: float,
    kl_beta: float,
    entropy_weight: float,
    inference_logprobs: torch.Tensor | None = None,
    is_truncation_coef: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """The loss of each token, before any mask or mean, and what is logged of it.

    With ratio = exp(current - old) and difference = reference - current:

        loss = - weight * min(ratio * A, clip(ratio, 1 - lower, 1 + upper) * A)
               + beta * (exp(difference) - difference - 1)
               - entropy weight * (- exp(current) * current)

    Args:
        current_logprobs: [b, s - 1], of the model that is trained; the one argument with a gradient.
        old_logprobs: [b, s - 1], of the model that answered.
        ref_logprobs: [b, s - 1], of the model that training began with.
        advantages: [b], one for each row.
        clamp_eps_lower, clamp_eps_upper: how far the ratio may leave 1 and still be rewarded for it.
        kl_beta: weight of the estimate of KL(current || reference) called k3 (Schulman 2020).
        entropy_weight: weight of the drawn token's term of the entropy.
        inference_logprobs: [b, s - 1], what the answering program itself reported; with it, each token
            is weighted by exp(old - inference), at most `is_truncation_coef`. None for no weights.

    Returns six tensors [b, s - 1]: the loss, the KL term, the ratios, the entropy term, and where the
    ratio was above and below its bounds.

    Raises ValueError where log-probabilities have other shapes than each other, or advantages are not
    one for each row. (Megatron warns, and broadcasts.)
    """
    shape = current_logprobs.shape
    for name, given in (("old", old_logprobs), ("ref", ref_logprobs)):
        if given.shape != shape:
            raise ValueError(
                f"{name}_logprobs are {list(given.shape)}, but current_logprobs {list(shape)}; give "
                "one for the same tokens"
            )
    if advantages.shape != shape[:1]:
        raise ValueError(
            f"advantages are {list(advantages.shape)} for log-probabilities {list(shape)}; give one "
            f"for each of the {shape[0]} rows"
        )
    advantages = advantages.unsqueeze(-1)
    ratios = (current_logprobs - old_logprobs).exp()
    clipped = ratios.clamp(1 - clamp_eps_lower, 1 + clamp_eps_upper)
    difference = ref_logprobs - current_logprobs
    kl_term = difference.exp() - difference - 1
    entropy_term = -current_logprobs.exp() * current_logprobs
    weights = 1.0
    if inference_logprobs is not None:
        largest = math.inf if is_truncation_coef is None else is_truncation_coef
        weights = (old_logprobs - inference_logprobs).exp().clamp(max=largest)
    loss = (
        -weights * torch.minimum(ratios * advantages, clipped * advantages)
        + kl_beta * kl_term
        - entropy_weight * entropy_term
    )
    is_above, is_below = ratios > 1 + clamp_eps_upper, ratios < 1 - clamp_eps_lower
    return loss, kl_term, ratios, entropy_term, is_above, is_below
