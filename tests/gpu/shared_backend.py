"""What several ranks on one GPU do over the backend of shared memory, with tensors of that GPU.

Called by: `one_gpu.sharing`.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

import minimegatron.backend
from minimegatron.core.utils import get_device
from tests.gpu.place import Finding, Place, no_problems

SIZES = (0, 5, 4096, (1 << 18) + 1)
"""Elements of float32: the last is more than what goes through shared memory."""


def over_the_backend() -> list[str]:
    """In a rank: what is wrong with collectives and messages of its device's tensors."""
    group = dist.new_group(backend=minimegatron.backend.NAME)
    rank, size = dist.get_rank(), dist.get_world_size()
    problems: list[str] = []

    def check(what: str, found: torch.Tensor, value: float) -> None:
        if found.device.type != get_device().type or not bool((found == value).all()):
            problems.append(f"rank {rank}: {what} of {found.numel()} elements")

    for number in SIZES:
        mine = torch.full((number,), float(rank + 1), device=get_device())
        total = mine.clone()
        dist.all_reduce(total, group=group)
        check("all_reduce", total, size * (size + 1) / 2)
        told = mine.clone()
        dist.broadcast(told, 1, group=group)
        check("broadcast", told, 2.0)
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine, group=group)
        for other, part in enumerate(parts):
            check("all_gather", part, other + 1.0)
        work = dist.all_reduce(mine_again := mine.clone(), group=group, async_op=True)
        check("all_reduce by its future", work.get_future().wait()[0], size * (size + 1) / 2)
        came = torch.empty_like(mine)
        sent = dist.isend(mine_again, (rank + 1) % size, group=group, tag=3)
        dist.recv(came, (rank - 1) % size, group=group, tag=3)
        sent.wait()
        check("a message", came, size * (size + 1) / 2)
    dist.destroy_process_group(group)
    return problems


def beside_the_numbers(place: Place) -> Iterator[Finding]:
    """Two ranks in the rehearsal, four on a GPU."""
    found = place.launch(over_the_backend, 2 if place.is_quick else 4, shared=True)
    problems = [problem for of_rank in found for problem in of_rank]
    yield no_problems("collectives and messages over shared memory", 5 * len(SIZES), problems)
