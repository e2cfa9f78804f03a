"""Which bucket is launched when, asked of `register_grad_ready` alone: three buckets that send nothing.

Megatron has no counterpart.
"""

from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from minimegatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from minimegatron.exercises.check import Wrong

ORDERS = [
    ("in the order of the buckets", [0, 0, 1, 1, 2, 2], [0, 1, 1, 2, 2, 3]),
    ("for the last bucket first", [2, 2, 1, 1, 0, 0], [0, 0, 0, 0, 0, 3]),
    ("in mixed order", [0, 1, 1, 0, 2, 2], [0, 0, 0, 2, 2, 3]),
]
"""In words; whose gradient comes when, of three buckets of two; buckets launched after each."""


class _Group(_ParamAndGradBucketGroup):
    """A bucket that notes its launch and sends nothing."""

    def __init__(self, number: int, log: list[int]):
        self.number, self.log = number, log
        self.params = {torch.nn.Parameter(torch.zeros(1)): f"{number}.{i}" for i in range(2)}
        self.params_with_grad = set()
        self.grad_reduce_handles = None
        self.is_last_microbatch = True
        self.previous_bucket_group = self.next_bucket_group = None

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        if self.grad_reduce_handles is not None:
            raise Wrong(f"bucket {self.number} was launched twice in one step")
        self.grad_reduce_handles = []
        self.log.append(self.number)


def _three_buckets() -> tuple[list[_Group], list[int]]:
    log: list[int] = []
    groups = [_Group(number, log) for number in range(3)]
    for earlier, later in pairwise(groups):
        earlier.next_bucket_group, later.previous_bucket_group = later, earlier
    return groups, log


def run_launch(student: ModuleType) -> dict[str, Any]:
    """Three buckets of two parameters: while accumulating, in order, and out of order."""
    groups, log = _three_buckets()
    for group in groups:
        group.is_last_microbatch = False
        for param in group.params:
            student.register_grad_ready(group, param)
    found = {"early": list(log), "num_counted": len(groups[0].params_with_grad), "logs": []}
    for _, order, _ in ORDERS:
        groups, log = _three_buckets()
        waiting, logs = [list(group.params) for group in groups], []
        for number in order:
            student.register_grad_ready(groups[number], waiting[number].pop(0))
            logs.append((list(log), [len(group.params_with_grad) for group in groups]))
        found["logs"].append(logs)
    return found


def judge_launch(found: dict[str, Any]) -> None:
    if found["early"]:
        raise Wrong(
            f"bucket {found['early'][0]} was launched although this is not the last microbatch "
            "(is_last_microbatch is False)\nWhat the later microbatches add would stay on this rank."
        )
    if found["num_counted"]:
        raise Wrong(
            "a gradient that came before the last microbatch was counted in params_with_grad\nIn the "
            "last one the bucket would then seem complete too early."
        )
    for (words, order, wanted), logs in zip(ORDERS, found["logs"], strict=True):
        for number, ((log, counted), num) in enumerate(zip(logs, wanted, strict=True)):
            _judge_log(words, order[: number + 1], log, counted, num)


def _judge_log(
    words: str, come: list[int], log: list[int], counted: list[int], wanted: int
) -> None:
    """What was launched after the gradients that have come, each named by its bucket."""
    where = (
        f"The case: three buckets of two gradients each; gradients come {words}. So far they came "
        f"for bucket {', then '.join(map(str, come))}."
    )
    if log != list(range(len(log))):
        raise Wrong(
            f"buckets were launched in the order {', '.join(map(str, log))}\n{where}\nCollectives "
            "are told apart only by their order. A rank on which another bucket is complete first "
            "would add its bucket to a different one of its peers. What must bucket b know of "
            "another one before it leaves?"
        )
    if len(log) > wanted:
        raise Wrong(
            f"bucket {log[-1]} was launched, but it does not have all of its gradients\n{where}"
        )
    if len(log) == wanted:
        return
    due = len(log)
    if counted[due] < come.count(due):
        raise Wrong(
            f"bucket {due} has all its gradients, but its params_with_grad holds {counted[due]} of "
            f"2 parameters, so it was not launched\n{where}\nThat set is how a bucket counts. When "
            "does a parameter come into it?"
        )
    raise Wrong(
        f"bucket {due} is complete and it is its turn, but it was not launched\n{where}\nTwo "
        "things can make a bucket due: a gradient of its own, and another bucket that leaves. "
        "Which of the two does your code notice?"
    )
