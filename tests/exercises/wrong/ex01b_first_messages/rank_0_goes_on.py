"""Rank 0 does not return after its send, and receives from itself.

Expected: Only rank 1 receives here. Does rank 0 return after its send?
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
    dist.recv(received, src=0)
    return received


def wait_for_ever(value: torch.Tensor) -> None:
    """Both ranks receive first and send afterwards, to and from each other: nobody ever sends."""
    other = 1 - dist.get_rank()
    received = torch.empty_like(value)
    dist.recv(received, src=other)
    dist.send(value, dst=other)
