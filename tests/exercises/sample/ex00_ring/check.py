"""Checks ring_sum."""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.check import Case, Result, data_seed

WORLD = 2


def cases(seed: int) -> list[Case]:
    """Two lengths."""
    return [Case(f"{n} values", n=n, seed=data_seed(seed)) for n in (1 + seed, 4 + seed)]


def run(student: ModuleType, case: Case) -> Any:
    """What the student's function returns on this rank."""
    given = student.ring_sum(_values(case)[dist.get_rank()].clone())
    return given if given is None else given + 0


def judge(case: Case, answers: list[Any]) -> Result:
    """Compares with the sum over the same draws."""
    for rank, total in enumerate(answers):
        check_numbers("the sum", total, _values(case).sum(0), rank, {"world": WORLD})
    return Result({"values summed": case.n * WORLD})


def _values(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randn(WORLD, case.n, dtype=torch.float64, generator=generator)
