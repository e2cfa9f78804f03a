"""Ranks that are threads of this process, one running at a time: sums over groups, in no time."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from minimegatron.core import collectives
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.moe import moe_logging
from tests.groups import PretendGroup

AXES = {
    "tp": "t",
    "cp": "c",
    "dp": "d",
    "pp": "p",
    "tp_cp": "tc",
    "dp_cp": "dc",
    "tp_dp_cp": "tdc",
}
"""Of each group, the coordinates that its ranks differ in."""


class Meeting:
    """Where the members of one group put what they add up, collective by collective."""

    def __init__(self, turn: threading.Condition):
        self.turn = turn
        self.put: dict[tuple[int, int], torch.Tensor] = {}
        self.num_done: dict[int, int] = {}
        self.is_given_up = False

    def all_reduce(self, number: int, members: int, tensor: torch.Tensor) -> None:
        """Lets others have their turn until all have come."""
        round_ = self.num_done[number] = self.num_done.get(number, 0) + 1
        self.put[number, round_] = tensor.clone()
        keys = [(other, round_) for other in range(members)]
        self.turn.notify_all()
        self.turn.wait_for(lambda: self.is_given_up or all(k in self.put for k in keys), 20)
        if not all(key in self.put for key in keys):
            raise threading.BrokenBarrierError(f"rank {number} of {members} waits for the others")
        tensor.copy_(sum(self.put[key] for key in keys))


@dataclass(frozen=True)
class ThreadGroup(PretendGroup):
    """Rank `number` of `members` threads."""

    meeting: Any = None


def all_reduce(tensor: torch.Tensor, group: Any) -> None:
    """In place of `collectives.all_reduce`."""
    if group.size() > 1:
        group.meeting.all_reduce(group.number, group.size(), tensor)


def groups_of_all_ranks(**sizes: int) -> list[tuple[dict[str, int], ProcessGroupCollection]]:
    """For sizes t, c, d, p: each rank's coordinates and groups."""
    sizes = {axis: sizes.get(axis, 1) for axis in "tcdp"}
    places = [
        dict(zip(sizes, place, strict=True))
        for place in itertools.product(*(range(size) for size in sizes.values()))
    ]
    meetings: dict[tuple, Meeting] = {}
    turn = threading.Condition()

    def group(name: str, place: dict[str, int]) -> ThreadGroup:
        number, members = 0, 1
        for axis in AXES[name]:
            number, members = number * sizes[axis] + place[axis], members * sizes[axis]
        key = (name, *(rank for axis, rank in place.items() if axis not in AXES[name]))
        return ThreadGroup(number, members, meetings.setdefault(key, Meeting(turn)))

    return [
        (place, ProcessGroupCollection(**{name: group(name, place) for name in AXES}))
        for place in places
    ]


def one_rank() -> ProcessGroupCollection:
    """The groups of a world of one."""
    return groups_of_all_ranks()[0][1]


def run_threads(functions: Sequence[Callable[[], Any]], groups: Sequence[Any]) -> list[Any]:
    """Calls all; their values, in order. What one raises frees the others and is raised.

    One at a time: another has its turn where one waits for a collective, or ends. torch's functions
    with a backward in Python are not safe in threads that run at once.
    """
    meetings = [group.meeting for pg in groups for group in vars(pg).values()]
    turn = meetings[0].turn

    def guarded(function: Callable[[], Any]) -> Any:
        with turn:
            try:
                return function()
            except BaseException:
                for meeting in meetings:
                    meeting.is_given_up = True
                raise
            finally:
                turn.notify_all()

    with (
        mock.patch.object(collectives, "all_reduce", all_reduce),
        mock.patch.object(moe_logging, "all_reduce", all_reduce),
        ThreadPoolExecutor(len(functions)) as pool,
    ):
        futures = [pool.submit(guarded, function) for function in functions]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
