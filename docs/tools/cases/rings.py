"""What the page on context parallelism shows: pairs of tokens by rank, the ring's rounds, what is sent.

Called by: `cases`, where pages find it as `rings`. Calls: the package's split and attention, and
`sequence_pictures`. The ranks of a ring are computed here one after the other.
"""

from collections.abc import Sequence
from fractions import Fraction

import torch

from cases.case_words import size_words, table
from cases.layers import picture_of_lanes
from minimegatron.core.transformer.activation_config import COMM_TYPES
from minimegatron.core.transformer.context_parallel import block_attention, block_of, merge
from minimegatron.core.transformer.zigzag import chunks_of_rank, positions_of_rank
from minimegatron.planner.context_costs import SentBytes, context_parallel_bytes
from minimegatron.planner.layer_plan import LayerCosts, LayerTimeline, one_stage
from minimegatron.planner.plan_report import number_words
from minimegatron.planner.render_layers import render_layers
from minimegatron.planner.ring_costs import RingCosts
from pictures import sequence_pictures
from source.places import RECORDINGS, read_json

C, LENGTH = 4, 32
"""Ranks and tokens of the page's case."""


# -- Who has which tokens --


def contiguous(length: int, rank: int, c: int) -> torch.Tensor:
    """The positions of a rank, were the sequence cut into c pieces."""
    return torch.arange(length).chunk(c)[rank]


def num_pairs(positions: torch.Tensor) -> int:
    """Pairs that causal attention computes for the queries at these positions: each sees itself too."""
    return int((positions + 1).sum())


def zigzag_pairs(length: int = LENGTH, c: int = C) -> list[int]:
    return [num_pairs(positions_of_rank(length, rank, c)) for rank in range(c)]


def contiguous_pairs(length: int = LENGTH, c: int = C) -> list[int]:
    return [num_pairs(contiguous(length, rank, c)) for rank in range(c)]


def pairs_figure(length: int = LENGTH, c: int = C) -> str:
    """The triangle of pairs under both cuts; below, how many pairs each rank computes."""
    zigzag = [0] * (2 * c)
    for rank in range(c):
        for chunk in chunks_of_rank(rank, c):
            zigzag[chunk] = rank
    plain = [chunk // 2 for chunk in range(2 * c)]
    return sequence_pictures.pairs(
        [
            ("contiguous", plain, contiguous_pairs(length, c)),
            ("zig-zag", zigzag, zigzag_pairs(length, c)),
        ]
    )


def tokens_words(length: int, rank: int, c: int) -> str:
    """
    >>> tokens_words(16, 0, 2), tokens_words(24, 1, 2)
    ('0–3 and 12–15', '6–11 and 12–17')
    """
    chunks = positions_of_rank(length, rank, c).chunk(2)
    return " and ".join(f"{chunk[0]}–{chunk[-1]}" for chunk in chunks)


# -- The rounds of the ring --


def holder(rank: int, step: int, c: int) -> int:
    """Whose keys and values a rank has in a round, after as many hops: in round 0 its own."""
    return (rank - step) % c


def blocks(rank: int, owner: int) -> list[sequence_pictures.Block]:
    """What a rank computes with an owner's keys, by pieces: rows of queries, columns of keys."""
    block = block_of(rank, owner, 2)
    found = []
    for row in range(2)[block.rows]:
        for column in range(2)[block.columns]:
            if not block.causal or column < row:
                found.append((row, column, sequence_pictures.FULL))
            elif column == row:
                found.append((row, column, sequence_pictures.HALF))
    return found


def steps_figure(c: int = C) -> str:
    """What each rank computes in each round of the ring."""
    steps = [
        [(holder(rank, step, c), blocks(rank, holder(rank, step, c))) for step in range(c)]
        for rank in range(c)
    ]
    return sequence_pictures.ring_steps([chunks_of_rank(rank, c) for rank in range(c)], steps)


def lanes(block: int, hop: int, c: int = C) -> LayerTimeline:
    """One attention, forward and backward. Blocks and hops take time; nothing else does."""
    ring = RingCosts(c, Fraction(block), Fraction(hop))
    layer = LayerCosts(attention=Fraction(0), mlp=Fraction(0), ring=ring)
    return one_stage(1, [layer], joined=True)


def lanes_figure(times: Sequence[tuple[int, int]] = ((2, 1), (2, 3)), c: int = C) -> str:
    """Blocks above, hops below, for times (block, hop)."""
    rows = [(f"hop {hop}", lanes(block, hop, c)) for block, hop in times]
    return picture_of_lanes(render_layers(rows, f"An attention on a ring of {c} ranks"))


def exposed(block: int, hop: int, c: int = C) -> str:
    """Time in which a hop is under way and nothing is computed."""
    return number_words(lanes(block, hop, c).exposed)


def recorded() -> tuple[str, str]:
    """Of the first rank of the recorded ring: how long hops were under way, and waited for."""
    recording = read_json(RECORDINGS / "ring.json")
    flights = recording["steps"][0]["ranks"][0]["flights"]
    under_way, waited = (sum(one[key] for one in flights) / 1000 for key in ("l", "w"))
    return f"{under_way:.3g} ms", f"{waited:.2g} ms"


# -- Two softmaxes become one --


def _part(scores: Sequence[float], values: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one query that has these scores: (output, lse)."""
    key, value = (torch.tensor(x, dtype=torch.float64).view(-1, 1) for x in (scores, values))
    return block_attention(torch.ones(1, 1, dtype=torch.float64), key, value, scale=1.0)


def _words(part: tuple[torch.Tensor, torch.Tensor]) -> tuple[str, str]:
    return tuple(f"{float(x):.4g}" for x in part)


def part_words(scores: Sequence[float], values: Sequence[float]) -> str:
    """
    >>> part_words([1, 1], [0, 2])
    'o = 1 and l = 1.693'
    """
    output, lse = _words(_part(scores, values))
    return f"o = {output} and l = {lse}"


def merged_words(
    scores: Sequence[float],
    values: Sequence[float],
    others: Sequence[float],
    other_values: Sequence[float],
) -> str:
    merged = merge(*_part(scores, values), *_part(others, other_values))
    output, lse = _words(merged)
    return f"o = {output} and l = {lse}"


HERE, THERE = ((2.0, 1.0), (1.0, 2.0)), ((3.0, 0.0), (3.0, 4.0))
"""Scores and values of one query, for the keys of two ranks."""


def merge_table() -> str:
    """Two parts, what they merge to, and one softmax over all; the mean of the outputs is wrong."""
    parts = [_part(*HERE), _part(*THERE)]
    whole = _part(HERE[0] + THERE[0], HERE[1] + THERE[1])
    names = ("keys of this rank", "keys of the next", "**merged**", "all keys at once")
    rows = []
    for name, (scores, values), part in zip(
        names,
        (HERE, THERE, ("", ""), (HERE[0] + THERE[0], HERE[1] + THERE[1])),
        (*parts, merge(*parts[0], *parts[1]), whole),
        strict=True,
    ):
        rows.append(
            [name, *(", ".join(f"{x:g}" for x in xs) for xs in (scores, values)), *_words(part)]
        )
    mean = (parts[0][0] + parts[1][0]) / 2
    rows.append(["mean of both outputs", "", "", f"{float(mean):.4g}, wrong", ""])
    return table(["", "scores", "values", "output o", "l"], rows)


# -- What is sent --


def sent_bytes(way: str, c: int, tokens: int, heads: int, groups: int, head_dim: int) -> SentBytes:
    """In bf16, by one rank for a layer and a microbatch of so many tokens; t is 1."""
    return context_parallel_bytes(way, tokens, 1, heads, groups, head_dim, c)


def volume_table(
    c: int = 4, tokens: int = 8192, heads: int = 32, all_groups: Sequence[int] = (32, 8)
) -> str:
    """MiB that a rank sends for a layer and a microbatch, by way and number of groups."""
    rows = []
    for way in COMM_TYPES:
        cells = [
            f"{size / 2**20:g}"
            for groups in all_groups
            for size in sent_bytes(way, c, tokens, heads, groups, 128)
        ]
        rows.append([f"`{way}`", *cells])
    head = ["MiB"]
    for groups in all_groups:
        head += [f"forward, g = {groups}", f"backward, g = {groups}"]
    return table(head, rows)


def sent_words(way: str, c: int, tokens: int, heads: int, groups: int, head_dim: int) -> str:
    """What goes out in the forward."""
    return size_words(sent_bytes(way, c, tokens, heads, groups, head_dim).forward)


def groups_for_ring(c: int, heads: int) -> int:
    """The most groups that divide the heads and with which a ring's forward sends less than a2a."""
    return max(
        groups
        for groups in range(1, heads + 1)
        if heads % groups == 0
        and sent_bytes("p2p", c, 2 * c, heads, groups, 1).forward
        < sent_bytes("a2a", c, 2 * c, heads, groups, 1).forward
    )
