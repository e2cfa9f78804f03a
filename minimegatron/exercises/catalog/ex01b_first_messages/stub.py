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
import torch.distributed as dist  # noqa: F401


def sum_of_all(value: torch.Tensor) -> torch.Tensor:
    """The sum of both ranks' `value`, on both ranks. `value` itself stays as it is."""
    raise NotImplementedError("Write sum_of_all: a collective, called by every rank")


def hand_over(value: torch.Tensor) -> torch.Tensor:
    """Rank 0 sends its `value` to rank 1. Both return rank 0's value."""
    raise NotImplementedError("Write hand_over: what does rank 0 call, and what does rank 1?")


def wait_for_ever(value: torch.Tensor) -> None:
    """Both ranks receive first and send afterwards, to and from each other: nobody ever sends.

    This is right when it hangs. The check ends it after a few seconds, and shows what a hang report
    says: you will read many of them.
    """
    raise NotImplementedError("Write wait_for_ever: both ranks receive before they send")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
