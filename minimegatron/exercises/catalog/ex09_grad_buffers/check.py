"""Checks layout, hook and launching alone; then two steps of two replicas of a GPT."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from minimegatron.core.distributed import param_and_grad_buffer
from minimegatron.core.distributed.param_and_grad_buffer import BufferLayout
from minimegatron.core.tracing import Call, observed_by
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.bench.gpt_step import StepCase, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.catalog.ex09_grad_buffers.launching import judge_launch, run_launch
from minimegatron.exercises.check import Case, Result, Wrong, check_value, data_seed, installed

BUFFER = "minimegatron.core.distributed.param_and_grad_buffer."
DDP = "minimegatron.core.distributed.distributed_data_parallel.DistributedDataParallel."
READY = BUFFER + "_ParamAndGradBucketGroup.register_grad_ready"
ARITHMETIC = "minimegatron.core.distributed.buffer_layout."
REPLACES = (ARITHMETIC + "lay_out_buffer", ARITHMETIC + "_fill_buckets", DDP + "_after_grad", READY)
LAY_OUT = param_and_grad_buffer.lay_out_buffer
LAYOUT, HOOK, LAUNCH, STEP = "lay_out_buffer", "_after_grad", "register_grad_ready", "two steps"
WORLD = 2


def cases(seed: int) -> list[Case]:
    """Each function alone, then GPT steps with one microbatch and with several."""
    draw, data = random.Random(seed), data_seed(seed)
    drawn = ([draw.randint(1, 40) for _ in range(draw.randint(5, 9))], draw.randint(20, 60))
    sizes = [([10, 20, 30], 40), ([10, 20, 30], None), ([5], 100), ([40, 40, 40], 40), drawn]
    layers = draw.choice([2, 3])
    steps = [
        ("GPT, dp=2, two steps of M=1", 1, 1),
        ("GPT, dp=2, a step of M=1, then M=3", 3, layers),
    ]
    return [
        Case(LAYOUT, part=LAYOUT, sizes=sizes),
        Case(HOOK, part=HOOK),
        Case(LAUNCH, part=LAUNCH),
        *(Case(name, part=STEP, M=M, step=_step(M, layers, data)) for name, M, layers in steps),
    ]


def _step(M: int, layers: int, seed: int) -> dict[str, Any]:
    return StepCase(
        num_microbatches=M, num_layers=layers, overlap_grad_reduce=True, seed=seed
    ).values


def run(student: ModuleType, case: Case) -> Any:
    """One function, or two steps."""
    if case.part == LAYOUT:
        return [_run_layout(student, *sizes) for sizes in case.sizes]
    if case.part == HOOK:
        return _run_hook(student)
    if case.part == LAUNCH:
        return run_launch(student)
    return _run_steps(student, case)


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """The same on every rank; functions alone are looked at on the first."""
    if case.part == LAYOUT:
        for (numels, bucket_size), found in zip(case.sizes, answers[0], strict=True):
            _judge_layout(numels, bucket_size, found)
    elif case.part == HOOK:
        _judge_hook(answers[0])
    elif case.part == LAUNCH:
        judge_launch(answers[0])
    else:
        return _judge_steps(case, answers)
    return None


# -- The layout --


def _run_layout(student: ModuleType, numels: list[int], bucket_size: int | None) -> Any:
    found = student.lay_out_buffer(list(numels), [False] * len(numels), bucket_size)
    if not isinstance(found, BufferLayout):
        words = f"lay_out_buffer(numels={numels}, bucket_size={bucket_size})"
        raise Wrong(f"{words} returned {type(found).__name__}; a BufferLayout is expected")
    try:
        rows = [[tuple(map(int, row)) for row in rows] for rows in (found.params, found.buckets)]
        return [*rows, list(map(int, found.buckets_unpadded))]
    except (TypeError, ValueError):
        raise Wrong(
            f"the BufferLayout that lay_out_buffer returned is not made of lists of numbers: {found}"
            "\nSee the top of the stub: what is in params, buckets and buckets_unpadded?"
        ) from None


def _judge_layout(numels: list[int], bucket_size: int | None, found: list[list[Any]]) -> None:
    """Gaps, order, buckets: the first rule that is broken."""
    expected = LAY_OUT(numels, [False] * len(numels), bucket_size)
    params, buckets, unpadded = found
    what = f"lay_out_buffer(numels={numels}, bucket_size={bucket_size})"
    if any(len(row) != 3 for row in params) or any(len(row) != 2 for row in buckets):
        raise Wrong(
            f"{what}: params has (start, end, bucket number) for each parameter, buckets has "
            f"(start, end) for each bucket; yours are {params} and {buckets}"
        )
    if len(params) != len(numels):
        raise Wrong(
            f"{what}: params has {num_of(len(params), 'entry', 'entries')} for "
            f"{num_of(len(numels), 'parameter')}"
        )
    _judge_places(what, numels, params)
    starts = [start for start, _, _ in params]
    if len(numels) > 1 and starts == sorted(starts):
        raise Wrong(
            f"{what}: the first parameter of the model lies first\nBackward makes its gradient last, "
            "so the first bucket would be complete only when backward is over, and nothing could be "
            "sent meanwhile. Whose gradient is there first?"
        )
    why = f"A bucket is closed as soon as it holds {bucket_size} elements or more."
    check_value(f"{what}: params (start, end, bucket)", params, list(expected.params), why)
    check_value(f"{what}: buckets (start, end)", buckets, list(expected.buckets), why)
    check_value(f"{what}: buckets_unpadded", unpadded, list(expected.buckets_unpadded))


def _judge_places(what: str, numels: list[int], params: list[tuple]) -> None:
    for number, (start, end, _) in enumerate(params):
        if end - start != numels[number]:
            raise Wrong(
                f"{what}: parameter {number} has {num_of(numels[number], 'element')}, but lies at "
                f"{start} to "
                f"{end}"
            )
    places = sorted((start, end) for start, end, _ in params)
    for (_, end), (start, _) in pairwise([(0, 0), *places]):
        if start != end:
            words = "overlap" if start < end else "leave a gap"
            raise Wrong(
                f"{what}: two gradients {words} between {min(start, end)} and {max(start, end)}"
            )


# -- The hook --


HOOK_CALLS = [(False, True)] * 3 + [(True, True), (False, False), (True, False)]
"""Of each backward: whether the layer has added the gradient itself, and overlap_grad_reduce."""


def _run_hook(student: ModuleType) -> list[dict[str, Any]]:
    """Backwards of one parameter: also of a layer that adds by itself, and without overlap."""
    told: list = []
    group, other = (_Told(told, name) for name in ("mine", "another"))
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    param.main_grad = torch.zeros(4, dtype=torch.float64)
    memory = param.main_grad.data_ptr()
    config = SimpleNamespace(overlap_grad_reduce=True)
    # The parameter's own bucket is neither the first nor the last.
    first, last = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups = {first: other, param: group, last: other}
    ddp = SimpleNamespace(ddp_config=config, param_to_bucket_group=groups)
    seen = []
    for number, (is_added, config.overlap_grad_reduce) in enumerate(HOOK_CALLS):
        param.grad = torch.full((4,), 10.0**number, dtype=torch.float64)
        param.grad_added_to_main_grad = is_added
        student._after_grad(ddp, param)
        seen.append(
            {
                "is_a_view": param.main_grad.data_ptr() == memory,
                "main_grad": param.main_grad.clone(),
                "grad_is_none": param.grad is None,
                "grad_is_zero": param.grad is not None and not param.grad.any().item(),
                "flag": bool(param.grad_added_to_main_grad),
                "num_told": len(told),
                "is_told_right": all(who == "mine" and what is param for who, what in told),
            }
        )
    return seen


class _Told:
    """A bucket group that notes what it is told."""

    def __init__(self, told: list, name: str):
        self._told, self._name = told, name

    def register_grad_ready(self, param: torch.nn.Parameter) -> None:
        self._told.append((self._name, param))


def _judge_hook(seen: list[dict[str, Any]]) -> None:
    """One call after the other; the first thing that is wrong."""
    expected, num_told = torch.zeros(4, dtype=torch.float64), 0
    before = expected
    for number, (one, (is_added, is_overlap)) in enumerate(zip(seen, HOOK_CALLS, strict=True)):
        expected = expected if is_added else expected + 10.0**number
        if is_added:
            _judge_added(one, before)
        else:
            _judge_gradient(number, one, expected, is_overlap)
        _judge_freed(one, is_added, is_overlap)
        _judge_told(one, num_told, is_added, is_overlap)
        before, num_told = one["main_grad"], one["num_told"]


def _judge_added(one: dict[str, Any], before: torch.Tensor) -> None:
    if not torch.equal(one["main_grad"], before):
        raise Wrong(
            "a gradient that the layer had added to main_grad itself (grad_added_to_main_grad) was "
            "added once more"
        )
    if one["flag"]:
        raise Wrong(
            "after a gradient that the layer had added, param.grad_added_to_main_grad is still True\n"
            "The layer says that of one microbatch. What becomes of the next one's gradient?"
        )


def _judge_gradient(
    number: int, one: dict[str, Any], expected: torch.Tensor, is_overlap: bool
) -> None:
    if not one["is_a_view"]:
        raise Wrong(
            "after _after_grad, param.main_grad is another tensor: it must stay a view into the "
            "buffer, or nobody sends what it holds. Which operations write into the tensor that is "
            "there?"
        )
    if number and one["main_grad"][0] == 10.0**number:
        raise Wrong(
            f"after microbatch {number}, main_grad holds only that microbatch's gradient: the "
            "earlier ones were overwritten\nWhat should be there after the second microbatch, and "
            "what did yours do "
            "with what was there?"
        )
    where = _case(False, is_overlap)
    check_numbers(f"main_grad after microbatch {number}{where}", one["main_grad"], expected)


def _judge_freed(one: dict[str, Any], is_added: bool, is_overlap: bool) -> None:
    if one["grad_is_zero"]:
        raise Wrong(
            "_after_grad fills param.grad with zeros, and keeps it\nThe next gradient is right with "
            "that, but zeros take as much memory as a gradient: each parameter would hold it twice, "
            "here and in the buffer. How does one let go of a tensor?"
        )
    if not one["grad_is_none"]:
        raise Wrong(
            f"_after_grad leaves param.grad as it is{_case(is_added, is_overlap)}\nThe next backward "
            "adds its gradient to it, so this microbatch would count again each time; and its memory "
            "is held twice. Who still needs it?"
        )


def _judge_told(one: dict[str, Any], before: int, is_added: bool, is_overlap: bool) -> None:
    often = one["num_told"] - before
    if not is_overlap and not often:
        return
    if not is_overlap:
        raise Wrong(
            "without overlap_grad_reduce, the bucket was told of a gradient\nThen it would leave "
            "during backward, although nobody expects it before the end. What in `self` says "
            "whether it may?"
        )
    if often != 1:
        raise Wrong(
            f"the bucket was told {num_of(often, 'time')} of a gradient"
            f"{_case(is_added, is_overlap)}\nWith overlap_grad_reduce it counts them, to know when it "
            "is complete. Which gradients is it to count?"
        )
    if not one["is_told_right"]:
        raise Wrong(
            "_after_grad told another bucket, or told it of another parameter\nEvery bucket counts its "
            "own parameters. Which attribute of `self` knows in which bucket a parameter lies?"
        )


def _case(is_added: bool, is_overlap: bool) -> str:
    """Which kind of call it was, for the end of a sentence; "" for the usual one.

    >>> _case(True, False)
    ' (the layer had added the gradient itself; overlap_grad_reduce is False)'
    """
    words = ["the layer had added the gradient itself"] * is_added
    words += ["overlap_grad_reduce is False"] * (not is_overlap)
    return f" ({'; '.join(words)})" if words else ""


# -- Two steps --


class _Watch:
    """Notes when gradients come and when buckets leave, in one step."""

    def __init__(self) -> None:
        self.arrivals: list[torch.nn.Parameter] = []
        self.launches: list[tuple[Any, int]] = []

    def start(self, call: Call) -> None:
        if call.name == "bucket-launch":
            self.launches.append((call.arguments["self"], len(self.arrivals)))

    def stop(self, call: Call) -> None:
        """A traced call ends; what is noted is noted when it begins."""


def _run_steps(student: ModuleType, case: Case) -> dict[str, Any]:
    """A GPT on two replicas, gradients sent during backward; twice, since buffers are used again."""
    watch = _Watch()

    def after_grad(self: Any, param: torch.nn.Parameter) -> None:
        watch.arrivals.append(param)
        student._after_grad(self, param)

    steps = []
    with (
        installed(student.lay_out_buffer, BUFFER + "lay_out_buffer"),
        installed(after_grad, DDP + "_after_grad"),
        installed(student.register_grad_ready, READY),
        observed_by(watch),
    ):
        step = on_these_ranks(case.step)
        whole = step.case
        # A step that is shorter than the next: what one has learned must not outlive it.
        for M in (1, case.M):
            watch.arrivals, watch.launches = [], []
            step.case = replace(whole, num_microbatches=M)
            step.forward_backward()
            steps.append(_seen(watch, step.chunks[0].bucket_groups))
    return {"gradients": step.gradients(), "steps": steps}


def _seen(watch: _Watch, groups: list[Any]) -> dict[str, Any]:
    """The step as numbers: which bucket each gradient belongs to, and when each bucket left."""
    number_of = {param: number for number, group in enumerate(groups) for param in group.params}
    return {
        "num_params": [len(group.params) for group in groups],
        "elements": [sum(param.numel() for param in group.params) for group in groups],
        "arrivals": [number_of[param] for param in watch.arrivals],
        "launches": [(groups.index(group), at) for group, at in watch.launches],
    }


def _judge_steps(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    for rank, answer in enumerate(answers):
        for number, seen in enumerate(answer["steps"]):
            _judge_overlap(f"rank {rank}, step {number}", seen)
    reference = Reference(case.step, WORLD).run()
    reference.check_gradients([answer["gradients"] for answer in answers])
    return Result(_achieved(answers[0]["steps"][-1], case.M))


def _judge_overlap(where: str, seen: dict[str, Any]) -> None:
    """Every bucket once, and right after its last gradient (or that of one before it)."""
    num_params, num_buckets = sum(seen["num_params"]), len(seen["num_params"])
    first = len(seen["arrivals"]) - num_params
    last = seen["arrivals"][first:]
    if len(seen["launches"]) != num_buckets:
        raise Wrong(
            f"{where}: {num_buckets} buckets were launched {len(seen['launches'])} times; each is "
            "to be launched once per step"
        )
    due = 0
    for number, (bucket, at) in enumerate(seen["launches"]):
        due = max(due, *(place + 1 for place, other in enumerate(last) if other == bucket))
        if at - first != due:
            raise Wrong(
                f"{where}: bucket {number} was launched after {at - first} of the last microbatch's "
                f"{num_params} gradients; it was complete after {due}"
            )


def _achieved(seen: dict[str, Any], M: int) -> dict[str, str]:
    num_arrivals, num_params = len(seen["arrivals"]), sum(seen["num_params"])
    early = sum(at < num_arrivals for _, at in seen["launches"])
    return {
        "overlap": f"{early} of {len(seen['num_params'])} buckets left before backward was over",
        "elements": f"{seen['elements']}",
        "gradients added": f"{num_arrivals} = {num_params} parameters x M ({M})",
    }
