"""The grid's first rank is taken to be rank 0.

Expected: Subtract the offset first
"""


def coordinates(self, rank):
    position = {}
    for word in self.order.split("-"):
        rank, position[word] = divmod(rank, self.name_to_size[word])
    return position


def get_ranks(self, token):
    groups = {}
    for rank in range(self.world_size):
        key = tuple(n for w, n in coordinates(self, rank).items() if w not in token.split("-"))
        groups.setdefault(key, []).append(rank + self.rank_offset)
    return list(groups.values())
