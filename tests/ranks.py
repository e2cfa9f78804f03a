"""Real ranks for tests: `run_ranks(fn, 4, ...)` calls `fn` in four processes on the CPU."""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from minimegatron.backend import in_place_of, mesh
from minimegatron.launching import launcher

# Test modules import these; importing them once, in the process ranks are forked from, saves that
# time in every rank.
launcher.PRELOADED += [
    "pytest",
    "hypothesis",
    "numpy",
    "minimegatron.pretrain_gpt",
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

    `fn` is a function at the top level of a test module. `torch.distributed` is initialised over
    shared memory, in gloo's place; torch uses one thread. A rank that raises or dies fails the test
    with its number and traceback; after `timeout` seconds the ranks that have not returned are named
    with their stacks.
    """
    if not shared_memory or not has_shared_memory():
        fn, args = call_without_shared_memory, (fn, *args)
    return launcher.launch(fn, nprocs, *args, timeout=timeout, backend="gloo", device="cpu")


def has_shared_memory() -> bool:
    """False where `make test-gloo` runs."""
    return os.environ.get(WITHOUT_SHARED_MEMORY) != "1"


def call_without_shared_memory(fn: Callable[..., Any], *args: Any) -> Any:
    """In a rank: `fn(*args)`, as on a system that has no shared memory for ranks.

    The default group is made anew, since it has shared memory already.
    """
    store = dist.PrefixStore("without shared memory", c10d._get_default_store())
    seat = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    with mock.patch.object(mesh, "is_supported", lambda: False):
        dist.destroy_process_group()
        dist.init_process_group(in_place_of("gloo"), store=store, **seat)
        return fn(*args)
