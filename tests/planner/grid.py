"""The configurations that the planner's tests go through."""

from collections.abc import Iterator

MOST_STAGES, MOST_CHUNKS, MOST_MICROBATCHES = 8, 4, 32


def is_legal(p: int, M: int, G: int) -> bool:
    """May interleaving run M microbatches in groups of G on p stages?"""
    remainder = M % G
    return p <= G <= M and (remainder == 0 or remainder >= p)


def legal_groups(p: int, most_microbatches: int) -> Iterator[tuple[int, int]]:
    """Every legal (microbatches, group size) on p stages."""
    for M in range(1, most_microbatches + 1):
        for G in range(1, M + 1):
            if is_legal(p, M, G):
                yield M, G
