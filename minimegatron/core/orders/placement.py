"""Where each stage of the model is: on which rank of the pipeline, in which of its chunks.

Torch-free. Megatron has no counterpart: it computes `chunk * p + rank` where it needs it.

A model is cut into virtual stages, 0 first. A `Placement` is a table of them. For 4 ranks:

| rule   | rank 0 | rank 1 | rank 2 | rank 3 |                                                     |
|--------|--------|--------|--------|--------|-----------------------------------------------------|
| `LINE` | 0      | 1      | 2      | 3      | one chunk per rank                                  |
| `LOOP` | 0, 4   | 1, 5   | 2, 6   | 3, 7   | v chunks: after the last rank comes the first again |
| `V`    | 0, 7   | 1, 6   | 2, 5   | 3, 4   | two chunks: down the ranks and up again             |
| `BOTH` | 0, 3   | 1, 2   | 2, 1   | 3, 0   | two copies of the model, one in each direction      |

A rule makes a placement: `V(4)`, `LOOP(4, 2)`. A placement of one's own is `Placement("mine", table)`,
or a function of p and v (None if nobody has asked for a number) that returns one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple


class Place(NamedTuple):
    """One chunk of one rank (of the pipeline)."""

    rank: int
    chunk: int


@dataclass(frozen=True)
class Placement:
    """`stages[rank][chunk]` is the virtual stage that this chunk computes.

    Each stage stands once in the table. With two copies of the model each stands twice: once among
    the ranks' first half of chunks, the first copy, and once among the second half.

    >>> V(4).stage_of(rank=0, chunk=1), V(4).place_of(7), V(4).next_of(rank=3, chunk=0)
    (7, Place(rank=0, chunk=1), Place(rank=3, chunk=1))

    Raises ValueError for a table that is not such a one.
    """

    name: str
    stages: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(map(tuple, self.stages)))
        v = len(self.stages[0]) if self.stages else 0
        if not v or any(len(chunks) != v for chunks in self.stages):
            raise ValueError(
                f"placement {self.name}: each rank needs the same number of chunks, 1 or more, but "
                f"they have {[len(chunks) for chunks in self.stages]}"
            )
        wanted = list(range(self.num_stages))
        for copy in range(self.num_copies):
            found = sorted(
                stage
                for chunks in self.stages
                for chunk, stage in enumerate(chunks)
                if self.copy_of(chunk) == copy
            )
            if found != wanted:
                raise ValueError(
                    f"placement {self.name}: the stages {found} are placed, but {wanted} are needed, "
                    "each once (in each copy of the model)"
                )

    # -- Sizes --

    @property
    def pp_size(self) -> int:
        """p, ranks of the pipeline."""
        return len(self.stages)

    @property
    def num_model_chunks(self) -> int:
        """v, chunks per rank."""
        return len(self.stages[0])

    @cached_property
    def num_stages(self) -> int:
        """Virtual stages of one copy of the model."""
        return 1 + max(max(chunks) for chunks in self.stages)

    @cached_property
    def num_copies(self) -> int:
        """Copies of the model: 2 where two directions meet, else 1."""
        return max(1, self.pp_size * self.num_model_chunks // self.num_stages)

    # -- From place to stage and back --

    def stage_of(self, rank: int, chunk: int = 0) -> int:
        """The virtual stage that a chunk computes."""
        return self.stages[rank][chunk]

    def place_of(self, stage: int, copy: int = 0) -> Place:
        """Where a virtual stage is."""
        return self._places[copy, stage]

    def copy_of(self, chunk: int) -> int:
        """The copy of the model that a chunk belongs to."""
        return chunk * self.num_copies // self.num_model_chunks

    @cached_property
    def _places(self) -> dict[tuple[int, int], Place]:
        return {
            (self.copy_of(chunk), stage): Place(rank, chunk)
            for rank, chunks in enumerate(self.stages)
            for chunk, stage in enumerate(chunks)
        }

    # -- Neighbours --

    def next_of(self, rank: int, chunk: int = 0) -> Place | None:
        """The chunk that an output goes to, perhaps on the same rank; None after the last stage."""
        return self._neighbours[rank, chunk][1]

    def previous_of(self, rank: int, chunk: int = 0) -> Place | None:
        """The chunk that an input's gradient goes to; None before the first stage."""
        return self._neighbours[rank, chunk][0]

    @cached_property
    def _neighbours(self) -> dict[tuple[int, int], tuple[Place | None, Place | None]]:
        return {
            place: (self._places.get((copy, stage - 1)), self._places.get((copy, stage + 1)))
            for (copy, stage), place in self._places.items()
        }

    def peers_of(self, rank: int) -> list[int]:
        """The other ranks that hold a neighbour of one of this rank's chunks, in ascending order."""
        found = {
            place.rank
            for chunk in range(self.num_model_chunks)
            for place in self._neighbours[rank, chunk]
            if place is not None
        }
        return sorted(found - {rank})

    # -- The two ends of the model --

    def is_first(self, rank: int, chunk: int = 0) -> bool:
        """True for the chunk that starts from data."""
        return self.stages[rank][chunk] == 0

    def is_last(self, rank: int, chunk: int = 0) -> bool:
        """True for the chunk that ends in the loss."""
        return self.stages[rank][chunk] == self.num_stages - 1

    def is_first_rank(self, rank: int) -> bool:
        """True for a rank that has a chunk that starts from data."""
        return 0 in self.stages[rank]

    def is_last_rank(self, rank: int) -> bool:
        """True for a rank that has a chunk that ends in the loss."""
        return self.num_stages - 1 in self.stages[rank]

    @property
    def first_rank(self) -> int:
        """The rank that the (first copy of the) model begins on."""
        return self.place_of(0).rank

    @property
    def last_rank(self) -> int:
        """The rank that the (first copy of the) model ends on."""
        return self.place_of(self.num_stages - 1).rank

    # -- Which microbatches a chunk works on --

    def has(self, microbatch: int, chunk: int, num_microbatches: int) -> bool:
        """Whether the chunk works on this microbatch. Of c copies each takes a c-th of them."""
        return microbatch * self.num_copies // num_microbatches == self.copy_of(chunk)


PlacementRule = Callable[[int, int | None], Placement]
"""From the number of ranks, and of chunks per rank if one is asked for, to the placement."""


@dataclass(frozen=True)
class Rule:
    """One of the four rules; a call gives its placement.

    Raises ValueError where the number of chunks is not the rule's.
    """

    name: str
    stage_of: Callable[[int, int, int, int], int]
    """(rank, chunk, p, v) -> virtual stage"""
    num_model_chunks: int | None = None
    """v, where the rule leaves no choice."""

    def __call__(self, pp_size: int, num_model_chunks: int | None = None) -> Placement:
        v = num_model_chunks
        if v is None:
            v = self.num_model_chunks or 1
        if self.num_model_chunks not in (None, v):
            raise ValueError(
                f"placement {self.name} has {self.num_model_chunks} chunk"
                f"{'s' * (self.num_model_chunks > 1)} on each rank, but {v} are asked for; use "
                f"{self.num_model_chunks}, or another placement"
            )
        return _make(self, pp_size, v)


@lru_cache(maxsize=256)
def _make(rule: Rule, p: int, v: int) -> Placement:
    table = tuple(tuple(rule.stage_of(rank, c, p, v) for c in range(v)) for rank in range(p))
    return Placement(rule.name, table)


LINE = Rule("line", lambda rank, chunk, p, v: rank, 1)
LOOP = Rule("loop", lambda rank, chunk, p, v: chunk * p + rank)
V = Rule("v", lambda rank, chunk, p, v: 2 * p - 1 - rank if chunk else rank, 2)
BOTH = Rule("both", lambda rank, chunk, p, v: p - 1 - rank if chunk else rank, 2)


def usual_placement(pp_size: int, num_model_chunks: int | None = None) -> Placement:
    """What Megatron's schedules use: a line, or a loop for several chunks per rank."""
    v = num_model_chunks or 1
    return LINE(pp_size) if v == 1 else LOOP(pp_size, v)


def fitting(given: Placement | None, pp_size: int, num_model_chunks: int) -> Placement:
    """`given` if it has these sizes, else the usual placement."""
    sizes = (pp_size, num_model_chunks)
    if given is not None and (given.pp_size, given.num_model_chunks) == sizes:
        return given
    return usual_placement(*sizes)


# -- Of a pipeline's global ranks, those that hold embeddings; None where the usual rule holds --

PickRanks = Callable[[list[int]], list[int]]


def ranks_of_ends(placement: Placement | None) -> PickRanks | None:
    """Picks those that hold word embeddings: one if both ends of the model are there."""
    if placement is None:
        return None
    ends = dict.fromkeys((placement.first_rank, placement.last_rank))
    return lambda pp_ranks: [pp_ranks[rank] for rank in ends]


def ranks_of_first(placement: Placement | None) -> PickRanks | None:
    """Picks the one that holds position embeddings."""
    return None if placement is None else lambda pp_ranks: [pp_ranks[placement.first_rank]]
