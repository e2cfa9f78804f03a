"""Counts the collectives that a student's code makes, and their bytes.

Megatron has no counterpart.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from minimegatron.core.tracing import Call, observed_by

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")


class CountedCollective(NamedTuple):
    """One call of `core.collectives`, of more than one rank."""

    name: str
    num_bytes: int
    shape: tuple[int, ...]


class Counter:
    """An observer; `calls` are the collectives so far, in order."""

    def __init__(self) -> None:
        self.calls: list[CountedCollective] = []

    def start(self, call: Call) -> None:
        seen = call.attributes
        if call.name in COLLECTIVES and seen.get("group_size", 1) > 1:
            self.calls.append(CountedCollective(call.name, seen["bytes"], seen["shape"]))

    def stop(self, call: Call) -> None:
        """A traced call ends; it was counted when it began."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that were given to collectives."""
        return sum(call.num_bytes for call in self.calls)

    def words(self) -> str:
        """How many of each kind: "2 all-reduces of 64 bytes, 1 all-gather of 512 bytes"."""
        kinds: dict[tuple[str, int], int] = {}
        for call in self.calls:
            kinds[call.name, call.num_bytes] = kinds.get((call.name, call.num_bytes), 0) + 1
        parts = [
            f"{number} {name}{'s' * (number > 1)} of {size} bytes"
            for (name, size), number in kinds.items()
        ]
        return ", ".join(parts) or "none"


@contextmanager
def counted() -> Iterator[Counter]:
    """Counts the collectives inside the block."""
    counter = Counter()
    with observed_by(counter):
        yield counter
