"""Checks layout, hook and launching alone; then two steps of two replicas of a GPT."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from minimegatron.core.distributed import param_and_grad_buffer
from minimegatron.core.distributed.param_and_grad_buffer import (
    BufferLayout,
    _ParamAndGradBucketGroup,
)
from minimegatron.core.tracing import Call, observed_by
from minimegatron.exercises.bench_gpt import StepCase, on_these_ranks
from minimegatron.exercises.bench_gpt_judge import Reference
from minimegatron.exercises.check import Case, Result, Wrong, check_value, data_seed, installed
from minimegatron.exercises.feedback_numbers import check_numbers

BUFFER = "minimegatron.core.distributed.param_and_grad_buffer."
DDP = "minimegatron.core.distributed.distributed_data_parallel.DistributedDataParallel."
READY = BUFFER + "_ParamAndGradBucketGroup.register_grad_ready"
REPLACES = (BUFFER + "lay_out_buffer", DDP + "_after_grad", READY)
LAY_OUT = param_and_grad_buffer.lay_out_buffer
LAYOUT, HOOK, LAUNCH, STEP = "lay_out_buffer", "_after_grad", "register_grad_ready", "two steps"
WORLD = 2
ORDERS = [
    ("in the order of the buckets", [0, 0, 1, 1, 2, 2], [0, 1, 1, 2, 2, 3]),
    ("the last bucket's first", [2, 2, 1, 1, 0, 0], [0, 0, 0, 0, 0, 3]),
    ("mixed", [0, 1, 1, 0, 2, 2], [0, 0, 0, 2, 2, 3]),
]
"""In words; whose gradient comes when, of three buckets of two; buckets launched after each."""


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
        return _run_launch(student)
    return _run_steps(student, case)


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """The same on every rank; functions alone are looked at on the first."""
    if case.part == LAYOUT:
        for (numels, bucket_size), found in zip(case.sizes, answers[0], strict=True):
            _judge_layout(numels, bucket_size, found)
    elif case.part == HOOK:
        _judge_hook(answers[0])
    elif case.part == LAUNCH:
        _judge_launch(answers[0])
    else:
        return _judge_steps(case, answers)
    return None


# -- The layout --


def _run_layout(student: ModuleType, numels: list[int], bucket_size: int | None) -> Any:
    found = student.lay_out_buffer(list(numels), [False] * len(numels), bucket_size)
    if not isinstance(found, BufferLayout):
        words = f"lay_out_buffer(numels={numels}, bucket_size={bucket_size})"
        raise Wrong(f"{words} returned {type(found).__name__}; a BufferLayout is expected")
    rows = [[tuple(map(int, row)) for row in rows] for rows in (found.params, found.buckets)]
    return [*rows, list(map(int, found.buckets_unpadded))]


def _judge_layout(numels: list[int], bucket_size: int | None, found: list[list[Any]]) -> None:
    """Gaps, order, buckets: the first rule that is broken."""
    expected = LAY_OUT(numels, [False] * len(numels), bucket_size)
    params, buckets, unpadded = found
    what = f"lay_out_buffer(numels={numels}, bucket_size={bucket_size})"
    if len(params) != len(numels):
        raise Wrong(f"{what}: params has {len(params)} entries for {len(numels)} parameters")
    _judge_places(what, numels, params)
    starts = [start for start, _, _ in params]
    if len(numels) > 1 and starts == sorted(starts):
        raise Wrong(
            f"{what}: the first parameter of the model lies first\nBackward makes its gradient last, "
            "so the first bucket would be complete only when backward is over, and nothing could be "
            "sent meanwhile. Begin with the last parameter."
        )
    why = f"A bucket is closed as soon as it holds {bucket_size} elements or more."
    check_value(f"{what}: params (start, end, bucket)", params, list(expected.params), why)
    check_value(f"{what}: buckets (start, end)", buckets, list(expected.buckets), why)
    check_value(f"{what}: buckets_unpadded", unpadded, list(expected.buckets_unpadded))


def _judge_places(what: str, numels: list[int], params: list[tuple]) -> None:
    for number, (start, end, _) in enumerate(params):
        if end - start != numels[number]:
            raise Wrong(
                f"{what}: parameter {number} has {numels[number]} elements, but lies at {start} to "
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


def _run_hook(student: ModuleType) -> list[dict[str, Any]]:
    """Three backwards of one parameter, one of a layer that adds by itself, one without overlap."""
    told: list = []
    group = SimpleNamespace(register_grad_ready=told.append)
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    param.main_grad = torch.zeros(4, dtype=torch.float64)
    memory = param.main_grad.data_ptr()
    config = SimpleNamespace(overlap_grad_reduce=True)
    ddp = SimpleNamespace(ddp_config=config, param_to_bucket_group={param: group})
    seen = []
    for number, is_added in enumerate((False, False, False, True, False)):
        config.overlap_grad_reduce = number < 4
        param.grad = torch.full((4,), 10.0**number, dtype=torch.float64)
        param.grad_added_to_main_grad = is_added
        student._after_grad(ddp, param)
        seen.append(
            {
                "is_a_view": param.main_grad.data_ptr() == memory,
                "main_grad": param.main_grad.clone(),
                "grad_is_none": param.grad is None,
                "flag": bool(param.grad_added_to_main_grad),
                "num_told": len(told),
            }
        )
    return seen


def _judge_hook(seen: list[dict[str, Any]]) -> None:
    for number, one in enumerate(seen[:3]):
        _judge_gradient(number, one)
    before, added, alone = seen[2:]
    if not torch.equal(added["main_grad"], before["main_grad"]):
        raise Wrong(
            "a gradient that the layer had added to main_grad itself (grad_added_to_main_grad) was "
            "added once more"
        )
    if added["flag"]:
        raise Wrong(
            "_after_grad must set param.grad_added_to_main_grad to False again, or the next "
            "microbatch's gradient is taken for added"
        )
    if alone["num_told"] != added["num_told"]:
        raise Wrong("without overlap_grad_reduce, _after_grad must not call register_grad_ready")


def _judge_gradient(number: int, one: dict[str, Any]) -> None:
    if not one["is_a_view"]:
        raise Wrong(
            "after _after_grad, param.main_grad is another tensor: it must stay a view into the "
            "buffer, or nobody sends what it holds. Add in place (add_)."
        )
    if number and one["main_grad"][0] == 10.0**number:
        raise Wrong(
            f"after microbatch {number}, main_grad holds only that microbatch's gradient: the "
            "earlier ones were overwritten\nGradients of all microbatches add up: add_, not copy_."
        )
    expected = torch.full((4,), sum(10.0**i for i in range(number + 1)), dtype=torch.float64)
    check_numbers(f"main_grad after microbatch {number}", one["main_grad"], expected)
    if not one["grad_is_none"]:
        raise Wrong(
            "_after_grad leaves param.grad as it is\nThe next backward adds its gradient to it, "
            "so this microbatch would count again each time; and its memory is held twice. Set "
            "it to None."
        )
    if one["num_told"] != number + 1:
        raise Wrong(
            f"after {number + 1} gradients the bucket was told {one['num_told']} times; with "
            "overlap_grad_reduce, call register_grad_ready(param) after each"
        )


# -- Launching --


class _Group(_ParamAndGradBucketGroup):
    """A bucket that notes its launch and sends nothing."""

    def __init__(self, number: int, log: list[int]):
        self.number, self.log = number, log
        self.params = {torch.nn.Parameter(torch.zeros(1)): f"{number}.{i}" for i in range(2)}
        self.params_with_grad = set()
        self.grad_reduce_handles = None
        self.is_last_microbatch = True
        self.previous_bucket_group = self.next_bucket_group = None

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        if self.grad_reduce_handles is not None:
            raise Wrong(f"bucket {self.number} was launched twice in one step")
        self.grad_reduce_handles = []
        self.log.append(self.number)


def _three_buckets() -> tuple[list[_Group], list[int]]:
    log: list[int] = []
    groups = [_Group(number, log) for number in range(3)]
    for earlier, later in pairwise(groups):
        earlier.next_bucket_group, later.previous_bucket_group = later, earlier
    return groups, log


def _run_launch(student: ModuleType) -> dict[str, Any]:
    """Three buckets of two parameters: while accumulating, in order, and out of order."""
    groups, log = _three_buckets()
    for group in groups:
        group.is_last_microbatch = False
        for param in group.params:
            student.register_grad_ready(group, param)
    found = {"early": list(log), "num_counted": len(groups[0].params_with_grad), "logs": []}
    for _, order, _ in ORDERS:
        groups, log = _three_buckets()
        waiting, logs = [list(group.params) for group in groups], []
        for number in order:
            student.register_grad_ready(groups[number], waiting[number].pop(0))
            logs.append(list(log))
        found["logs"].append(logs)
    return found


def _judge_launch(found: dict[str, Any]) -> None:
    if found["early"]:
        raise Wrong(
            f"bucket {found['early'][0]} was launched although this is not the last microbatch "
            "(is_last_microbatch is False)\nWhat the later microbatches add would stay on this rank."
        )
    if found["num_counted"]:
        raise Wrong(
            "a gradient that came before the last microbatch was counted in params_with_grad\nIn the "
            "last one the bucket would then seem complete too early."
        )
    for (words, order, wanted), logs in zip(ORDERS, found["logs"], strict=True):
        for number, (log, num) in enumerate(zip(logs, wanted, strict=True)):
            _judge_log(words, order[: number + 1], log, num)


def _judge_log(words: str, come: list[int], log: list[int], wanted: int) -> None:
    what = f"gradients of buckets {come} have come ({words}; each bucket has two)"
    if log != list(range(len(log))):
        raise Wrong(
            f"{what}: buckets were launched in the order {log}\nCollectives are told apart only "
            "by their order. A rank on which another bucket is complete first would add its "
            "bucket to a different one of its peers: launch bucket b only after bucket b - 1."
        )
    if len(log) > wanted:
        raise Wrong(f"{what}: bucket {log[-1]} was launched, but it does not have all of its own")
    if len(log) < wanted:
        raise Wrong(
            f"{what}: bucket {len(log)} is complete and it is its turn, but it was not launched\n"
            "Launch a bucket at its last gradient. After that look at the next one, which may "
            "have been complete for a while, and so on."
        )


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
