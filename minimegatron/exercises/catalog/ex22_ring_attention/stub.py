"""A ring of attention: a sequence is cut over ranks, and keys and values travel from rank to rank.

Started by: you, and `minimegatron exercises check`. No rank ever holds all keys. A rank attends to
those that it has, passes them on, attends to those that come, and puts the results together.

    c               ranks that share a sequence of s tokens; n = s / c tokens on each
    [a, n, d]       queries, keys, values: a heads, n tokens, d numbers
    lse [a, n]      for each query, log of the sum of exp(score) over all keys that it has seen so far;
                    -inf if it has seen none

The sequence is cut into 2c pieces. Rank r has piece r and then piece 2c - 1 - r, one from the front and
one from the back: with c = 2 and s = 16, rank 0 has tokens 0-3 and 12-15, rank 1 has 4-7 and 8-11. A
token sees itself and all tokens before it.

    ring.rank, ring.size              r and c
    handle = ring.pass_on(x, y, ...)  sends tensors to rank (r + 1) mod c, while those of rank
                                      (r - 1) mod c come. Leave them as they are until `wait`; more
                                      may be on their way meanwhile. Every rank calls it equally
                                      often, with tensors of the same shapes.
    x, y, ... = handle.wait()         waits for what comes: new tensors
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
    """Some queries attend to some keys, as if there were no others. Given: nothing to write here.

    Args:
        query: [a, q, d].
        key, value: [a, k, d].
        scale: what scores are multiplied by.
        is_causal: query i sees keys 0 to i only; else it sees all.

    Returns (output [a, q, d], lse [a, q]).
    """
    scores = query @ key.transpose(1, 2) * scale
    if is_causal:
        is_later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -torch.inf)
    lse = torch.logsumexp(scores, dim=2)
    return torch.exp(scores - lse.unsqueeze(2)) @ value, lse


def merge(
    output: torch.Tensor, lse: torch.Tensor, output2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results of `attend`, for the same queries and two sets of keys, as one for all these keys.

    Each output [a, q, d] is divided by its own sum already. With l = log(exp(lse) + exp(lse2)) the
    first counts exp(lse - l), the second exp(lse2 - l). An lse may be 1000 or -1000, where exp gives
    inf or 0. It is -inf, and the output 0, for a query that has seen no key on that side. If it has
    seen none on either, the result is output 0 and lse -inf.

    Returns (output, lse); what was given stays as it is.
    """
    raise NotImplementedError("Write merge: a common lse, and two weights")


def block_of_step(step: int, rank: int, size: int, num_tokens: int) -> tuple[slice, slice, bool]:
    """Which of its queries a rank lets see which of the keys that it has in a round.

    In round i rank r has the keys of rank (r - i) mod c; in round 0 they are its own. All pairs of the
    block are computed, so it holds those that a query sees, and no others. A mask is needed for a
    rank's own keys only.

    Args:
        step: the round i, from 0 to size - 1.
        rank, size: r and c.
        num_tokens: n, on every rank.

    Returns (queries, keys, is_causal): two slices of 0 to n, and the last argument of `attend`.
    """
    raise NotImplementedError("Write block_of_step: three cases")


def ring_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, ring: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to all tokens before them, wherever these are.

    While keys and values are on their way, a block is computed: one block hides each hop. Blocks have
    the pairs of `block_of_step`, and no others. What was given stays as it is.
    Returns (output [a, n, d], lse [a, n]).
    """
    raise NotImplementedError("Write ring_forward: pass on, attend, merge")


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
    """Gradients of this rank's query, key and value; other ranks' queries have seen its keys, too.

    Blocks hide the hops of keys and values here, too; they need not hide those of gradients. What
    was given stays as it is.

    `output` and `lse` are what `ring_forward` returned on this rank. For a block of pairs, with S its
    scaled scores (-inf where a query may not look), dO the gradient of the output O, and i a query:

        D[i]  = sum over d of dO[i] * O[i]
        P     = exp(S - lse)                    dV = P^T dO
        dS    = P * (dO V^T - D) * scale        dQ = dS K,   dK = dS^T Q

    Returns (of query, of key, of value), each [a, n, d].
    """
    raise NotImplementedError(
        "Write ring_backward: the ring once more, and gradients travel with it"
    )


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
