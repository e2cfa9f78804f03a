"""Real ranks for tests: `run_ranks(fn, 4, ...)` calls `fn` in four gloo processes on the CPU."""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from minimegatron.backend import connecting
from minimegatron.launching import launcher

# Test modules import these; importing them once, in the process ranks are forked from, saves that
# time in every rank.
launcher.PRELOADED += ["pytest", "hypothesis", "numpy"]
launcher.PRELOADED += [
    "minimegatron.pretrain_gpt",
    "minimegatron.core.dist_checkpointing.serialization",
    "minimegatron.training.pipeline_schedule",
    "tests.preloaded",
]


WITHOUT_SHARED_MEMORY = "MINIMEGATRON_TESTS_WITHOUT_SHARED_MEMORY"
"""Set to 1: ranks of all tests do without it, as on other systems than Linux; gloo carries all."""


def run_ranks(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    timeout: float = 60,
    shared_memory: bool = True,
) -> list[Any]:
    """Calls `fn(*args)` in `nprocs` ranks; returns their values, rank 0's first.

    `fn` is a function at the top level of a test module. `torch.distributed` is initialised with
    gloo, torch uses one thread. A rank that raises or dies fails the test with its number and
    traceback; after `timeout` seconds the ranks that have not returned are named with their stacks.
    """
    if not shared_memory or not has_shared_memory():
        fn, args = call_without_shared_memory, (fn, *args)
    return launcher.launch(fn, nprocs, *args, timeout=timeout, backend="gloo", device="cpu")


def has_shared_memory() -> bool:
    """False where `make test-gloo` runs."""
    return os.environ.get(WITHOUT_SHARED_MEMORY) != "1"


def call_without_shared_memory(fn: Callable[..., Any], *args: Any) -> Any:
    """In a rank: `fn(*args)`, as on a system that has no shared memory for ranks."""
    with mock.patch.object(connecting, "is_supported", lambda: False):
        return fn(*args)
