"""Groups for the tests of the backend: over shared memory, and over gloo beside it."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from minimegatron.backend import NAME
from tests.ranks import has_shared_memory, run_ranks

needs_shared_memory = pytest.mark.skipif(
    not has_shared_memory(), reason="gloo carries all: nothing is shared, and it names no rank"
)

LONG = timedelta(minutes=10)
"""Longer than any test may take: what ends earlier was not ended by its time-out."""


def make_group(
    ranks: list[int] | None = None, timeout: timedelta = LONG, backend: str = NAME
) -> dist.ProcessGroup:
    """A new group, over shared memory if `backend` is not given. Collective over the world."""
    return dist.new_group(ranks, timeout=timeout, backend=backend)


def run_case(fn: Callable[..., Any], nprocs: int, *args: Any, timeout: float = 60) -> list[Any]:
    """`run_ranks` with more time: eight ranks share two cores with other tests."""
    return run_ranks(fn, nprocs, *args, timeout=timeout)


def refusal(call: Callable[..., Any], *args: Any) -> str:
    """The type and the words of what `call(*args)` raises; "" if it raises nothing."""
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def in_threads(*calls: Callable[[], Any]) -> None:
    """Runs all calls at once; raises the first exception of any."""
    errors: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
