"""Checks the warm-up count, for a table of sizes: before any rank starts."""

import random
from types import ModuleType

from minimegatron.core.pipeline_parallel import schedule_table
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.check import Case, Result, check_value

OURS = "minimegatron.core.pipeline_parallel.schedule_table.get_num_warmup_microbatches"
EXPECTED = schedule_table.get_num_warmup_microbatches
SIZES = [(4, 8), (4, 2), (4, 1), (8, 3), (2, 4), (1, 4)]


def cases(seed: int) -> list[Case]:
    """Every stage of some pipelines."""
    draw = random.Random(seed)
    sizes = SIZES + [(draw.randint(2, 9), draw.randint(1, 9)) for _ in range(3)]
    words = ", ".join(f"p={p} M={M}" for p, M in sizes)
    return [Case(words, part="how many warm-up forwards", sizes=sizes)]


def run(student: ModuleType, case: Case) -> list[list[int]]:
    """The count of every stage."""
    return [
        [student.get_num_warmup_microbatches(p, rank, M) for rank in range(p)]
        for p, M in case.sizes
    ]


def judge(case: Case, found: list[list[int]]) -> Result:
    """Each count."""
    for (p, M), counts in zip(case.sizes, found, strict=True):
        for rank, count in enumerate(counts):
            what = f"get_num_warmup_microbatches({p}, {rank}, {M})"
            check_value(what, count, EXPECTED(p, rank, M), _why(p, rank, M))
    return Result({"counts": f"right for {sum(map(len, found))} stages"})


def _why(p: int, rank: int, M: int) -> str:
    after = p - rank - 1
    if after == 0:
        return (
            "No stage follows this one: its first backward can come right after its first forward."
        )
    why = (
        f"{after} stage{'s follow' if after > 1 else ' follows'} stage {rank} of {p}; microbatch 0 "
    )
    why += "must go through all of them before its gradient can come back."
    if after > M:
        there_are = num_of(M, "microbatch", "microbatches")
        why += (
            f"\nBut there {'is' if M == 1 else 'are'} only {there_are} to forward. How many can a "
            f"warm-up have?"
        )
    return why
