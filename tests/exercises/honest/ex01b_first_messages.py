"""First messages: two ranks sum a tensor, send one, and then wait for each other for ever.

Started by: you, and `minimegatron exercises check`. Two processes run this file at the same time. They
share nothing: what one of them knows, the other knows only if it was sent.

Your tools:

    dist.get_rank()                  0 in one process, 1 in the other
    dist.all_reduce(tensor)          every rank's tensor becomes the sum over all ranks, in place
    dist.send(tensor, dst=1)         sends to rank 1
    dist.recv(tensor, src=0)         waits for a message from rank 0, and writes it into `tensor`
"""

import torch
import torch.distributed as dist


def sum_of_all(value: torch.Tensor) -> torch.Tensor:
    total = value.clone()
    dist.all_reduce(total)
    return total


def hand_over(value: torch.Tensor) -> torch.Tensor:
    me = dist.get_rank()
    if me == 0:
        dist.send(value, dst=1)
        return value
    incoming = torch.empty_like(value)
    dist.recv(incoming, src=0)
    return incoming


def wait_for_ever(value: torch.Tensor) -> None:
    other = 1 - dist.get_rank()
    incoming = torch.empty_like(value)
    dist.recv(incoming, src=other)
    dist.send(value, dst=other)


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
