"""Which bucket is launched when, asked of `register_grad_ready` alone: buckets that send nothing.

Megatron has no counterpart.
"""

from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from minimegatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.check import Wrong

ORDERS = [
    ("in the order of the buckets", (2, 2, 2), 1, [0, 0, 1, 1, 2, 2], [0, 1, 1, 2, 2, 3]),
    ("for the last bucket first", (2, 2, 2), 1, [2, 2, 1, 1, 0, 0], [0, 0, 0, 0, 0, 3]),
    ("in mixed order", (2, 2, 2), 1, [0, 1, 1, 0, 2, 2], [0, 0, 0, 2, 2, 3]),
    ("for the last bucket first", (1, 1, 3, 1, 1, 1), 1, [5, 4, 3, 2, 2, 2, 1, 0], [0] * 7 + [6]),
    ("for the last bucket first", (1, 2, 1), 2, [2, 1, 1, 0], [0, 0, 0, 3]),
]
"""In words; how many gradients each bucket has; models that are wrapped, each with such buckets, whose
gradients come in turn; whose gradient comes when; buckets launched after each."""


class _Group(_ParamAndGradBucketGroup):
    """A bucket that notes its launch and sends nothing."""

    def __init__(self, number: int, size: int, log: list[int]):
        self.number, self.log = number, log
        self.params = {torch.nn.Parameter(torch.zeros(1)): f"{number}.{i}" for i in range(size)}
        self.params_with_grad = set()
        self.grad_reduce_handles = None
        self.is_last_microbatch = True
        self.previous_bucket_group = self.next_bucket_group = None

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        if self.grad_reduce_handles is not None:
            raise Wrong(f"bucket {self.number} was launched twice in one step")
        self.grad_reduce_handles = [_Handle(self.number)]
        self.log.append(self.number)


class _Handle:
    """What is under way while backward goes on. Nobody may wait for it yet."""

    def __init__(self, number: int):
        self._number = number

    def wait(self, timeout: Any = None) -> bool:
        raise Wrong(
            f"bucket {self._number} was launched, and then your code waited until it had arrived\n"
            "What does backward do meanwhile? Who needs the sum, and when?"
        )

    is_completed = wait


def _buckets(sizes: Sequence[int]) -> tuple[list[_Group], list[int]]:
    log: list[int] = []
    groups = [_Group(number, size, log) for number, size in enumerate(sizes)]
    for earlier, later in pairwise(groups):
        earlier.next_bucket_group, later.previous_bucket_group = later, earlier
    return groups, log


def run_launch(student: ModuleType) -> dict[str, Any]:
    """Buckets while gradients accumulate, in order, out of order, and of two models at once."""
    groups, log = _buckets((2, 2, 2))
    for group in groups:
        group.is_last_microbatch = False
        for param in group.params:
            student.register_grad_ready(group, param)
    found = {"early": list(log), "num_counted": len(groups[0].params_with_grad), "logs": []}
    for _, sizes, num_models, order, _ in ORDERS:
        models = [_buckets(sizes) for _ in range(num_models)]
        waiting = [[list(group.params) for group in groups] for groups, _ in models]
        logs = []
        for number in order:
            seen = []
            for (groups, log), its_waiting in zip(models, waiting, strict=True):
                student.register_grad_ready(groups[number], its_waiting[number].pop(0))
                seen.append(_seen(groups, log))
            logs.append(seen)
        found["logs"].append(logs)
    return found


def _seen(groups: Sequence[_Group], log: list[int]) -> dict[str, list[int]]:
    """What was launched; of each bucket, how many are counted, and how many are not its own."""
    counted = [group.params_with_grad for group in groups]
    odd = [
        sum(one not in group.params for one in found)
        for group, found in zip(groups, counted, strict=True)
    ]
    return {"log": list(log), "counted": list(map(len, counted)), "odd": odd}


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
    for (words, sizes, num_models, order, wanted), logs in zip(ORDERS, found["logs"], strict=True):
        what = _buckets_words(sizes)
        if num_models > 1:
            what = f"{num_models} models are wrapped, and take turns. Each has {what}"
        for number, (seen, num) in enumerate(zip(logs, wanted, strict=True)):
            for one in seen:
                _judge_log(f"{what}; gradients come {words}", order[: number + 1], one, num, sizes)


def _buckets_words(sizes: Sequence[int]) -> str:
    """How many buckets, of how many gradients.

    >>> _buckets_words((2, 2, 2)), _buckets_words((1, 3))
    ('3 buckets of 2 gradients each', '2 buckets (numbers of gradients: 1, 3)')
    """
    if len(set(sizes)) == 1:
        return f"{len(sizes)} buckets of {sizes[0]} gradients each"
    return f"{len(sizes)} buckets (numbers of gradients: {', '.join(map(str, sizes))})"


def _judge_log(
    words: str, come: list[int], seen: dict[str, list[int]], wanted: int, sizes: Sequence[int]
) -> None:
    """What was launched after the gradients that have come, each named by its bucket."""
    log, counted = seen["log"], seen["counted"]
    where = f"The case: {words}. So far they came for bucket {', then '.join(map(str, come))}."
    if any(seen["odd"]):
        bucket = next(number for number, odd in enumerate(seen["odd"]) if odd)
        raise Wrong(
            f"the params_with_grad of bucket {bucket} holds something that is none of its parameters\n"
            f"{where}\nWhose gradient is in is to be noted, and not only how many are: what was the "
            "function given?"
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
            f"{num_of(sizes[due], 'parameter')}, so it was not launched\n{where}\nThat set is how a "
            "bucket counts. When does a parameter come into it?"
        )
    raise Wrong(
        f"bucket {due} is complete and it is its turn, but it was not launched\n{where}\nTwo "
        "things can make a bucket due: a gradient of its own, and another bucket that leaves. "
        "Which of the two does your code notice?"
    )
