"""Groups for the tests of the backend: over shared memory, and over gloo beside it."""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import minimegatron.backend  # noqa: F401  (registers the backend)
from tests.ranks import run_ranks

BACKEND = os.environ.get("MINIMEGATRON_TESTS_BACKEND", "shm")
"""The backend that is tested. `gloo` shows what the tests expect of it."""

LONG = timedelta(minutes=10)
"""Longer than any test may take: what ends earlier was not ended by its time-out."""


def make_group(
    ranks: list[int] | None = None, timeout: timedelta = LONG, backend: str = BACKEND
) -> dist.ProcessGroup:
    """A new group of the tested backend. Collective over the world."""
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
