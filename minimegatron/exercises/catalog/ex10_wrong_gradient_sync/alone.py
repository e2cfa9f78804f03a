"""Checks the predictions for three versions of the gradient sync: before any rank starts."""

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

from minimegatron.core.pipeline_parallel.schedule_table import get_num_warmup_microbatches
from minimegatron.exercises.catalog.ex10_wrong_gradient_sync import stub
from minimegatron.exercises.check import Case, Result, Wrong

VERSIONS = {"A": stub.version_a, "B": stub.version_b, "C": stub.version_c}
"""As they were handed out."""


def cases(seed: int) -> list[Case]:
    """Drawn sizes, edge cases among them."""
    draw = random.Random(seed)
    sizes = [(2, 3), (4, 8), (4, 2), (4, 1), (3, 3), (1, 4)]
    sizes += [(draw.randint(2, 6), draw.randint(1, 9)) for _ in range(4)]
    words = ", ".join(f"p={p} M={M}" for p, M in sizes)
    return [Case(words, part="predictions", sizes=sizes)]


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """The prediction for every version, size and stage, and the choice."""
    predict = student.num_backwards_that_send
    counts = [
        [[predict(version, p, r, M) for r in range(p)] for version in VERSIONS]
        for p, M in case.sizes
    ]
    return {"counts": counts, "right": student.RIGHT}


def judge(case: Case, found: dict[str, Any]) -> Result:
    """Against what the versions do."""
    for (p, M), of_size in zip(case.sizes, found["counts"], strict=True):
        for (name, version), counts in zip(VERSIONS.items(), of_size, strict=True):
            for r, count in enumerate(counts):
                expected = _count(version, p, r, M)
                if type(count) is not int or count != expected:
                    raise Wrong(_words(name, p, r, M, count, expected))
    if found["right"] not in VERSIONS:
        raise Wrong(
            f'RIGHT is {found["right"]!r}; set it to "A", "B" or "C", the version that is right'
        )
    return Result({"predicted": f"{3 * len(case.sizes)} timelines, right on every stage"})


class _Counter:
    """Stands for a `GradSync`, and counts the backwards that run while it is let go."""

    def __init__(self) -> None:
        self.is_let_go, self.num_backwards = False, 0

    def enable(self) -> None:
        self.is_let_go = True

    def disable(self) -> None:
        self.is_let_go = False


def _count(version: Callable, p: int, r: int, M: int) -> int:
    counter = _Counter()
    for _ in version(get_num_warmup_microbatches(p, r, M), M, counter):
        counter.num_backwards += counter.is_let_go
    return counter.num_backwards


def _words(version: str, p: int, r: int, M: int, found: Any, expected: int) -> str:
    num_warmup = get_num_warmup_microbatches(p, r, M)
    return (
        f"version {version}, p={p}, M={M}, stage {r}: you predict {found!r}, but gradients are let "
        f"go during {expected} of its backwards\n"
        f"This stage has {num_warmup} warm-up microbatches, so its steady loop runs "
        f"{M - num_warmup} times and its cool-down loop {num_warmup} times."
    )
