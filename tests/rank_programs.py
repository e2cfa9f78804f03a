"""Programs as ranks, in the environment that torchrun gives them, but without torchrun.

Used by: tests that look at what becomes of each process. torchrun would start seconds later and tell
less: of all exit codes only the worst.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 200


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_programs(
    words: Sequence[str | Path], num_ranks: int, **environment: object
) -> list[subprocess.Popen]:
    """Starts `python WORDS` as each rank; all they print is in their `stdout`."""
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_RUN_ID": "none",
        **{name: str(value) for name, value in environment.items()},
    }
    return [
        subprocess.Popen(
            [sys.executable, *map(str, words)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for rank in range(num_ranks)
    ]


def run_programs(
    words: Sequence[str | Path], num_ranks: int, **environment: object
) -> tuple[list[int], list[str]]:
    """Their exit codes and what they printed, rank 0's first. None is left afterwards."""
    programs = start_programs(words, num_ranks, **environment)
    try:
        printed = [program.communicate(timeout=SECONDS)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()
    return [program.returncode for program in programs], printed
