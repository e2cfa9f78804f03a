"""Groups of places within a group are returned, as if every group began at rank 0.

Expected: every rank is in exactly one group of each kind
"""

from math import prod


def coordinates(self, rank):
    rest = rank - self.rank_offset
    position = {}
    for word in self.order.split("-"):
        rest, position[word] = divmod(rest, self.name_to_size[word])
    return position


def get_ranks(self, token):
    size = prod(self.name_to_size[word] for word in token.split("-"))
    first = self.rank_offset
    return [list(range(first, first + size)) for _ in range(self.world_size // size)]
