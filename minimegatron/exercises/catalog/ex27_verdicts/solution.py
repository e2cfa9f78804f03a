"""Verdicts from two or three results, solved.

The six requests in the order of their weight: the heaviest of all ranks counts.
"""

import math
from typing import Protocol

import torch
import torch.distributed as dist

NOTHING, AGAIN, GO_ON = "nothing", "again", "go on"
CHECKPOINT, ELSEWHERE, END = "checkpoint", "elsewhere", "end"
TRANSIENT, PERSISTENT, CORRECT = "transient error", "persistent error", "correct result"

EXITS = {
    GO_ON: (False, False, 0),
    CHECKPOINT: (True, True, 16),
    ELSEWHERE: (False, True, 16),
    END: (False, True, 17),
}
"""Save a checkpoint, end the run, its exit code."""


class Step(Protocol):
    """A training step of this rank; the check makes it."""

    def run(self) -> None:
        """All forwards and backwards. Ranks exchange messages in it."""

    def ask(self) -> str:
        """What this rank asks for after the last run: NOTHING, AGAIN, GO_ON, ..."""

    def put_back(self) -> None:
        """Data, random numbers and buffers as they were before the last run."""

    def update(self) -> None:
        """The weights, with the last run's gradients. Ranks exchange messages in it."""


def is_same(first: float, second: float, tolerance: float) -> bool:
    """Whether the two lie apart by no more than `tolerance` times the mean of |first| and |second|.

    NaN is the same as NaN, +Inf as +Inf, -Inf as -Inf. Another pair with one of these is not the same.
    """
    if first == second or (math.isnan(first) and math.isnan(second)):
        return True
    if not (math.isfinite(first) and math.isfinite(second)):
        return False
    return abs(first - second) <= tolerance * (abs(first) + abs(second)) / 2


def verdict(
    results: list[float], tolerance: float, fatal: bool, on_suspected_device: bool
) -> tuple[str | None, str]:
    """(TRANSIENT, PERSISTENT, CORRECT or None; what this rank asks for), after the last run.

    Args:
        results: what one call gave in the first run, the second, the third; empty if this rank has no
            bad result. After the first run a bad result asks for AGAIN.
        on_suspected_device: of the third run.
    """
    if len(results) < 2:
        return None, AGAIN if results else NOTHING
    is_third = len(results) == 3
    if is_third and on_suspected_device:
        return None, ELSEWHERE
    same = is_same(results[0], results[-1], tolerance)
    if is_third:
        return CORRECT if same else PERSISTENT, END if fatal else GO_ON
    if same:
        return None, CHECKPOINT if fatal else GO_ON
    return TRANSIENT, END if fatal else GO_ON


BY_WEIGHT = [NOTHING, GO_ON, ELSEWHERE, END, CHECKPOINT, AGAIN]


def decide(ask: str, group: dist.ProcessGroup) -> str:
    """What all ranks of `group` do: AGAIN, GO_ON, CHECKPOINT, ELSEWHERE or END.

    Every rank calls it after each run, with what it asks for. The same is returned on all.
    """
    weight = torch.tensor(BY_WEIGHT.index(ask))
    dist.all_reduce(weight, op=dist.ReduceOp.MAX, group=group)
    decision = BY_WEIGHT[int(weight)]
    return GO_ON if decision == NOTHING else decision


def train_step(step: Step, group: dist.ProcessGroup) -> tuple[bool, bool, int]:
    """Runs `step` until all have decided, updates or does not, and returns `EXITS` of the decision.

    Where the run ends, the step must be as if it had not been: a checkpoint is of the moment before.
    """
    step.run()
    while (decision := decide(step.ask(), group)) == AGAIN:
        step.put_back()
        step.run()
    if decision == GO_ON:
        step.update()
    else:
        step.put_back()
    return EXITS[decision]


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
