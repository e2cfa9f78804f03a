"""The order is read from the wrong end: its last word is made to change fastest.

Expected: the first word changes fastest
"""


def coordinates(self, rank):
    rest = rank - self.rank_offset
    position = {}
    for word in reversed(self.order.split("-")):
        rest, position[word] = divmod(rest, self.name_to_size[word])
    return position


def get_ranks(self, token):
    groups = {}
    for rank in range(self.rank_offset, self.rank_offset + self.world_size):
        place = coordinates(self, rank)
        key = tuple(place[word] for word in sorted(place) if word not in token.split("-"))
        groups.setdefault(key, []).append(rank)
    return list(groups.values())
