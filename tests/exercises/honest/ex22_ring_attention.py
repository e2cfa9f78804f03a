"""A ring of attention, with masks of positions and everything travelling together."""

import torch


def attend(query, key, value, scale, is_causal=False):
    scores = query @ key.transpose(1, 2) * scale
    if is_causal:
        is_later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -torch.inf)
    lse = torch.logsumexp(scores, dim=2)
    return torch.exp(scores - lse.unsqueeze(2)) @ value, lse


def merge(output, lse, output2, lse2):
    both = torch.stack([lse, lse2])
    largest = both.max(dim=0).values
    # where nothing was seen the largest is -inf: exp of nan is avoided by any other number
    shift = torch.nan_to_num(largest, neginf=0.0)
    powers = torch.exp(both - shift)
    total = powers.sum(dim=0)
    shares = powers / torch.where(total == 0, torch.ones_like(total), total)
    outputs = torch.stack([output, output2])
    return (shares.unsqueeze(-1) * outputs).sum(dim=0), torch.log(total) + shift


def block_of_step(step, rank, size, num_tokens):
    j = rank - step
    half = num_tokens // 2
    if step == 0:
        return slice(None), slice(None), True
    if j >= 0:
        return slice(None), slice(None, half), 0
    return slice(half, None), slice(None), False


def ring_forward(query, key, value, scale, ring):
    coming = ring.pass_on(key, value)
    output, lse = attend(query, key, value, scale, is_causal=True)
    for step in range(1, ring.size):
        key, value = coming.wait()
        # one hop more than needed at the end: what comes are this rank's own keys
        coming = ring.pass_on(key, value)
        queries, keys, causal = block_of_step(step, ring.rank, ring.size, query.shape[1])
        # rows that see nothing at this step: output 0, lse -inf
        part, part_lse = torch.zeros_like(output), torch.full_like(lse, -torch.inf)
        part[:, queries], part_lse[:, queries] = attend(
            query[:, queries], key[:, keys], value[:, keys], scale, causal
        )
        output, lse = merge(output, lse, part, part_lse)
    coming.wait()
    return output, lse


def ring_backward(grad_output, query, key, value, output, lse, scale, ring):
    D = torch.einsum("aqd,aqd->aq", grad_output, output)
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    for step in range(ring.size):
        queries, keys, causal = block_of_step(step, ring.rank, ring.size, query.shape[1])
        coming = ring.pass_on(key, value)
        S = torch.einsum("aqd,akd->aqk", query[:, queries], key[:, keys]) * scale
        P = torch.exp(S - lse[:, queries, None])
        if causal:
            P = torch.tril(P)
        dP = torch.einsum("aqd,akd->aqk", grad_output[:, queries], value[:, keys])
        dS = P * (dP - D[:, queries, None]) * scale
        dq[:, queries] += dS @ key[:, keys]
        dk[:, keys] += dS.mT @ query[:, queries]
        dv[:, keys] += P.mT @ grad_output[:, queries]
        # keys and values come home, too: not needed, but simpler than an if
        key, value = coming.wait()
        dk, dv = ring.pass_on(dk, dv).wait()
    return dq, dk, dv


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
