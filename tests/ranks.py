"""Real ranks for tests: `run_ranks(fn, 4, ...)` calls `fn` in four gloo processes on the CPU."""

from collections.abc import Callable
from typing import Any

from minimegatron import launcher

# Test modules import these; importing them once, in the process ranks are forked from, saves that
# time in every rank.
launcher.PRELOADED += ["pytest", "hypothesis", "numpy"]


def run_ranks(fn: Callable[..., Any], nprocs: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Calls `fn(*args)` in `nprocs` ranks; returns their values, rank 0's first.

    `fn` is a function at the top level of a test module. `torch.distributed` is initialised with
    gloo, torch uses one thread. A rank that raises or dies fails the test with its number and
    traceback; after `timeout` seconds the ranks that have not returned are named with their stacks.
    """
    return launcher.launch(fn, nprocs, *args, timeout=timeout, backend="gloo", device="cpu")
