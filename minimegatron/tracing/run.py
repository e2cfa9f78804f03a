"""A recorded run: all ranks together, and its steps one by one.

Torch-free. Megatron has no counterpart.
"""

import os

from minimegatron.tracing.rank_trace import RankTrace, load_ranks, missing_ranks
from minimegatron.tracing.step import Step


class Run:
    """The recordings of all ranks, or of those that are there.

    `step(n)` is the n-th schedule run of one pipeline, with what only several ranks together can
    tell: which send met which receive, and who waited for whom.
    """

    def __init__(self, ranks: list[RankTrace]):
        self.ranks: list[RankTrace] = []
        self.fill(ranks)

    def fill(self, ranks: list[RankTrace]) -> None:
        """Takes the recordings; global rank 0 first."""
        self.ranks[:] = sorted(ranks, key=lambda rank: rank.rank)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "Run":
        """Reads the folder that `--trace` wrote. Raises ValueError, saying why, if it cannot."""
        return cls(load_ranks(directory))

    # -- The whole --

    @property
    def world_size(self) -> int:
        """Ranks of the job, recorded or not."""
        return self.ranks[0].world_size if self.ranks else 0

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the job that left no recording."""
        return missing_ranks(self.ranks)

    @property
    def clock_residual_us(self) -> float:
        """All ranks' clocks agree to within this many microseconds: a bound, not a guess."""
        return max((rank.clock.worst_residual_us for rank in self.ranks), default=0.0)

    @property
    def clock_words(self) -> str:
        """How surely times of different ranks can be compared."""
        if self.world_size == 1:
            return "one rank, one clock"
        shared = all(rank.clock.is_shared for rank in self.ranks)
        how = "all ranks on one clock; barriers confirm it" if shared else "clocks aligned"
        return f"{how} to within {self.clock_residual_us / 1e3:.2g} ms"

    @property
    def num_steps(self) -> int:
        """Schedule runs that every recorded rank has."""
        return min((len(rank.steps) for rank in self.ranks), default=0)

    def rank(self, rank: int) -> RankTrace:
        """The recording of one global rank. Raises ValueError if there is none."""
        for recording in self.ranks:
            if recording.rank == rank:
                return recording
        there = ", ".join(str(recording.rank) for recording in self.ranks) or "none"
        raise ValueError(f"there is no recording of rank {rank}; there are: {there}")

    def pipelines(self) -> list[dict[str, int]]:
        """The (tp, dp, cp) coordinates of every pipeline with recorded ranks."""
        seen = {tuple(rank.coordinates[axis] for axis in ("tp", "dp", "cp")) for rank in self.ranks}
        return [dict(zip(("tp", "dp", "cp"), found, strict=True)) for found in sorted(seen)]

    def is_whole(self, tp: int = 0, dp: int = 0, cp: int = 0) -> bool:
        """True if every stage of that pipeline was recorded."""
        stages = self._stages(tp, dp, cp)
        there = [stage.coordinates["pp"] for stage in stages]
        return bool(stages) and there == list(range(stages[0].sizes["pp"]))

    def _stages(self, tp: int, dp: int, cp: int) -> list[RankTrace]:
        wanted = {"tp": tp, "dp": dp, "cp": cp}
        stages = [
            rank
            for rank in self.ranks
            if all(rank.coordinates[axis] == value for axis, value in wanted.items())
        ]
        return sorted(stages, key=lambda rank: rank.coordinates["pp"])

    def step_number(self, number: int) -> int:
        """The step's number from 0; negative ones count from the end. ValueError if it is not there."""
        num_steps = self.num_steps
        if not -num_steps <= number < num_steps:
            has = f"{num_steps} step{'s' * (num_steps != 1)}"
            raise ValueError(f"there is no step {number}: the recording has {has}, counted from 0")
        return number % num_steps

    def step(self, number: int = 0, tp: int = 0, dp: int = 0, cp: int = 0) -> Step:
        """The `number`-th schedule run of one pipeline; negative numbers count from the end.

        Raises ValueError if it, or the recording of one of its stages, is not there.
        """
        number = self.step_number(number)
        stages = self._stages(tp, dp, cp)
        if not self.is_whole(tp, dp, cp):
            raise ValueError(
                f"the pipeline tp {tp}, dp {dp}, cp {cp} needs the recordings of all its stages, "
                f"but of {[stage.coordinates['pp'] for stage in stages]} only there are; recorded "
                f"pipelines: {', '.join(map(_coordinates, self.pipelines()))}"
            )
        return Step(stages, number)


def _coordinates(pipeline: dict[str, int]) -> str:
    return "(" + ", ".join(f"{axis} {value}" for axis, value in pipeline.items()) + ")"
