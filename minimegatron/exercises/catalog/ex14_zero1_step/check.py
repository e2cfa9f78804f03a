"""Checks the four functions of ZeRO-1: the ranges alone, then whole training steps.

Called by: the exercises' engine, on 4 ranks. Calls: `bench_gpt`.
"""

import contextlib
import random
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.distributed.param_and_grad_buffer import lay_out_buffer
from minimegatron.core.optimizer.distrib_optimizer import local_ranges
from minimegatron.exercises.bench_gpt import (
    GptStep,
    StepCase,
    on_these_ranks,
    one_process,
    wrong_gradient,
)
from minimegatron.exercises.check import Case, Result, Wrong, check_numbers, installed

BUFFER = "minimegatron.core.distributed.param_and_grad_buffer."
RANGES = "minimegatron.core.optimizer.distrib_optimizer.local_ranges"
NUM_STEPS = 2
OURS = {"local_ranges": local_ranges}
"""In a dict, where `installed` does not replace it."""


def cases(seed: int) -> list[Case]:
    """Buffers of drawn sizes, then trainings with several replicas."""
    draw = random.Random(seed)
    buffers = [
        {"numels": [300, 20, 100], "bucket_size": None, "d": 2},
        {"numels": [700, 64, 5, 400, 64], "bucket_size": 300, "d": 3},
        {"numels": draw.sample(range(1, 900), 6), "bucket_size": 500, "d": draw.choice([4, 5])},
    ]
    arithmetic = [
        Case(
            f"the ranges alone, {sizes['d']} ranks, {len(sizes['numels'])} parameters, "
            + ("one bucket" if sizes["bucket_size"] is None else "several buckets"),
            **sizes,
        )
        for sizes in buffers
    ]
    both = {"distributed_optimizer": True, "overlap_grad_reduce": True, "seed": seed}
    trainings = {
        "4 replicas": StepCase(num_layers=2, num_microbatches=1, **both),
        "2 stages, 2 replicas": StepCase(pp=2, clip_grad=0.05, **both),
    }
    return arithmetic + [Case(name, step=step) for name, step in trainings.items()]


def run(student: ModuleType, case: Case) -> Result:
    """Ranges, or a training."""
    if "numels" in case.values:
        return _check_ranges(student, case)
    with contextlib.ExitStack() as stack:
        stack.enter_context(installed(student.local_ranges, RANGES))
        stack.enter_context(installed(student.shard_buffer, BUFFER + "shard_buffer"))
        for name in ("_reduce", "_gather"):
            function = _with_handle(getattr(student, name), name)
            stack.enter_context(installed(function, f"{BUFFER}_ParamAndGradBucketGroup.{name}"))
        step = on_these_ranks(case.step)
        reference = one_process(case.step, step.groups.dp.size())
        for number in range(NUM_STEPS):
            reference.forward_backward()
            step.forward_backward()
            step.meet()
            _check_gradient_shards(step, reference.gradients(), number)
            reference.optimizer.step()
            step.optimizer.step()
            step.meet()
            _check_weights(step, reference, number)
    return Result(_achieved(step))


def _with_handle(function: Callable, name: str) -> Callable:
    """`function`, which must return something to wait for."""

    def checked(*arguments: Any) -> Any:
        handle = function(*arguments)
        if not hasattr(handle, "wait"):
            raise Wrong(
                f"rank {dist.get_rank()}: {name} returned {handle!r}; return the handle that the "
                "collective gives with async_op=True"
            )
        return handle

    return checked


# -- The ranges alone --


def _check_ranges(student: ModuleType, case: Case) -> Result:
    layout = lay_out_buffer(case.numels, [False] * len(case.numels), case.bucket_size, case.d)
    vector = torch.arange(layout.numel)
    buckets = [SimpleNamespace(offset=a, grad_data=vector[a:b]) for a, b in layout.buckets]
    names = [f"p{i}" for i in range(len(case.numels))]
    for rank in range(case.d):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: case.d)
        buffer = SimpleNamespace(
            data_parallel_group=group,
            buckets=buckets,
            param_index_map=dict(zip(names, layout.params, strict=True)),
        )
        expected, got = OURS["local_ranges"](buffer), student.local_ranges(buffer)
        if not isinstance(got, dict):
            raise Wrong(f"local_ranges returned {got!r}; return a dict {{param: (first, end)}}")
        for name, place in buffer.param_index_map.items():
            if got.get(name) != expected.get(name):
                raise Wrong(_range_words(buffer, rank, name, place, got, expected))
        bucket = buckets[-1].grad_data
        shard = student.shard_buffer(bucket, group)
        _check_shard(shard, bucket, rank, case.d)
    return Result({"buckets": len(buckets), "shard": f"{layout.numel // case.d} elements"})


def _check_shard(shard: Any, bucket: torch.Tensor, rank: int, d: int) -> None:
    size = bucket.numel() // d
    wanted = bucket[rank * size : (rank + 1) * size]
    check_numbers(f"shard_buffer on rank {rank} of {d}, of a bucket", shard, wanted)
    if shard.data_ptr() != wanted.data_ptr():
        raise Wrong(
            f"shard_buffer on rank {rank} of {d} returns a copy; the reduce-scatter must write into "
            "the buffer itself: return a slice"
        )


def _range_words(
    buffer: Any, rank: int, name: str, place: tuple[int, int, int], got: dict, expected: dict
) -> str:
    start, end, bucket_id = place
    bucket, d = buffer.buckets[bucket_id], buffer.data_parallel_group.size()
    size = bucket.grad_data.numel() // d
    first = bucket.offset + rank * size
    yours, right = got.get(name), expected.get(name)
    lines = [
        f"rank {rank} of {d}: local_ranges has {_said(yours)} for {name}, expected {_said(right)}",
        f"  {name} is [{start}, {end}) of the buffer, in bucket {bucket_id}",
        f"  this rank's shard of bucket {bucket_id} is [{first}, {first + size}) of the buffer",
    ]
    if right is None:
        lines.append("The two do not overlap: leave the parameter out.")
        return "\n".join(lines)
    in_buffer = (right[0] + start, right[1] + start)
    if yours == in_buffer:
        lines.append(
            f"[{in_buffer[0]}, {in_buffer[1]}) is the overlap, counted from the buffer's beginning; "
            f"count from the parameter's: subtract {start}."
        )
    elif bucket.offset and yours != right:
        lines.append(
            f"Bucket {bucket_id} begins at {bucket.offset} (bucket.offset), and each bucket is "
            f"divided over the ranks by itself. The overlap is [{in_buffer[0]}, {in_buffer[1]})."
        )
    else:
        lines.append(
            f"Their overlap is [{in_buffer[0]}, {in_buffer[1]}); minus {start}, where {name} begins."
        )
    return "\n".join(lines)


def _said(value: Any) -> str:
    return "nothing" if value is None else repr(value)


# -- A training --


def _our_shards(step: GptStep) -> dict[Any, tuple[int, int]]:
    return {
        param: part
        for chunk in step.chunks
        for buffer in chunk.buffers
        for param, part in OURS["local_ranges"](buffer).items()
    }


def _check_gradient_shards(step: GptStep, full: dict[str, torch.Tensor], number: int) -> None:
    """Only this rank's shards: the rest of a bucket is left undefined."""
    shards = _our_shards(step)
    for name, param in step.parameters():
        if param not in shards:
            continue
        start, end = shards[param]
        got = param.main_grad.reshape(-1)[start:end]
        wanted = step.mine(full[name], param).reshape(-1)[start:end]
        if not torch.allclose(got, wanted, rtol=1e-8, atol=1e-9):
            error = wrong_gradient(step, name, got, wanted)
            where = f"Seen in step {number}, in elements {start} to {end}, this rank's shard."
            raise Wrong(f"{error}\n{where} Look at _reduce: it made these sums.")


def _check_weights(step: GptStep, reference: GptStep, number: int) -> None:
    weights = {name: param.detach() for name, param in reference.parameters()}
    shards = _our_shards(step)
    for name, param in step.parameters():
        got, wanted = param.detach().reshape(-1), step.mine(weights[name], param).reshape(-1)
        is_off = ~torch.isclose(got, wanted, rtol=1e-8, atol=1e-9)
        if not is_off.any():
            continue
        start, end = shards.get(param, (0, 0))
        mine = is_off[start:end].any()
        whose = "this rank updates itself" if mine else "another rank has updated"
        look = "local_ranges, or _reduce" if mine else "_gather"
        try:
            check_numbers(f"{name} after step {number}", got, wanted, step.place())
        except Wrong as error:
            raise Wrong(f"{error}\nAmong them are elements that {whose}: look at {look}.") from None


def _achieved(step: GptStep) -> dict[str, Any]:
    """What rank 0 keeps, and what all of it would be."""
    state = step.optimizer.parameter_state
    kept = sum(
        tensor.numel()
        for shard in step.optimizer.shards
        for tensor in list(state(shard).values())[1:]
    )
    whole = 2 * sum(param.numel() for _, param in step.parameters())
    moved = sum(buffer.numel * 8 for chunk in step.chunks for buffer in chunk.buffers)
    return {
        "Adam's state on rank 0": f"{8 * kept} of {8 * whole} bytes ({kept / whole:.0%})",
        "sent": f"one reduce-scatter and one all-gather of {moved} bytes a step",
    }
