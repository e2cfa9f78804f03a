"""Every group is taken to be ranks with neighbouring numbers, as the tensor group happens to be.

Expected: may differ in dp only
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
    ranks = list(range(self.rank_offset, self.rank_offset + self.world_size))
    return [ranks[i : i + size] for i in range(0, len(ranks), size)]
