"""A group over two coordinates is taken for two kinds of groups, and only the first is made.

Expected: has 2 ranks, but tp=2 x pp=4 makes 8
"""


def coordinates(self, rank):
    rest = rank - self.rank_offset
    position = {}
    for word in self.order.split("-"):
        rest, position[word] = divmod(rest, self.name_to_size[word])
    return position


def get_ranks(self, token):
    word, groups = token.split("-")[0], {}
    for rank in range(self.rank_offset, self.rank_offset + self.world_size):
        place = coordinates(self, rank)
        groups.setdefault(tuple(n for w, n in place.items() if w != word), []).append(rank)
    return list(groups.values())
