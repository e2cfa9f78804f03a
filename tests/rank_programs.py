"""Programs as ranks, in the environment that torchrun gives them, but without torchrun.

Used by: tests that look at what becomes of each process. torchrun would start seconds later and tell
less: of all exit codes only the worst.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[1]
SECONDS = 200


@contextlib.contextmanager
def started_programs(
    words: Sequence[str | Path], num_ranks: int, **environment: object
) -> Iterator[list[subprocess.Popen]]:
    """`python WORDS` as each rank; all they print is in their `stdout`. None is left afterwards."""
    # Served by this process, as torchrun's agent does: a rank that ends early takes no store along.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **{name: str(value) for name, value in environment.items()},
    }
    programs: list[subprocess.Popen] = []
    try:
        for rank in range(num_ranks):
            program = subprocess.Popen(
                [sys.executable, *map(str, words)],
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
            )
            programs.append(program)
        yield programs
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def run_programs(
    words: Sequence[str | Path], num_ranks: int, **environment: object
) -> tuple[list[int], list[str]]:
    """Their exit codes and what they printed, rank 0's first."""
    with started_programs(words, num_ranks, **environment) as programs:
        printed = [program.communicate(timeout=SECONDS)[0] for program in programs]
        return [program.returncode for program in programs], printed
