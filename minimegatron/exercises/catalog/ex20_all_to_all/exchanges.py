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
from minimegatron.exercises.check import Wrong

PHASES = ("forward", "dispatch", "combine", "backward")


class Phase:
    """Which part of a layer runs, and how many exchanges it has made."""

    def __init__(self, words: str = PHASES[0]) -> None:
        self.words, self.number = words, 0

    def begin(self, words: str) -> None:
        """The next part."""
        self.words, self.number = words, 0

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
            f"{phase}, an all-to-all whose {name} has {len(tensor)} rows {verb} {splits}, in all "
            f"{sum(splits)}, over a group of {size} ranks\n{_advice(phase)}"
        )
    return splits


def _check_agreement(
    phase: Phase, input: torch.Tensor, sent: list[int], expected: list[int], group: Any
) -> None:
    """Asks every rank of the group what it is about to do."""
    size, me = group.size(), group.rank()
    if size == 1:
        return
    width = math.prod(input.shape[1:])
    mine = torch.tensor([PHASES.index(phase.words), phase.number, width, *sent])
    phase.number += 1
    every = torch.empty(size * len(mine), dtype=torch.int64)
    inspect.unwrap(collectives.all_gather)(every, mine, group)
    for source, told in enumerate(every.view(size, -1).tolist()):
        _check_call(phase, source, told[:3], mine.tolist()[:3])
        if told[3 + me] != expected[source]:
            raise Wrong(
                f"{phase}, an all-to-all expects {expected[source]} rows from rank {source} of its "
                f"group, which sends {told[3 + me]}\n{_advice(phase)}"
            )


def _check_call(phase: Phase, source: int, told: list[int], mine: list[int]) -> None:
    if told[:2] != mine[:2]:
        raise Wrong(
            f"{phase}, this rank makes all-to-all {mine[1]}, while rank {source} of its group makes "
            f"all-to-all {told[1]} of its {PHASES[told[0]]}\nEvery rank of a group must make the same "
            "calls, also one that has nothing to send or to get: look at an early return, and at an "
            "`if` that depends on the rank's own tokens."
        )
    if told[2] != mine[2]:
        raise Wrong(
            f"{phase}, this rank's all-to-all has rows of {mine[2]} numbers, while rank {source} of "
            f"its group has rows of {told[2]}\nThe ranks exchange the same things in the same order."
        )


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
