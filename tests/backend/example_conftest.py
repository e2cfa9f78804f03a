import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

import minimegatron.backend  # noqa: F401  its import makes "shm" known to torch


def run_rank(rank, size, store, fn):
    dist.init_process_group("cpu:shm", init_method=f"file://{store}", rank=rank, world_size=size)
    fn()
    dist.destroy_process_group()


@pytest.fixture
def on_ranks(tmp_path):
    """`on_ranks(fn, 2)` calls `fn` in two processes; the test fails if it raises in one."""
    return lambda fn, size: mp.spawn(run_rank, (size, tmp_path / "store", fn), nprocs=size)
