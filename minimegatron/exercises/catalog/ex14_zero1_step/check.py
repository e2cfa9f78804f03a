"""Checks the four functions of ZeRO-1: the ranges alone, then whole training steps."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.bench.gpt_step import GptStep, StepCase, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference, is_close
from minimegatron.exercises.catalog.ex14_zero1_step.ranges import OURS, judge_ranges, run_ranges
from minimegatron.exercises.catalog.ex14_zero1_step.sent import (
    check_sent,
    counting,
    sent_words,
)
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed

BUFFER = "minimegatron.core.distributed.param_and_grad_buffer."
GROUP = BUFFER + "_ParamAndGradBucketGroup."
RANGES = "minimegatron.core.optimizer.distrib_optimizer.local_ranges"
REPLACES = (RANGES, BUFFER + "shard_buffer", GROUP + "_reduce", GROUP + "_gather")
ALONE, TRAINING = "the ranges alone", "a training"
NUM_STEPS = 2
WORLD = 4


def cases(seed: int) -> list[Case]:
    """Buffers of drawn sizes, then trainings with several replicas.

    In the second buffer a parameter ends where a shard ends, so that an empty range is seen.
    """
    draw, data = random.Random(seed), data_seed(seed)
    buffers = [
        {"numels": [300, 20, 100], "bucket_size": None, "d": 2},
        {"numels": [700, 64, 5, 448, 64], "bucket_size": 300, "d": 3},
        {"numels": draw.sample(range(1, 900), 6), "bucket_size": 500, "d": draw.choice([4, 5])},
    ]
    found = [
        Case(
            f"{sizes['d']} ranks, {len(sizes['numels'])} parameters, "
            + ("one bucket" if sizes["bucket_size"] is None else "several buckets"),
            part=ALONE,
            **sizes,
        )
        for sizes in buffers
    ]
    both = {"distributed_optimizer": True, "overlap_grad_reduce": True, "seed": data}
    trainings = {
        "4 replicas": StepCase(num_layers=2, num_microbatches=1, **both),
        # A loss per token is summed as it is: no factor of 1/d.
        "2 stages, 2 replicas, a loss per token": StepCase(
            pp=2, clip_grad=0.05, per_token=True, **both
        ),
    }
    steps = [Case(name, part=TRAINING, step=step.values) for name, step in trainings.items()]
    return [*found, *steps]


def run(student: ModuleType, case: Case) -> Any:
    """Ranges, or a training."""
    if case.part == ALONE:
        return run_ranges(student, case)
    seen, given, sent = [], [], []
    with _theirs(student, given, sent):
        step = on_these_ranks(case.step)
        for _ in range(NUM_STEPS):
            given.clear()
            sent.clear()
            step.forward_backward()
            step.meet()
            gradients, unchanged = step.gradients(), _is_unchanged(given)
            step.optimizer.step()
            step.meet()
            weights = {name: param.detach().clone() for name, param in step.parameters()}
            seen.append({"gradients": gradients, "unchanged": unchanged, "weights": weights})
    return {"steps": seen, "kept": _num_kept(step), "sent": sent}


def judge(case: Case, answers: Sequence[Any]) -> Result:
    """The first rank's ranges; every rank's training."""
    if case.part == ALONE:
        return judge_ranges(case, answers[0])
    return _judge_training(case, answers)


@contextlib.contextmanager
def _theirs(student: ModuleType, given: list[tuple], sent: list[dict]) -> Iterator[None]:
    """Their functions in the place of ours.

    `given` takes what each `_reduce` began with, `sent` what each of the two has sent.
    """

    def reduce(group: Any, bucket: Any, *others: Any) -> Any:
        given.append((group.data_parallel_group, bucket, bucket.grad_data.clone()))
        return student._reduce(group, bucket, *others)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_sizes_checked(student))
        stack.enter_context(installed(student.local_ranges, RANGES))
        for name, function in (("_reduce", reduce), ("_gather", student._gather)):
            function = counting(_with_handle(function, name), name, sent)
            stack.enter_context(installed(function, f"{GROUP}{name}"))
        yield


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


@contextlib.contextmanager
def _sizes_checked(student: ModuleType) -> Iterator[None]:
    """The student's file calls the two collectives through a look at their arguments' sizes."""
    names = {collectives.reduce_scatter: "reduce_scatter", collectives.all_gather: "all_gather"}
    found = [
        (key, value)
        for key, value in vars(student).items()
        if callable(value) and any(value is one for one in names)
    ]
    for key, value in found:
        setattr(student, key, _with_sizes(value, names[value]))
    try:
        yield
    finally:
        for key, value in found:
            setattr(student, key, value)


def _with_sizes(collective: Callable, name: str) -> Callable:
    """`collective`, whose larger tensor must have one slice for each rank of the group."""

    def checked(output: Any, input: Any, group: Any, *others: Any, **options: Any) -> Any:
        if isinstance(output, torch.Tensor) and isinstance(input, torch.Tensor):
            _check_sizes(name, output.numel(), input.numel(), group.size())
        return collective(output, input, group, *others, **options)

    return checked


def _check_sizes(name: str, output: int, input: int, size: int) -> None:
    is_gather = name == "all_gather"
    small, large = (input, output) if is_gather else (output, input)
    if large == size * small:
        return
    wanted = (
        f"{size} x as many elements as the input: {size * input}"
        if is_gather
        else f"1/{size} of the input's elements: {input // size}"
    )
    advice = f"The group has {size} ranks, so the output must have {wanted}."
    if small == size * large:
        advice = f"You have exchanged the two: {name}(output, input, group)."
    raise Wrong(
        f"{name} got an output of {output} elements and an input of {input} elements\n{advice}"
    )


def _is_unchanged(given: list[tuple]) -> bool:
    """Whether this rank's shards hold its own gradients still, scaled or not."""
    for group, bucket, before in given:
        numel = before.numel() // group.size()
        mine = slice(group.rank() * numel, (group.rank() + 1) * numel)
        now, own = bucket.grad_data[mine], before[mine]
        scaled = own * bucket.gradient_scaling_factor
        if not (torch.allclose(now, own) or torch.allclose(now, scaled)):
            return False
    return bool(given)


# -- A training --


def _shards(step: GptStep) -> dict[str, tuple[int, int]]:
    """The elements of each parameter that a rank updates."""
    ranges = {
        param: part
        for chunk in step.chunks
        for buffer in chunk.buffers
        for param, part in OURS["local_ranges"](buffer).items()
    }
    return {name: ranges[param] for name, param in step.parameters() if param in ranges}


def _num_kept(step: GptStep) -> int:
    """Elements of Adam's state on this rank."""
    state = step.optimizer.parameter_state
    return sum(
        tensor.numel()
        for shard in step.optimizer.shards
        for tensor in list(state(shard).values())[1:]
    )


def _judge_training(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    reference = Reference(case.step, WORLD)
    shards = [_shards(reference.as_rank(rank)) for rank in range(WORLD)]
    for number in range(NUM_STEPS):
        gradients = reference.run().gradients
        for rank, answer in enumerate(answers):
            _judge_gradients(
                reference, rank, number, answer["steps"][number], gradients, shards[rank]
            )
        reference.step.optimizer.step()
        weights = {name: param.detach() for name, param in reference.step.parameters()}
        for rank, answer in enumerate(answers):
            found = answer["steps"][number]["weights"]
            _judge_weights(reference, rank, number, found, weights, shards[rank])
    for rank, answer in enumerate(answers):
        check_sent(reference.who(rank), reference.dp, answer["sent"])
    return Result(_achieved(reference, answers[0]))


def _judge_gradients(
    reference: Reference,
    rank: int,
    number: int,
    found: dict[str, Any],
    full: dict[str, torch.Tensor],
    shards: dict[str, tuple[int, int]],
) -> None:
    """Only this rank's shards: the rest of a bucket is left undefined."""
    pieces = reference.pieces(rank, full)
    for name, (start, end) in shards.items():
        got, wanted = (each[name].reshape(-1)[start:end] for each in (found["gradients"], pieces))
        if not is_close(got, wanted, 1e-8):
            if found["unchanged"]:
                raise Wrong(_unchanged_words(reference, rank, number))
            error = reference.wrong_gradient(rank, name, got, wanted)
            where = f"Seen in step {number}, in elements {start} to {end}, this rank's shard."
            raise Wrong(f"{error}\n{where} Look at _reduce: it made these sums.")


def _unchanged_words(reference: Reference, rank: int, number: int) -> str:
    return (
        f"rank {reference.who(rank)}: after _reduce in step {number}, this rank's shard of "
        "bucket.grad_data still holds the gradients of this rank alone\n"
        "Look at _reduce: the sum went elsewhere. Which tensor did you give reduce_scatter as its "
        "output, and whose memory is that?"
    )


def _judge_weights(
    reference: Reference,
    rank: int,
    number: int,
    found: dict[str, torch.Tensor],
    full: dict[str, torch.Tensor],
    shards: dict[str, tuple[int, int]],
) -> None:
    for name, piece in reference.pieces(rank, full).items():
        got, wanted = found[name].reshape(-1), piece.reshape(-1)
        is_off = ~torch.isclose(got, wanted, rtol=1e-8, atol=1e-9)
        if not is_off.any():
            continue
        start, end = shards.get(name, (0, 0))
        mine = is_off[start:end].any()
        whose = "this rank updates itself" if mine else "another rank has updated"
        look = "local_ranges, or _reduce" if mine else "_gather"
        try:
            check_numbers(f"{name} after step {number}", got, wanted, reference.who(rank))
        except Wrong as error:
            raise Wrong(f"{error}\nAmong them are elements that {whose}: look at {look}.") from None


def _achieved(reference: Reference, answer: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 keeps, what all of it would be, and what it has sent."""
    kept = answer["kept"]
    step = reference.as_rank(0)
    whole = 2 * sum(param.numel() for _, param in step.parameters())
    return {
        "Adam's state on rank 0": f"{8 * kept} of {8 * whole} bytes ({kept / whole:.0%})",
        "sent in a step": sent_words(answer["sent"]),
    }
