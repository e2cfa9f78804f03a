"""Checks `_start` on messages that wait for each other: rings of several sizes, then real steps."""

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.transport import Message, Work
from minimegatron.exercises.bench_gpt import StepCase, on_these_ranks
from minimegatron.exercises.bench_gpt_judge import Reference
from minimegatron.exercises.bench_rendezvous import GET_TRANSPORT, RendezvousTransport
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed

OURS = "minimegatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._start"
REPLACES = (OURS,)
WORLD = 4


def cases(seed: int) -> list[Case]:
    """Three rings, and three training steps: M < p, an odd M, and a ring of two."""
    draw, data = random.Random(seed), data_seed(seed)
    found = [
        Case(f"a ring of {p} stages, all four messages", part="rings", ring=p) for p in (4, 3, 2)
    ]
    steps = [(4, None, draw.choice([1, 2, 3])), (4, 2, 4), (2, 2, draw.choice([2, 4]))]
    for p, v, M in steps:
        step = StepCase(pp=p, vp=v, num_microbatches=M, seed=data)
        words = "1F1B" if v is None else f"{v} chunks each"
        found.append(Case(f"{p} stages, {words}, M={M}", part="training steps", step=step.values))
    return found


def run(student: ModuleType, case: Case) -> dict[str, Any] | None:
    """One ring, or one training step, over messages without names."""

    def start(self: P2PCommunicator, parts: dict[str, Message]) -> dict[str, Work]:
        handles = student._start(self, parts)
        _check_handles(handles, parts)
        return handles

    with installed(start, OURS):
        return _run_ring(case.ring) if case.part == "rings" else _run_step(case)


def judge(case: Case, answers: list[Any]) -> Result:
    """What arrived, and how long it took; or a step's gradients."""
    if case.part == "rings":
        return Result({"time": _judge_ring(case.ring, answers)})
    reference = Reference(case.step, WORLD).run()
    reference.check_gradients([answer["gradients"] for answer in answers])
    first = answers[0]
    words = f"{first['num_messages']} sent by rank 0, in the time of {first['clock']}"
    return Result({"messages": words})


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


def _run_ring(p: int) -> dict[str, Any] | None:
    """Each stage sends both ways and receives both ways, at once. None on ranks left over."""
    groups = [dist.new_group(list(range(i, i + p))) for i in range(0, WORLD - p + 1, p)]
    place = dist.get_rank() // p
    if place >= len(groups):
        return None
    group = groups[place]
    config = ModelParallelConfig(
        pipeline_model_parallel_size=p, batch_p2p_comm=False, pipeline_dtype=torch.float64
    )
    transport = RendezvousTransport(group)
    communicator = P2PCommunicator(group, config, transport)
    activation = torch.full((1, 1, 1), 10.0 + group.rank(), dtype=torch.float64)
    gradient = torch.full((1, 1, 1), -10.0 - group.rank(), dtype=torch.float64)
    from_prev, from_next = communicator.send_forward_backward_recv_forward_backward(
        activation, gradient, True, True, (1, 1, 1)
    )
    return {
        "activation": from_prev.item(),
        "gradient": from_next.item(),
        "clock": transport.clock,
    }


def _judge_ring(p: int, answers: Sequence[Any]) -> str:
    found = [answer for answer in answers if answer is not None]
    if len(found) != WORLD // p * p:
        raise Wrong(f"{len(found)} of {WORLD // p * p} ranks answered")
    for rank, answer in enumerate(found):
        stage = rank % p
        ends = (("activation", 10.0 + (stage - 1) % p), ("gradient", -10.0 - (stage + 1) % p))
        for payload, expected in ends:
            if answer[payload] != expected:
                raise Wrong(
                    f"rank {rank}: the {payload} that arrived holds {answer[payload]:g}, but "
                    f"{expected:g} was sent"
                )
    time = max(answer["clock"] for answer in found)
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


def _run_step(case: Case) -> dict[str, Any]:
    """A GPT's gradients, with the student's order."""
    step = on_these_ranks(case.step)
    step.config.batch_p2p_comm = False
    made: list[RendezvousTransport] = []

    def transport_of(group: dist.ProcessGroup) -> RendezvousTransport:
        made.append(RendezvousTransport(group))
        return made[-1]

    with installed(transport_of, GET_TRANSPORT):
        step.forward_backward()
    return {
        "gradients": step.gradients(),
        "num_messages": made[0].num_messages,
        "clock": made[0].clock,
    }
