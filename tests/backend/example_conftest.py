import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

import minimegatron.backend  # noqa: F401  makes "shm" known to torch


def run_rank(rank, size, url, fn):
    dist.init_process_group("cpu:shm", url, rank=rank, world_size=size)
    fn()
    dist.destroy_process_group()


@pytest.fixture
def on_ranks(tmp_path):
    """`on_ranks(fn, 2)` calls `fn` in two processes; fails if one raises."""
    url = f"file://{tmp_path}/store"
    return lambda fn, size: mp.spawn(run_rank, (size, url, fn), nprocs=size)
