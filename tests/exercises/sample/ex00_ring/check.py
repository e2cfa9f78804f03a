"""Checks ring_sum. Called by the engine."""

from types import ModuleType

import torch
import torch.distributed as dist

from minimegatron.exercises.check import Case, Result, check_numbers


def cases(seed: int) -> list[Case]:
    """Two lengths."""
    return [Case(f"{n} values", n=n, seed=seed) for n in (1 + seed, 4 + seed)]


def run(student: ModuleType, case: Case) -> Result:
    """Compares with the sum over the same draws."""
    torch.manual_seed(case.seed)
    values = torch.randn(dist.get_world_size(), case.n, dtype=torch.float64)
    total = student.ring_sum(values[dist.get_rank()].clone())
    layout = {"world": dist.get_world_size()}
    check_numbers("the sum", total, values.sum(0), dist.get_rank(), layout)
    return Result({"values summed": case.n * dist.get_world_size()})
