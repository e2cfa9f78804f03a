"""Communicators for tests over each kind of group that has tags: shared memory, and gloo twice.

A group of the backend "shm" has gloo inside where ranks share no memory; a program may also have made
a group over gloo itself.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders.work import SEND_LIMIT
from minimegatron.core.pipeline_parallel.p2p_communication import (
    ACTIVATION,
    P2PCommunicator,
    Shape,
    TensorMessage,
)
from tests.backend.shm_groups import LONG, needs_shared_memory
from tests.ranks import run_ranks

SHARED, GLOO_INSIDE, GLOO = "shared memory", "gloo inside", "gloo"
KINDS = [pytest.param(SHARED, marks=needs_shared_memory), GLOO_INSIDE, GLOO]
over_each_kind = pytest.mark.parametrize("kind", KINDS)


def run_over(kind: str, fn: Callable[..., Any], nprocs: int, *args: Any) -> list[Any]:
    """`run_ranks` of `fn(kind, *args)`."""
    return run_ranks(fn, nprocs, kind, *args, shared_memory=kind != GLOO_INSIDE)


def group_over(
    kind: str, ranks: Sequence[int] | None = None, seconds: float | None = None
) -> dist.ProcessGroup:
    """A new group of this kind, whose waits end after `seconds`. Collective over the world."""
    group = dist.new_group(ranks, LONG, "gloo" if kind == GLOO else "shm")
    if dist.get_rank() in (ranks or [dist.get_rank()]):
        assert group.name() == ("gloo" if kind == GLOO else "shm")
        assert (getattr(group, "mesh", None) is not None) == (kind == SHARED)
        # As `parallel_state` does: a first message over gloo waits for the other rank's connection.
        dist.all_reduce(torch.ones(1), group=group)
    if seconds is not None:  # not before all have come, on a busy machine
        gloo = group._get_backend(torch.device("cpu"))
        gloo.options._timeout = timedelta(seconds=seconds)
    return group


def communicator(group: dist.ProcessGroup, **options: Any) -> P2PCommunicator:
    """Of a pipeline of all ranks of `group`."""
    config = ModelParallelConfig(
        pipeline_model_parallel_size=group.size(), pipeline_dtype=torch.float32, **options
    )
    return P2PCommunicator(group, config)


def begin(p2p: P2PCommunicator, send_limit: int = SEND_LIMIT) -> None:
    """What a step's frame does before the first message."""
    collectives.begin_step([p2p.pp_group])
    p2p.begin_step(send_limit)


def end(p2p: P2PCommunicator) -> None:
    """Likewise after the last one."""
    p2p.finish()
    collectives.end_step([p2p.pp_group])


def give_up(p2p: P2PCommunicator) -> None:
    """Likewise where the step has failed."""
    p2p.abandon()
    collectives.abandon([p2p.pp_group], "planted")


def send(value: float, peer: int, payload: str = ACTIVATION, shape: Shape = (3, 2)) -> Any:
    """A message to `peer` that holds `value` in each of its places."""
    return TensorMessage(True, torch.full(tuple(shape), float(value)), peer, payload)


def receive(peer: int, payload: str = ACTIVATION, shape: Shape = (3, 2)) -> TensorMessage:
    """A message of this shape from `peer`."""
    return TensorMessage(False, None, peer, payload, shape)
