"""A program that knows `torch.distributed` alone, for `torchrun`.

Run: torchrun --nproc-per-node 2 tests/backend/plain_script.py BACKEND [raise FILE]. Trains copies of a
layer; rank 0 prints its weights. With `raise`, rank 1 raises after the training while rank 0 waits for
it, and rank 0 writes what it is told into FILE.
"""

import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import minimegatron.backend  # noqa: F401  its import makes "shm" known to torch


def train() -> DistributedDataParallel:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
    return model


def fail_on_rank_1(file: Path) -> None:
    # When one of its ranks has failed, torchrun ends the others with this signal.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if dist.get_rank() == 1:
        raise ValueError("planted")
    try:
        dist.all_reduce(torch.ones(3))
    except Exception as error:
        file.write_text(f"{type(error).__name__}: {error}")
        raise


def main() -> None:
    torch.set_num_threads(1)
    backend, *others = sys.argv[1:]
    dist.init_process_group(backend, timeout=timedelta(hours=1))
    model = train()
    if dist.get_rank() == 0:
        print([p.tolist() for p in model.parameters()], flush=True)
    if others:
        fail_on_rank_1(Path(others[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
