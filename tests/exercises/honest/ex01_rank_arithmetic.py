"""Rank arithmetic: which rank sits where, and which ranks form a group.

Two methods of `RankGenerator` are missing. The check puts yours in their place, and builds every
process group of several jobs with them. Nothing here needs more than one process, or torch.

Useful attributes of `self` (example: tp=2, dp=2, pp=4, order "tp-dp-pp"):

    self.order            "tp-dp-pp"; the first word changes fastest from rank to rank
    self.name_to_size     {"tp": 2, "dp": 2, "pp": 4, "ep": 1, "cp": 1}
    self.world_size       16
    self.rank_offset      0; the number of the grid's first rank

`self.order` names every coordinate once, also those of size 1.
"""

from minimegatron.core.rank_generator import RankGenerator


def coordinates(self: RankGenerator, rank: int) -> dict[str, int]:
    rest = rank - self.rank_offset
    where = {}
    for word in self.order.split("-"):
        rest, where[word] = divmod(rest, self.name_to_size[word])
    return where


def get_ranks(self: RankGenerator, token: str) -> list[list[int]]:
    vary = token.split("-")
    buckets = {}
    for r in range(self.rank_offset, self.rank_offset + self.world_size):
        fixed = tuple(v for k, v in coordinates(self, r).items() if k not in vary)
        buckets.setdefault(fixed, []).append(r)
    return sorted(buckets.values())


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
