"""Two ranks, from nothing to the end of their first training step, by three ways of starting them.

Run by: `start_time`, as `python -m tests.benchmarks.first_step launch`, `spawn`, or under torchrun
without a word. Rank 0's time of day at the end of the step is printed; whoever began the process knows
when that was.
"""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist

import minimegatron
from minimegatron.core import parallel_state
from tests.benchmarks.megatron_like import OURS, Shape, Training, load

NUM_RANKS = 2
SHAPE = Shape(2, 32, 4, 16, 2, 4, 128, pp=NUM_RANKS)


def first_step() -> float:
    """Builds a small GPT over two stages and trains one step; the time of day then."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=NUM_RANKS)
    Training(load(OURS), SHAPE).step()
    return time.time()


def by_launch() -> float:
    """Rank 0's end."""
    return minimegatron.launch(first_step, NUM_RANKS, backend="gloo", device="cpu")[0]


def _spawned(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS
    )
    _print_on_rank_0(first_step())
    dist.barrier()  # nobody leaves before all are here
    dist.destroy_process_group()


def by_spawn() -> None:
    """`torch.multiprocessing.spawn`: an interpreter for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_spawned, (port,), nprocs=NUM_RANKS)


def _print_on_rank_0(end: float) -> None:
    if dist.get_rank() == 0:
        print(f"end {end:.6f}", flush=True)


def main() -> None:
    """One way; of `launch` also how long a second one takes in the same process."""
    way = sys.argv[1] if len(sys.argv) > 1 else "torchrun"
    if way == "launch":
        print(f"end {by_launch():.6f}")
        begun = time.time()
        print(f"again {by_launch() - begun:.6f}")
    elif way == "spawn":
        by_spawn()
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        _print_on_rank_0(first_step())
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
