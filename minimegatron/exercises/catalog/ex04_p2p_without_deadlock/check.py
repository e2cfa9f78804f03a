"""Checks `_start` on messages that wait for each other: rings of several sizes, then real steps."""

import random
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.transport import Message, Work
from minimegatron.exercises.bench_gpt import (
    StepCase,
    check_gradients,
    on_these_ranks,
    reference_gradients,
)
from minimegatron.exercises.bench_rendezvous import GET_TRANSPORT, RendezvousTransport
from minimegatron.exercises.check import Case, Result, Wrong, installed

OURS = "minimegatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._start"


def cases(seed: int) -> list[Case]:
    """Three rings, and three training steps: M < p, an odd M, and a ring of two."""
    draw = random.Random(seed)
    rings = [Case(f"a ring of {p} stages, all four messages", p=p, vp=None, M=0) for p in (4, 3, 2)]
    steps = [(4, None, draw.choice([1, 2, 3])), (4, 2, 4), (2, 2, draw.choice([2, 4]))]
    return rings + [
        Case(
            f"{p} stages, {'1F1B' if v is None else f'{v} chunks each'}, M={M}",
            p=p,
            vp=v,
            M=M,
            seed=seed,
        )
        for p, v, M in steps
    ]


def run(student: ModuleType, case: Case) -> Result:
    """One ring, or one training step, over messages without names."""

    def start(self: P2PCommunicator, parts: dict[str, Message]) -> dict[str, Work]:
        handles = student._start(self, parts)
        _check_handles(handles, parts)
        return handles

    with installed(start, OURS):
        return run_ring(case.p) if case.M == 0 else run_step(case)


def _check_handles(handles: Any, parts: dict[str, Message]) -> None:
    where = f"rank {dist.get_rank()}: _start"
    if not isinstance(handles, dict):
        raise Wrong(f"{where} returned {handles!r}; a dict of handles by name is expected")
    if missing := [name for name in parts if name not in handles]:
        raise Wrong(
            f"{where} was given {', '.join(parts)}, but returned no handle for "
            f"{', '.join(missing)}\nEvery message of `parts` must be started, or its other end "
            "waits for ever."
        )
    if extra := [name for name in handles if name not in parts]:
        raise Wrong(f"{where} returned a handle for {extra[0]}, which is not in `parts`")


# -- A ring --


def run_ring(p: int) -> Result:
    """Each stage sends both ways and receives both ways, at once."""
    world = dist.get_world_size()
    groups = [dist.new_group(list(range(i, i + p))) for i in range(0, world - p + 1, p)]
    place = dist.get_rank() // p
    if place >= len(groups):
        return Result()
    group = groups[place]
    config = ModelParallelConfig(
        pipeline_model_parallel_size=p, batch_p2p_comm=False, pipeline_dtype=torch.float64
    )
    transport = RendezvousTransport(group)
    communicator = P2PCommunicator(group, config, transport)
    stage = group.rank()
    activation = torch.full((1, 1, 1), 10.0 + stage, dtype=torch.float64)
    gradient = torch.full((1, 1, 1), -10.0 - stage, dtype=torch.float64)
    from_prev, from_next = communicator.send_forward_backward_recv_forward_backward(
        activation, gradient, True, True, (1, 1, 1)
    )
    ends = (
        ("activation", from_prev, 10.0 + (stage - 1) % p),
        ("gradient", from_next, -10.0 - (stage + 1) % p),
    )
    for payload, found, expected in ends:
        if found.item() != expected:
            raise Wrong(
                f"rank {dist.get_rank()}: the {payload} that arrived holds {found.item():g}, but "
                f"{expected:g} was sent"
            )
    return Result({"time": _check_time(transport, p)})


def _check_time(transport: RendezvousTransport, p: int) -> str:
    """How long the exchange took, of which all stages know the slowest."""
    times = [torch.zeros(1, dtype=torch.int64) for _ in range(p)]
    dist.all_gather(times, torch.tensor([transport.clock]), group=transport.group)
    time = max(int(each) for each in times)
    if p % 2 == 0 and time > 4:
        raise Wrong(
            f"right, but slow: all four messages over {p} stages took {time} message times, one "
            "after the other; 4 are enough for any even number of stages\n"
            "Some stages wait for a chain of others: stage 1 can send only when it has received, "
            "and so on. Let every second stage begin with a send, so that half of all messages "
            "travel at the same time."
        )
    return f"{4 * p} messages in the time of {time}"


# -- A training step --


def run_step(case: Case) -> Result:
    """A GPT's gradients, with the student's order, against those of one process."""
    step_case = StepCase(pp=case.p, vp=case.vp, num_microbatches=case.M, seed=case.seed)
    step = on_these_ranks(step_case)
    step.config.batch_p2p_comm = False
    made: list[RendezvousTransport] = []

    def transport_of(group: dist.ProcessGroup) -> RendezvousTransport:
        made.append(RendezvousTransport(group))
        return made[-1]

    with installed(transport_of, GET_TRANSPORT):
        step.forward_backward()
    check_gradients(step, reference_gradients(step_case, step.groups.dp.size()))
    return Result(
        {"messages": f"{made[0].num_messages} sent by rank 0, in the time of {made[0].clock}"}
    )
