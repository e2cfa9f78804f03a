"""A ring of attention, solved.

The forward keeps one number per query, its lse, and it is enough: from it any block's probabilities can
be computed again, in any later round, on its own.
"""

from typing import Any

import torch


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some queries attend to some keys, as if there were no others."""
    scores = query @ key.transpose(1, 2) * scale
    if is_causal:
        is_later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -torch.inf)
    lse = torch.logsumexp(scores, dim=2)
    return torch.exp(scores - lse.unsqueeze(2)) @ value, lse


def merge(
    output: torch.Tensor, lse: torch.Tensor, output2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results of `attend`, for the same queries and two sets of keys, as one for all these keys."""
    total = torch.logaddexp(lse, lse2)
    # -inf less -inf is nan. Where nothing was seen, any finite number makes both weights 0.
    finite = total.masked_fill(total == -torch.inf, 0.0)
    weight = torch.exp(lse - finite).unsqueeze(2)
    weight2 = torch.exp(lse2 - finite).unsqueeze(2)
    return output * weight + output2 * weight2, total


def block_of_step(step: int, rank: int, size: int, num_tokens: int) -> tuple[slice, slice, bool]:
    """Which of its queries a rank lets see which of the keys that it has in a round."""
    source, half = (rank - step) % size, num_tokens // 2
    everything = slice(0, num_tokens)
    if source == rank:
        return everything, everything, True
    if source < rank:
        return everything, slice(0, half), False
    return slice(half, num_tokens), everything, False


def ring_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, ring: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to all tokens before them, wherever these are."""
    output = torch.zeros_like(query)
    lse = query.new_full(query.shape[:2], -torch.inf)
    for step in range(ring.size):
        is_last = step == ring.size - 1
        coming = None if is_last else ring.pass_on(key, value)
        rows, columns, is_causal = block_of_step(step, ring.rank, ring.size, query.size(1))
        part = attend(query[:, rows], key[:, columns], value[:, columns], scale, is_causal)
        output[:, rows], lse[:, rows] = merge(output[:, rows], lse[:, rows], *part)
        if not is_last:
            key, value = coming.wait()
    return output, lse


def ring_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    ring: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's query, key and value; other ranks have seen its keys, too."""
    delta = (grad_output * output).sum(dim=2)
    of_query = torch.zeros_like(query)
    of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
    for step in range(ring.size):
        is_last = step == ring.size - 1
        coming = None if is_last else ring.pass_on(key, value)
        rows, columns, is_causal = block_of_step(step, ring.rank, ring.size, query.size(1))
        q, grad, k, v = query[:, rows], grad_output[:, rows], key[:, columns], value[:, columns]
        probs = torch.exp(q @ k.transpose(1, 2) * scale - lse[:, rows].unsqueeze(2))
        if is_causal:
            probs = probs.tril()
        of_scores = probs * (grad @ v.transpose(1, 2) - delta[:, rows].unsqueeze(2)) * scale
        of_query[:, rows] += of_scores @ k
        of_key[:, columns] += of_scores.transpose(1, 2) @ q
        of_value[:, columns] += probs.transpose(1, 2) @ grad
        # Also after the last round: the keys that are here belong to the next rank.
        of_key, of_value = ring.pass_on(of_key, of_value).wait()
        if not is_last:
            key, value = coming.wait()
    return of_query, of_key, of_value


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
