"""A look at every all-to-all of a student before it begins: do the ranks agree on what is sent?

gloo would end the process of a rank that gets more than it expects. Megatron has no counterpart.
"""

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.check import Wrong

PHASES = ("forward", "dispatch", "combine", "backward")
OVER = -1
"""In place of an exchange's number: this rank has come out of the part."""


class Phase:
    """Which part of a layer runs, and how many exchanges it has made."""

    def __init__(self, words: str = PHASES[0]) -> None:
        self.words, self.number = words, 0

    def begin(self, words: str) -> None:
        """The next part."""
        self.words, self.number = words, 0

    def end(self, group: Any) -> None:
        """The part is over on this rank. Wrong if another rank makes an exchange instead."""
        _ask_all(self, OVER, 0, [0] * group.size(), group)

    def __str__(self) -> str:
        return f"rank {dist.get_rank()}: in {self.words}"


@contextlib.contextmanager
def agreed(student: ModuleType, phase: Phase) -> Iterator[None]:
    """Inside the block, an all-to-all on which the ranks do not agree is Wrong."""
    exchange = collectives.all_to_all

    def checked(
        output: torch.Tensor,
        input: torch.Tensor,
        group: Any,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        sent = _checked_splits(phase, "sends", "input", input, input_splits, group)
        expected = _checked_splits(phase, "expects", "output", output, output_splits, group)
        _check_agreement(phase, input, sent, expected, group)
        return exchange(output, input, group, output_splits, input_splits, **options)

    places = [(module, "all_to_all") for module in (collectives,)]
    places += [(student, name) for name, value in vars(student).items() if value is exchange]
    for holder, name in places:
        setattr(holder, name, checked)
    try:
        yield
    finally:
        for holder, name in places:
            setattr(holder, name, exchange)


def _checked_splits(
    phase: Phase, verb: str, name: str, tensor: torch.Tensor, splits: Any, group: Any
) -> list[int]:
    """The splits as ints; Wrong if they do not fit this rank's own tensor."""
    size = group.size()
    if splits is None:
        splits = [len(tensor) // size] * size
    splits = [int(one) for one in splits]
    if len(splits) != size or sum(splits) != len(tensor) or min(splits) < 0:
        raise Wrong(
            f"{phase}, an all-to-all whose {name} has {num_of(len(tensor), 'row')} {verb} "
            f"{splits}, in all "
            f"{sum(splits)}, over a group of {size} ranks\n{_advice(phase)}"
        )
    return splits


def _check_agreement(
    phase: Phase, input: torch.Tensor, sent: list[int], expected: list[int], group: Any
) -> None:
    """Asks every rank of the group what it is about to do."""
    width = math.prod(input.shape[1:])
    number, phase.number = phase.number, phase.number + 1
    for source, told in enumerate(_ask_all(phase, number, width, sent, group)):
        if told[group.rank()] != expected[source]:
            raise Wrong(
                f"{phase}, an all-to-all expects {num_of(expected[source], 'row')} from rank {source} "
                f"of its group, which sends {told[group.rank()]}\n{_advice(phase)}"
            )


def _ask_all(phase: Phase, number: int, width: int, sent: list[int], group: Any) -> list[list[int]]:
    """What each rank of the group sends to each, where all are at the same place."""
    mine = torch.tensor([PHASES.index(phase.words), number, width, *sent])
    every = torch.empty(group.size() * len(mine), dtype=torch.int64)
    inspect.unwrap(collectives.all_gather)(every, mine, group)
    rows = every.view(group.size(), -1).tolist()
    for source, told in enumerate(rows):
        _check_call(phase, source, told[:3], rows[0][:3])
    return [told[3:] for told in rows]


def _check_call(phase: Phase, source: int, told: list[int], first: list[int]) -> None:
    """Compares with the group's first rank, so that every rank says the same."""
    if told[:2] != first[:2]:
        raise Wrong(
            f"rank 0 of a group {_call_words(*first[:2])}, while its rank {source} "
            f"{_call_words(*told[:2])}\nEvery rank of a group must make the same calls, also one that "
            "has nothing to send or to get: look at an early return, and at an `if` that depends on "
            "the rank's own tokens."
        )
    if told[2] != first[2]:
        raise Wrong(
            f"{phase}, the all-to-all of rank 0 of a group has rows of {first[2]} numbers, while "
            f"that of its rank {source} has rows of {told[2]}\nThe ranks exchange the same things in "
            "the same order."
        )


def _call_words(phase: int, number: int) -> str:
    if number == OVER:
        return f"has come out of its {PHASES[phase]}"
    return f"makes all-to-all {number} (counted from 0) of its {PHASES[phase]}"


def _advice(phase: Phase) -> str:
    if phase.words == "backward":
        return (
            "Backward moves the gradients of the rows that forward has moved. So each rank now has a "
            "gradient for every row that it got, and wants one for every row that it had sent."
        )
    if phase.words == "combine":
        return "What came from a rank goes back to it: as many rows as it had sent."
    return (
        "A rank sends to another one as many rows as its tokens chose experts there. What it gets is "
        "another number, which depends on the other ranks' choices."
    )
