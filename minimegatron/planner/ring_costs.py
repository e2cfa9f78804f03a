"""How long the attention of one layer takes on a ring of ranks: blocks, and hops beside them.

Counterpart: none in Megatron, which leaves attention over ranks to Transformer Engine.

The c ranks of a ring have one block of keys and values each. In c rounds each rank computes with one
block after the other, its own first; a hop brings the next one from the rank before while this one is
computed. With the split of `zigzag` every block is as much work as any other, but for half a chunk's
diagonal (`context_costs.pairs_of_tokens`).

| round | forward, beside the block | backward, beside the block                             |
|-------|---------------------------|--------------------------------------------------------|
| 0     | next keys and values      | next keys and values                                   |
| 1 ... | next keys and values      | this block's gradients so far; next keys and values    |
| c - 1 | nothing                   | this block's gradients so far                          |
| after |                           | gradients go home; nothing is beside                   |

So forward c - 1 hops; backward c - 1 of keys and values, and c of gradients. All ranks do each round
at the same time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minimegatron.planner.actions import FORWARD, Time

BLOCK, HOP, GRADIENT_HOP, HOME = "block", "kv", "dkv", "dkv home"
"""Names of the parts: those of hops say what moves."""
HOPS = (HOP, GRADIENT_HOP, HOME)


@dataclass(frozen=True)
class RingCosts:
    """What the attention of one layer costs over `num_ranks` ranks.

    Raises ValueError for less than one rank, and for a negative time.
    """

    num_ranks: int
    block: Time
    """Of one block of keys and values, forward."""
    hop: Time = 0
    """Of one hop of keys and values, or of their gradients."""
    backward: Time = 2
    """A block's backward over its forward."""
    in_order: bool = False
    """The rank that has the last of c chunks in order. It sees every block but its own whole, which is
    twice the pairs of tokens; the others wait for it."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"a ring has {self.num_ranks} ranks; give 1 or more")
        for name in ("block", "hop", "backward"):
            time = getattr(self, name)
            if not time >= 0:
                raise ValueError(
                    f"{name} of a ring takes {time}, which is negative; give 0 or more"
                )


def ring_parts(ring: RingCosts, kind: str) -> Iterator[tuple[str, Time]]:
    """(name, length) of the ring's parts in the order of a program, forward or backward.

    Hops run beside the `BLOCK` after them, one after the other; nothing runs beside `HOME`.

    >>> list(ring_parts(RingCosts(2, 10, 3), FORWARD))
    [('kv', 3), ('block', 10), ('block', 10)]
    >>> list(ring_parts(RingCosts(2, 10, 3), "backward"))
    [('kv', 3), ('block', 20), ('dkv', 3), ('block', 20), ('dkv home', 3)]
    """
    last = ring.num_ranks - 1
    is_forward = kind == FORWARD
    for step in range(ring.num_ranks):
        if step > 0 and not is_forward:
            yield GRADIENT_HOP, ring.hop
        if step < last:
            yield HOP, ring.hop
        block = ring.block * (2 if ring.in_order and step else 1)
        yield BLOCK, block if is_forward else block * ring.backward
    if not is_forward and last:
        yield HOME, ring.hop
