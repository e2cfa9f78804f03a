"""Keys and values in one tensor, and each block's gradients by autograd."""

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
    """Which of its queries a rank lets see which of the keys that it has at a step."""
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
    coming = torch.stack([key, value])
    output, lse = torch.zeros_like(query), query.new_full(query.shape[:2], -torch.inf)
    n = query.size(1)
    for step in range(ring.size):
        here = coming
        handle = ring.pass_on(here) if step + 1 < ring.size else None
        rows, columns, is_causal = block_of_step(step, ring.rank, ring.size, n)
        part = attend(query[:, rows], here[0][:, columns], here[1][:, columns], scale, is_causal)
        output[:, rows], lse[:, rows] = merge(output[:, rows], lse[:, rows], *part)
        if handle:
            (coming,) = handle.wait()
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
    buffer = torch.cat([key.clone(), value], dim=2)
    d = key.size(2)
    of_query, of_both = torch.zeros_like(query), torch.zeros_like(buffer)
    for step in range(ring.size):
        coming = ring.pass_on(buffer) if step + 1 < ring.size else None
        rows, columns, is_causal = block_of_step(step, ring.rank, ring.size, query.size(1))
        with torch.enable_grad():
            q = query[:, rows].detach().requires_grad_()
            k, v = (
                x[:, columns].detach().requires_grad_() for x in (buffer[..., :d], buffer[..., d:])
            )
            part, part_lse = attend(q, k, v, scale, is_causal)
        # This block's share of the softmax over all keys, and what its own softmax does not know.
        share = torch.exp(part_lse - lse[:, rows]).detach()
        grad = grad_output[:, rows] * share.unsqueeze(2)
        of_lse = share * (grad_output[:, rows] * (part.detach() - output[:, rows])).sum(dim=2)
        terms = torch.autograd.grad([part, part_lse], [q, k, v], [grad, of_lse])
        of_query[:, rows] += terms[0]
        of_both[:, columns] += torch.cat(terms[1:], dim=2)
        (of_both,) = ring.pass_on(of_both).wait()
        if coming:
            buffer.copy_(coming.wait()[0])
    return of_query, of_both[..., :d].contiguous(), of_both[..., d:].contiguous()


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
