import torch
import torch.distributed as dist


def add_up():
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    assert total == 3


def test_sum(on_ranks):
    on_ranks(add_up, 2)
