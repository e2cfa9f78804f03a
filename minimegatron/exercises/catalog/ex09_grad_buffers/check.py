"""Checks layout, hook and launching alone; then two steps of two replicas of a GPT."""

import random
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.distributed import param_and_grad_buffer
from minimegatron.core.distributed.param_and_grad_buffer import (
    BufferLayout,
    _ParamAndGradBucketGroup,
)
from minimegatron.core.tracing import Call, observed_by
from minimegatron.exercises.bench_gpt import StepCase, check_gradients, on_these_ranks, one_process
from minimegatron.exercises.check import (
    Case,
    Result,
    Wrong,
    check_numbers,
    check_value,
    installed,
)

BUFFER = "minimegatron.core.distributed.param_and_grad_buffer."
DDP = "minimegatron.core.distributed.distributed_data_parallel.DistributedDataParallel."
LAY_OUT = param_and_grad_buffer.lay_out_buffer


def cases(seed: int) -> list[Case]:
    """Each function alone, then GPT steps with one microbatch and with several."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 40) for _ in range(draw.randint(5, 9))]
    return [
        Case("lay_out_buffer", kind="layout", drawn=sizes, bucket_size=draw.randint(20, 60)),
        Case("_after_grad", kind="hook", seed=seed),
        Case("register_grad_ready", kind="launch"),
        Case("GPT, dp=2, two steps of M=1", kind="step", M=1, layers=1, seed=seed),
        Case(
            "GPT, dp=2, a step of M=1, then one of M=3",
            kind="step",
            M=3,
            layers=draw.choice([2, 3]),
            seed=seed,
        ),
    ]


def run(student: ModuleType, case: Case) -> Result:
    """One function, or two steps."""
    if case.kind == "layout":
        for numels, bucket_size in (
            ([10, 20, 30], 40),
            ([10, 20, 30], None),
            ([5], 100),
            ([40, 40, 40], 40),
            (case.drawn, case.bucket_size),
        ):
            check_layout(student, numels, bucket_size)
        return Result()
    if case.kind == "step":
        return run_steps(student, case)
    (check_hook if case.kind == "hook" else check_launch)(student)
    return Result()


# -- The layout --


def check_layout(student: ModuleType, numels: list[int], bucket_size: int | None) -> None:
    """Gaps, order, buckets: the first rule that is broken."""
    alone = [False] * len(numels)
    found, expected = (
        student.lay_out_buffer(numels, alone, bucket_size),
        LAY_OUT(numels, alone, bucket_size),
    )
    what = f"lay_out_buffer(numels={numels}, bucket_size={bucket_size})"
    if not isinstance(found, BufferLayout):
        raise Wrong(f"{what} returned {type(found).__name__}; a BufferLayout is expected")
    if len(found.params) != len(numels):
        raise Wrong(f"{what}: params has {len(found.params)} entries for {len(numels)} parameters")
    _check_places(what, numels, found)
    starts = [start for start, _, _ in found.params]
    if len(numels) > 1 and starts == sorted(starts):
        raise Wrong(
            f"{what}: the first parameter of the model lies first\nBackward makes its gradient last, "
            "so the first bucket would be complete only when backward is over, and nothing could be "
            "sent meanwhile. Begin with the last parameter."
        )
    why = f"A bucket is closed as soon as it holds {bucket_size} elements or more."
    check_value(f"{what}: params (start, end, bucket)", list(found.params), expected.params, why)
    check_value(f"{what}: buckets (start, end)", list(found.buckets), expected.buckets, why)
    unpadded = list(found.buckets_unpadded)
    check_value(f"{what}: buckets_unpadded", unpadded, expected.buckets_unpadded)


def _check_places(what: str, numels: list[int], found: BufferLayout) -> None:
    for number, (start, end, _) in enumerate(found.params):
        if end - start != numels[number]:
            raise Wrong(
                f"{what}: parameter {number} has {numels[number]} elements, but lies at {start} to "
                f"{end}"
            )
    places = sorted((start, end) for start, end, _ in found.params)
    for (_, end), (start, _) in pairwise([(0, 0), *places]):
        if start != end:
            words = "overlap" if start < end else "leave a gap"
            raise Wrong(
                f"{what}: two gradients {words} between {min(start, end)} and {max(start, end)}"
            )


# -- The hook --


def check_hook(student: ModuleType) -> None:
    """Three backwards of one parameter, one of a layer that adds by itself, and without overlap."""
    told: list = []
    group = SimpleNamespace(register_grad_ready=told.append)
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    param.main_grad = torch.zeros(4, dtype=torch.float64)
    memory = param.main_grad.data_ptr()
    ddp = SimpleNamespace(
        ddp_config=SimpleNamespace(overlap_grad_reduce=True), param_to_bucket_group={param: group}
    )
    for microbatch in range(3):
        param.grad = torch.full((4,), 10.0**microbatch, dtype=torch.float64)
        param.grad_added_to_main_grad = False
        student._after_grad(ddp, param)
        if param.main_grad.data_ptr() != memory:
            raise Wrong(
                "after _after_grad, param.main_grad is another tensor: it must stay a view into the "
                "buffer, or nobody sends what it holds. Add in place (add_)."
            )
        if microbatch and param.main_grad[0] == 10.0**microbatch:
            raise Wrong(
                f"after microbatch {microbatch}, main_grad holds only that microbatch's gradient: the "
                "earlier ones were overwritten\nGradients of all microbatches add up: add_, not copy_."
            )
        expected = torch.full(
            (4,), sum(10.0**i for i in range(microbatch + 1)), dtype=torch.float64
        )
        check_numbers(f"main_grad after microbatch {microbatch}", param.main_grad, expected)
        if param.grad is not None:
            raise Wrong(
                "_after_grad leaves param.grad as it is\nThe next backward adds its gradient to it, "
                "so this microbatch would count again each time; and its memory is held twice. Set "
                "it to None."
            )
        if len(told) != microbatch + 1:
            raise Wrong(
                f"after {microbatch + 1} gradients the bucket was told {len(told)} times; with "
                "overlap_grad_reduce, call register_grad_ready(param) after each"
            )
    _check_flag(student, ddp, param)
    ddp.ddp_config.overlap_grad_reduce, num_told = False, len(told)
    param.grad = torch.ones(4, dtype=torch.float64)
    student._after_grad(ddp, param)
    if len(told) != num_told:
        raise Wrong("without overlap_grad_reduce, _after_grad must not call register_grad_ready")


def _check_flag(student: ModuleType, ddp: Any, param: torch.nn.Parameter) -> None:
    before = param.main_grad.clone()
    param.grad, param.grad_added_to_main_grad = torch.full_like(param, 7.0), True
    student._after_grad(ddp, param)
    if not torch.equal(param.main_grad, before):
        raise Wrong(
            "a gradient that the layer had added to main_grad itself (grad_added_to_main_grad) was "
            "added once more"
        )
    if param.grad_added_to_main_grad:
        raise Wrong(
            "_after_grad must set param.grad_added_to_main_grad to False again, or the next "
            "microbatch's gradient is taken for added"
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


def check_launch(student: ModuleType) -> None:
    """Three buckets of two parameters: while accumulating, in order, and out of order."""
    groups, log = _three_buckets()
    for group in groups:
        group.is_last_microbatch = False
        for param in group.params:
            student.register_grad_ready(group, param)
    if log:
        raise Wrong(
            f"bucket {log[0]} was launched although this is not the last microbatch "
            "(is_last_microbatch is False)\nWhat the later microbatches add would stay on this rank."
        )
    if groups[0].params_with_grad:
        raise Wrong(
            "a gradient that came before the last microbatch was counted in params_with_grad\nIn the "
            "last one the bucket would then seem complete too early."
        )
    _try_order(student, "in the order of the buckets", [0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2, 3])
    _try_order(student, "the last bucket's first", [2, 2, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 3])
    _try_order(student, "mixed", [0, 1, 1, 0, 2, 2], [0, 0, 0, 0, 2, 2, 3])


def _try_order(student: ModuleType, words: str, order: list[int], wanted: list[int]) -> None:
    """`order`: whose gradient comes when; `wanted`: buckets launched before and after each."""
    groups, log = _three_buckets()
    waiting = [list(group.params) for group in groups]
    come: list[int] = []
    for number, wanted_now in zip(order, wanted[1:], strict=True):
        student.register_grad_ready(groups[number], waiting[number].pop(0))
        come.append(number)
        what = f"gradients of buckets {come} have come ({words}; each bucket has two)"
        if log != sorted(log) or log != list(range(len(log))):
            raise Wrong(
                f"{what}: buckets were launched in the order {log}\nCollectives are told apart only "
                "by their order. A rank on which another bucket is complete first would add its "
                "bucket to a different one of its peers: launch bucket b only after bucket b - 1."
            )
        if len(log) > wanted_now:
            raise Wrong(
                f"{what}: bucket {log[-1]} was launched, but it does not have all of its own"
            )
        if len(log) < wanted_now:
            late = len(log)
            raise Wrong(
                f"{what}: bucket {late} is complete and it is its turn, but it was not launched\n"
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


def run_steps(student: ModuleType, case: Case) -> Result:
    """A GPT on two replicas, gradients sent during backward; twice, since buffers are used again."""
    step_case = StepCase(
        num_microbatches=case.M, num_layers=case.layers, overlap_grad_reduce=True, seed=case.seed
    )
    watch = _Watch()

    def after_grad(self: Any, param: torch.nn.Parameter) -> None:
        watch.arrivals.append(param)
        student._after_grad(self, param)

    with (
        installed(student.lay_out_buffer, BUFFER + "lay_out_buffer"),
        installed(after_grad, DDP + "_after_grad"),
        installed(
            student.register_grad_ready, BUFFER + "_ParamAndGradBucketGroup.register_grad_ready"
        ),
        observed_by(watch),
    ):
        step = on_these_ranks(step_case)
        # A step that is shorter than the next: what one has learned must not outlive it.
        for number, M in enumerate((1, case.M)):
            watch.arrivals, watch.launches = [], []
            step.case = replace(step_case, num_microbatches=M)
            step.forward_backward()
            words = check_overlap(watch, step.chunks[0].bucket_groups, M, number)
    serial = one_process(step_case, dist.get_world_size())
    serial.forward_backward()
    check_gradients(step, serial.gradients())
    return Result(words)


def check_overlap(watch: _Watch, groups: list[Any], M: int, step: int) -> dict[str, str]:
    """Every bucket once, and right after its last gradient (or that of one before it)."""
    where = f"rank {dist.get_rank()}, step {step}"
    num_params = sum(len(group.params) for group in groups)
    last = watch.arrivals[-num_params:]
    if len(watch.launches) != len(groups):
        raise Wrong(
            f"{where}: {len(groups)} buckets were launched {len(watch.launches)} times; each is to "
            "be launched once per step"
        )
    due, early = 0, 0
    for number, (group, at) in enumerate(watch.launches):
        mine = max(place + 1 for place, p in enumerate(last) if p in group.params)
        due = max(due, mine)
        found = at - (len(watch.arrivals) - num_params)
        if found != due:
            raise Wrong(
                f"{where}: bucket {number} was launched after {found} of the last microbatch's "
                f"{num_params} gradients; it was complete after {due}"
            )
        early += found < num_params
    sizes = [sum(p.numel() for p in group.params) for group in groups]
    return {
        "overlap": f"{early} of {len(groups)} buckets left before backward was over",
        "elements": f"{sizes}",
        "gradients added": f"{len(watch.arrivals)} = {num_params} parameters x M ({M})",
    }
