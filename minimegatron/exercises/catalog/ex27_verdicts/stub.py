"""Verdicts from two or three results: a fault of the machine, or of the data?

Started by: you, and `minimegatron exercises check`. A result is bad, such as a loss that is NaN. A
broken chip does that, and so does bad data. So the step runs again with the same data:

    second run      another result    TRANSIENT     fatal: END          not fatal: GO_ON
    (same device)   the same          no verdict    fatal: CHECKPOINT   not fatal: GO_ON
    third run       suspected device  no verdict    ELSEWHERE, fatal or not
    (resumed)       other device, another result    PERSISTENT   fatal: END   not fatal: GO_ON
                    other device, the same result   CORRECT      fatal: END   not fatal: GO_ON

All runs compute the step that the first one computed: "the same" and "another" are said of the first
run's result. That is what a rank asks for. What happens, all ranks decide together, by these rules:

    * AGAIN of any rank: all run the step again.
    * What ends the run counts more than GO_ON.
    * CHECKPOINT counts more than END: there is something left to find out.
    * END counts more than ELSEWHERE: one verdict is enough.
    * A rank without a bad result asks for NOTHING. If that is all, all go on.
"""

from typing import Protocol

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
    raise NotImplementedError("Write is_same: what becomes of NaN in a comparison?")


def verdict(
    results: list[float], tolerance: float, fatal: bool, on_suspected_device: bool
) -> tuple[str | None, str]:
    """(TRANSIENT, PERSISTENT, CORRECT or None; what this rank asks for), after the last run.

    Args:
        results: what one call gave in the first run, the second, the third; empty if this rank has no
            bad result. After the first run a bad result asks for AGAIN.
        on_suspected_device: of the third run.
    """
    raise NotImplementedError("Write verdict: how many results are there?")


def decide(ask: str, group: dist.ProcessGroup) -> str:
    """What all ranks of `group` do: AGAIN, GO_ON, CHECKPOINT, ELSEWHERE or END.

    Every rank calls it after each run, with what it asks for. The same is returned on all.
    """
    raise NotImplementedError("Write decide: how does a rank hear what another one asks for?")


def train_step(step: Step, group: dist.ProcessGroup) -> tuple[bool, bool, int]:
    """Runs `step` until all have decided, updates or does not, and returns `EXITS` of the decision.

    Where the run ends, the step must be as if it had not been: a checkpoint is of the moment before.
    """
    raise NotImplementedError("Write train_step: which ranks run the step again?")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
