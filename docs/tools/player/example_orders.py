"""Orders that a reader may start from in "Edit the Python": work alone, without its messages.

Run by: `in_browser`, in the page and in tests/docs, each as a file of its own, which `browser_python`
makes. Nothing imports this one: that would register its names.
"""

from collections.abc import Iterator

from minimegatron.core.orders.orders import Rank, register_order
from minimegatron.core.orders.placement import V
from minimegatron.core.orders.work import Work, pair


@register_order("zb-h1")
def zb_h1(rank: Rank) -> Iterator[Work]:
    """1F1B with a split backward: rank r owes up to r weight gradients.

    The input gradient leaves sooner; weight gradients fill what was idle. Each rank holds as many
    microbatches as rank 0 of 1F1B.
    Source: Qi et al. 2023 (arXiv:2401.10241), section 3.1.
    """
    p, r, M = rank.pp_size, rank.pp_rank, rank.num_microbatches
    num_warmup = min(p - 1 - r, M)
    for i in range(num_warmup):
        yield rank.forward(i)
    for i in range(M):
        if num_warmup + i < M:
            yield rank.forward(num_warmup + i)
        yield rank.backward_input(i)
        if i >= r:
            yield rank.backward_weight(i - r)
    for i in range(max(M - r, 0), M):
        yield rank.backward_weight(i)


@register_order("folded-1f1b", placement=V)
def folded(rank: Rank) -> Iterator[Work]:
    """1F1B over a V: chunk 0 on the way down the ranks, chunk 1 on the way up.

    Rank 0 has the first stage and the last, and ranks hold alike. The turns are those of ZB-V with
    whole backwards: Qi et al. 2024 (arXiv:2405.15362).
    """
    p, r, M = rank.pp_size, rank.pp_rank, rank.num_microbatches
    n = max(M, 2 * p - 1)  # as many as the turns need; what does not exist is left out
    # F and B: forward and backward of chunk 0; f and b: of chunk 1.
    turns = "F" * (2 * (p - r) - 1) + "fF" * r + "fb" * (p - r)
    turns += "FBfb" * (n - 2 * p + r + 1) + "Bfb" * (p - r - 1)
    turns += "Bb" * r + "B" * (p - r)
    done = dict.fromkeys("FfBb", 0)
    for turn in turns:
        i, chunk = done[turn], int(turn.islower())
        done[turn] += 1
        if i < M:
            yield rank.forward(i, chunk) if turn in "Ff" else rank.backward(i, chunk)


@register_order("1f1b-pairs")
def pairs(rank: Rank) -> Iterator[Work]:
    """1F1B whose forward and backward of a turn run together, so that one may hide the other's waits.

    Neither of a pair may need the other, so the next stage's pair is a turn away in both directions:
    the warm-up is twice as long, and a rank holds twice as many microbatches.
    """
    p, r, M = rank.pp_size, rank.pp_rank, rank.num_microbatches
    num_warmup = min(2 * (p - 1 - r) + 1, M)
    for i in range(num_warmup):
        yield rank.forward(i)
    for i in range(M - num_warmup):
        yield pair(rank.forward(num_warmup + i), rank.backward(i))
    for i in range(M - num_warmup, M):
        yield rank.backward(i)
