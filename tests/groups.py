"""Process groups that need no processes, for tests that build models but exchange nothing."""

from dataclasses import dataclass

from minimegatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class PretendGroup:
    """Rank `number` of `members`; anything that communicates over more than one fails."""

    number: int = 0
    members: int = 1

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.members


def pretend_groups(
    tp_rank: int = 0, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1, **more: PretendGroup
) -> ProcessGroupCollection:
    """A place in a tensor x pipeline grid, and in `more` groups; by default a world of one."""
    return ProcessGroupCollection(
        tp=PretendGroup(tp_rank, tp_size), pp=PretendGroup(pp_rank, pp_size), **more
    )
