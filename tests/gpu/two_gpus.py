"""Parts on two GPUs: messages, overlap, ranks that hang; and notebooks on any number.

Called by: `run_part`. Calls: `parity`, `notebook_runs`, and the hang doctor.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import minimegatron
from minimegatron.core import collectives
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, TensorMessage
from minimegatron.core.pipeline_parallel.utils import schedule
from minimegatron.core.utils import get_device
from minimegatron.launching.launcher import HangError, RankError
from tests import parity
from tests.doctor import hangs
from tests.gpu.one_gpu import layouts, wrong_collectives
from tests.gpu.place import Finding, Place, at_least, at_most, is_equal, no_problems
from tests.gpu.tensors import settle

HANG_TIMEOUT, NAMED_WITHIN = 2.0, 5.0
QUICK_TIMEOUT = 0.7
RAISED_WITHIN = 60.0
"""The start of the ranks is in it. Where an error waits for the GPU, it comes after ten minutes."""
HIDDEN_BOUND = 0.7
MOST_NOTEBOOKS, CORES_OF_A_NOTEBOOK = 4, 4
"""How many run at once: each rank of theirs takes some memory of its GPU."""


# -- messages --


def communicator() -> P2PCommunicator:
    """In a rank: that of a pipeline of all ranks."""
    config = ModelParallelConfig(
        pipeline_model_parallel_size=dist.get_world_size(), pipeline_dtype=torch.float32
    )
    return P2PCommunicator(dist.group.WORLD, config)


def wrong_messages() -> list[str]:
    """In a rank: lone, batched and empty messages to the next rank and from the previous one."""
    p2p, rank, size = communicator(), dist.get_rank(), dist.get_world_size()
    wrong = []
    for how in ("batched", "lone"):
        sent = torch.full((4,), float(rank), device=get_device())
        received = torch.full((4,), -1.0, device=get_device())
        messages = [
            TensorMessage(True, sent, (rank + 1) % size, "activation"),
            TensorMessage(False, received, (rank - 1) % size, "activation"),
        ]
        if how == "batched":
            works = p2p.start_batch(messages)
        else:  # even ranks send first, and odd ones receive first
            works = [p2p.start(message) for message in messages[:: -1 if rank % 2 else 1]]
        for work in works:
            work.wait()
        sent.fill_(float("nan"))  # its memory may be used again now
        if received.tolist() != [(rank - 1) % size] * 4:
            wrong.append(f"{how} on rank {rank}: {received.tolist()}")
    if p2p.start_batch([]):
        wrong.append("an empty batch is started")
    return wrong


def wrong_exchanges() -> list[str]:
    """In a rank: what went wrong of both kinds."""
    return wrong_collectives() + wrong_messages()


def messages(place: Place) -> Iterator[Finding]:
    """Collectives, messages, and an interleaved pipeline of two stages, overlapped or not."""
    from_all = place.launch(wrong_exchanges, 2)
    cases = [
        parity.Case(pp=2, vp=2, G=2, batched=False, overlap=overlap, deallocate=True)
        for overlap in (False, True)
    ]
    yield no_problems("collectives and messages", 18, sum(from_all, []))
    yield from layouts(place, cases[1:] if place.is_quick else cases)


# -- overlap --


def start_reduction(tensor: torch.Tensor) -> Any:
    """In a rank: a handle. The numbers do not matter."""
    return collectives.all_reduce(tensor, dist.group.WORLD, async_op=True)


def start_messages(tensor: torch.Tensor) -> Any:
    """In a rank: one tensor to the other rank and one from it, in a batch; a handle of both."""
    p2p, peer = communicator(), 1 - dist.get_rank()
    messages = [
        TensorMessage(True, tensor, peer, "activation"),
        TensorMessage(False, torch.empty_like(tensor), peer, "activation"),
    ]
    return [*p2p.start_batch(messages)]


def wait_for(handle: Any) -> None:
    for part in handle if isinstance(handle, list) else [handle]:
        part.wait()


def hidden_share(start: Callable[[torch.Tensor], Any], is_quick: bool) -> float:
    """In a rank: which share of the time that communication takes, products beside it hide.

    `start` begins it after each of the products. Compared are steps without it, with a wait after
    each, and with all waits at the end.
    """
    device = get_device()
    size, num_layers = (64, 2) if is_quick else (4096, 12)
    layers = [torch.randn(size, size, device=device) for _ in range(num_layers)]
    sent = [torch.ones(size, size, device=device) for _ in range(num_layers)]

    def step(communicate: bool, at_the_end: bool) -> float:
        settle()
        dist.barrier()
        begun, handles = time.perf_counter(), []
        for layer, tensor in zip(layers, sent, strict=True):
            layer @ layer
            if communicate:
                handles.append(start(tensor))
                if not at_the_end:
                    wait_for(handles.pop())
        for handle in handles:
            wait_for(handle)
        settle()
        return time.perf_counter() - begun

    ways = {"none": (False, False), "after each": (True, False), "at the end": (True, True)}
    seconds = {name: [] for name in ways}
    for _ in range(2 if is_quick else 10):
        for name, way in ways.items():
            seconds[name].append(step(*way))
    none, after_each, at_the_end = (statistics.median(times[1:]) for times in seconds.values())
    return (after_each - at_the_end) / max(after_each - none, 1e-9)


def overlap(place: Place) -> Iterator[Finding]:
    """Reductions and messages go on beside the computation."""
    judged = place.is_gpu and not place.is_quick
    for what, start in {"reductions": start_reduction, "messages": start_messages}.items():
        share = min(place.launch(hidden_share, 2, start, place.is_quick))
        yield at_least(f"share of the {what} that is hidden", share, HIDDEN_BOUND, judged)


# -- hangs --


@schedule
def receives_one_more(*, p2p_communicator: Any, num_microbatches: int, **_: Any) -> None:
    """Rank 0 waits for a message that rank 1 does not send."""
    if dist.get_rank() == 1:
        for _ in range(num_microbatches):
            p2p_communicator.send_backward(torch.ones(hangs.SHAPE, device=get_device()), False)
    else:
        for _ in range(num_microbatches + 1):
            p2p_communicator.recv_backward(hangs.SHAPE, False)
    p2p_communicator.finish()


def message_left_out() -> None:
    """In a rank: both go on to a collective, and wait there."""
    hangs.run_step(1, function=receives_one_more)
    all_reduce_ones()


def collective_left_out() -> None:
    """In a rank: rank 1 goes on to the collective of another group."""
    other = dist.new_group([0, 1])
    all_reduce_ones()
    if dist.get_rank() == 0:
        all_reduce_ones()
    all_reduce_ones(other)


def all_reduce_ones(group: Any = None) -> None:
    """Of all ranks, if no group is given; waits until it has been done."""
    collectives.all_reduce(torch.ones(1, device=get_device()), group or dist.group.WORLD)
    settle()


def raises_while_traced() -> None:
    """In a rank: rank 1 raises inside `trace` while rank 0 waits for it."""
    with minimegatron.trace():
        if dist.get_rank() == 1:
            raise ArithmeticError("planted")
        all_reduce_ones()


def verdict(place: Place, hang: Callable[[], None]) -> tuple[str, float]:
    """What the doctor says of two ranks that do `hang`, and seconds since one of them moved."""
    backend = "nccl" if place.is_gpu else "gloo"
    patience = QUICK_TIMEOUT if place.is_quick else HANG_TIMEOUT
    options = {"hang_timeout": patience, "timeout": 60, "backend": backend}
    try:
        minimegatron.launch(hang, 2, device=place.device, **options)
    except HangError as error:
        return error.diagnosis.kind, error.diagnosis.quiet
    return "no hang", 0.0


def planted_hangs(place: Place) -> Iterator[Finding]:
    """What one rank leaves out is named; an exception is not waited for."""
    within = HANG_TIMEOUT + NAMED_WITHIN if place.is_gpu else RAISED_WITHIN
    planted = {
        "message": (message_left_out, "missing partner"),
        "collective": (collective_left_out, "order"),
    }
    for what, (hang, expected) in planted.items():
        kind, seconds = verdict(place, hang)
        yield is_equal(f"a {what} that one rank leaves out", kind, expected)
        yield at_most("seconds until it is named", seconds, within)
    begun = time.monotonic()
    try:
        place.launch(raises_while_traced, 2)
        seen = "no error"
    except RankError as error:
        seen = f"rank {error.ranks[0]}: {error.summaries[error.ranks[0]]}"
    yield is_equal(
        "a rank that raises while it is traced", seen, "rank 1: ArithmeticError: planted"
    )
    yield at_most("seconds from start to end", time.monotonic() - begun, RAISED_WITHIN)


# -- notebooks --


def notebooks(place: Place) -> Iterator[Finding]:
    """Every notebook with 1, 2 and 8 GPUs in sight, as far as they are here."""
    # Jupyter's libraries take seconds, which each rank of the other parts would wait for too.
    from pages.notebook_runs import ANSI, executing, sources

    paths = [path for path in sources() if not place.is_quick or path.name.startswith("02_")]
    counts = [count for count in (1, 2, 8) if count <= place.num_gpus] or [0]
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    at_once = max(1, min(MOST_NOTEBOOKS, (os.cpu_count() or 1) // CORES_OF_A_NOTEBOOK))
    for count in counts:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(count)))
        try:
            with executing(paths, at_once) as runs:
                for done in (future.result() for future in runs.values()):
                    print(done.error)
                    # The error; before it stands the cell.
                    last = ANSI.sub("", done.error).strip()[-300:]
                    yield is_equal(f"{done.name}, GPUs: {count}", last or "runs", "runs")
        finally:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
