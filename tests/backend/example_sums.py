import torch
import torch.distributed as dist


def add_up():
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    assert total == 3


def hand_on():
    number = torch.tensor(7 if dist.get_rank() == 0 else 0)
    dist.send(number, dst=1) if dist.get_rank() == 0 else dist.recv(number, src=0)
    assert number == 7


def test_sum(on_ranks):
    on_ranks(add_up, 2)


def test_message(on_ranks):
    on_ranks(hand_on, 2)
