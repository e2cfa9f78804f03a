"""Both ranks receive, so rank 0 waits. Rank 1 is right, and must not be marked.

Expected: Rank 1 has come out of your code, and waits for the others in the check. Still in there:
rank 0 waits for a message from rank 1
"""

import torch
import torch.distributed as dist


def sum_of_all(value: torch.Tensor) -> torch.Tensor:
    """The sum of both ranks' `value`, on both ranks. `value` itself stays as it is."""
    total = value.clone()
    dist.all_reduce(total)
    return total


def hand_over(value: torch.Tensor) -> torch.Tensor:
    """Rank 0 sends its `value` to rank 1. Both return rank 0's value."""
    if dist.get_rank() == 0:
        dist.send(value, dst=1)
    received = torch.empty_like(value)
    dist.recv(received, src=1 - dist.get_rank())
    return received


def wait_for_ever(value: torch.Tensor) -> None:
    """Both ranks receive first and send afterwards, to and from each other: nobody ever sends."""
    other = 1 - dist.get_rank()
    received = torch.empty_like(value)
    dist.recv(received, src=other)
    dist.send(value, dst=other)
