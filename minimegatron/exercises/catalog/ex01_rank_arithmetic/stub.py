"""Rank arithmetic: which rank sits where, and which ranks form a group.

Two methods of `RankGenerator` are missing. The check puts yours in their place, and builds every
process group of several jobs with them. Nothing here needs more than one process, or torch.

Useful attributes of `self` (example: tp=2, dp=2, pp=4, and no ep or cp):

    self.order            "tp-dp-pp-ep-cp"; the first word changes fastest from rank to rank
    self.name_to_size     {"tp": 2, "dp": 2, "pp": 4, "ep": 1, "cp": 1}
    self.world_size       16
    self.rank_offset      0; the number of the grid's first rank

`self.order` names every coordinate once, also those of size 1 (here ep and cp).
"""

from minimegatron.core.rank_generator import RankGenerator


def coordinates(self: RankGenerator, rank: int) -> dict[str, int]:
    """The position of `rank` along every coordinate, in the order of `self.order`.

    In the example, coordinates(6) is {"tp": 0, "dp": 1, "pp": 1, "ep": 0, "cp": 0}.
    """
    raise NotImplementedError("Write coordinates: divide the number up, the first word first")


def get_ranks(self: RankGenerator, token: str) -> list[list[int]]:
    """All groups whose ranks differ in the coordinates that `token` names, and in no other.

    In the example, get_ranks("tp") is [[0, 1], [2, 3], ..., [14, 15]], and get_ranks("tp-pp") is
    [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]. Ranks within a group ascend; groups
    ascend by their first rank.
    """
    raise NotImplementedError("Write get_ranks: who agrees in all other coordinates?")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
