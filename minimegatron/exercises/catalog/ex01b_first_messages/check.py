"""Checks a sum and a message on two ranks, and that the third function hangs as it should."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.exercises.check import Case, Result, Wrong, data_seed
from minimegatron.exercises.feedback_numbers import check_numbers

WORLD = 2
SUM, MESSAGE, HANG = "the sum", "the message", "the hang"


def cases(seed: int) -> list[Case]:
    """Each function once; the last one hangs."""
    data = data_seed(seed)
    sizes = [3, 4] if not seed else [2 + seed % 3, 1 + seed % 5]
    found = [
        Case(f"{part} of {n} numbers", part=part, n=n, seed=data)
        for part, n in zip((SUM, MESSAGE), sizes, strict=True)
    ]
    return [*found, Case("both receive first", part=HANG, hangs=True, n=2, seed=data)]


def run(student: ModuleType, case: Case) -> dict[str, Any] | None:
    """One function, on this rank's numbers."""
    value = _values(case)[dist.get_rank()]
    given = value.clone()
    if case.part == HANG:
        student.wait_for_ever(given)
        return None
    function = student.sum_of_all if case.part == SUM else student.hand_over
    return {"returned": function(given), "given": given}


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """What both ranks returned."""
    if case.part == HANG:
        raise Wrong(
            "wait_for_ever returned on both ranks\nEach rank must wait for a message that the other "
            "one sends only afterwards: on both ranks, dist.recv comes before dist.send."
        )
    values = _values(case)
    for rank, answer in enumerate(answers):
        if case.part == SUM:
            check_numbers(
                "sum_of_all(value)", answer["returned"], values.sum(0), rank, {"world": 2}
            )
        else:
            check_numbers("hand_over(value)", answer["returned"], values[0], rank)
        if not torch.equal(answer["given"], values[rank]):
            raise Wrong(
                f"rank {rank}: {case.part}: the tensor that was given has changed\nall_reduce and "
                "recv write into their tensor. Give them one of your own: value.clone()."
            )
    return Result({"result": [round(x, 3) for x in answers[0]["returned"].tolist()]})


def _values(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed + 5)
    return torch.randn(WORLD, case.n, dtype=torch.float64, generator=generator)
