"""The part of a lab that runs on the ranks: one training step of a broken copy, beside one process.

Megatron has no counterpart.
"""

import contextlib
import importlib
import sys
import threading
import traceback
from collections.abc import Iterator

import torch
import torch.distributed as dist

from minimegatron.core.tracing import Call, call_traced, observed_by
from minimegatron.exercises.bench.apart import meet
from minimegatron.exercises.bench.cases import Wrong
from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.labs.lab_job import LabJob
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.plain_data import to_line
from minimegatron.exercises.room.rank_side import Failed, printing_to

MOVE_SECONDS = 0.5
TOLERANCES = {"rtol": 1e-9, "atol": 1e-9}
KEPT = (
    *("minimegatron.core.tracing", "minimegatron.doctor", "minimegatron.launching.launcher"),
    "minimegatron.backend",
)
"""Watching goes on as before, so who watches must be who is told; and torch knows one backend."""
REPLACED = tuple(
    f"minimegatron.exercises.bench.{name}"
    for name in (
        "gpt_step",
        "family_steps",
        "policy_step",
        "repeated_step",
        "step_case",
        "untagged_messages",
        "replacing",
    )
)


def step_on_rank(job: LabJob) -> None:
    """One step on this rank. Raises Failed, with what was noticed in this rank's file, if any was."""
    with printing_to(job.pipes):
        try:
            expected = _Expected(job)
            _use_copy(job.package)
            _compare(job, expected)
        except Wrong as error:
            _tell(job, verdict.WRONG, str(error))
            raise Failed from error
        except BaseException as error:
            _tell(job, verdict.RAISED, _raised(error, job.package))
            raise Failed from error


def _tell(job: LabJob, kind: str, text: str) -> None:
    with open(f"{job.lines}/{dist.get_rank()}", "w", encoding="utf-8") as file:
        file.write(to_line({"failed": kind, "text": text}) + "\n")


def _raised(error: BaseException, package: str) -> str:
    """An exception, with the last lines of the copy that it came through."""
    summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    lines = [f"rank {dist.get_rank()} raised {summary}"]
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(package):
            name = frame.filename.removeprefix(package).lstrip("/")
            lines.append(f"  {name}:{frame.lineno}, in {frame.name}:  {frame.line}")
    return "\n".join([lines[0], *lines[1:][-6:]])


class _Expected:
    """What one process finds with the package as it is, and this rank's pieces of it."""

    def __init__(self, job: LabJob):
        reference, rank = Reference(job.layout, dist.get_world_size()).run(), dist.get_rank()
        self.who, self.sizes = reference.who(rank), reference.sizes
        reports = reference.reports[reference.places[rank]["dp"] :: reference.dp]
        self.losses = [report["loss"].item() for report in reports]
        self.is_last_stage = reference.is_last_stage(rank)
        self.gradients = reference.pieces(rank, reference.gradients)
        _, self.norm, _ = reference.step.optimizer.step()
        weights = {name: param.detach() for name, param in reference.step.parameters()}
        self.weights = reference.pieces(rank, weights)


def _use_copy(package: str) -> None:
    """From now on, imports of the package find the copy."""
    for name in list(sys.modules):
        is_ours = name == "minimegatron" or name.startswith("minimegatron.")
        is_exercise = name.startswith("minimegatron.exercises")
        if is_ours and not name.startswith(KEPT) and not is_exercise or name.startswith(REPLACED):
            del sys.modules[name]
    sys.path.insert(0, package)
    importlib.invalidate_caches()


@contextlib.contextmanager
def _moving() -> Iterator[None]:
    """While modules are imported nobody makes a call; this rank is seen to move all the same."""
    over = threading.Event()

    def move() -> None:
        while not over.wait(MOVE_SECONDS):
            call_traced("import", int)

    thread = threading.Thread(target=move, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def _compare(job: LabJob, expected: _Expected) -> None:
    with _moving():
        gpt = importlib.import_module("minimegatron.exercises.bench.gpt_step")
        rendezvous = importlib.import_module("minimegatron.exercises.bench.untagged_messages")
    meet()
    step = gpt.on_these_ranks(job.layout)
    case, groups = step.case, step.groups
    held = _HeldMicrobatches()
    with contextlib.ExitStack() as around:
        if job.strict:
            around.enter_context(rendezvous.without_tags())
        around.enter_context(observed_by(held))
        reports = step.forward_backward()
    if expected.is_last_stage:
        losses = [report["loss"].item() for report in reports]
        _check("the loss of microbatches", losses, expected.losses, expected)
    # A rank that ends here leaves the others in a collective; first all compare what they have.
    meet()
    _check_gradients(step.gradients(), expected)
    meet()
    if case.vp is None and case.pp > 1:
        most = min(case.pp - groups.pp.rank(), case.num_microbatches)
        if held.most > most:
            raise Wrong(
                f"rank {expected.who}: all numbers are right, but it holds the activations of "
                f"{held.most} microbatches at once; 1F1B needs min(pp - stage, microbatches) = {most}"
            )
    meet()
    _, norm, _ = step.optimizer.step()
    _check("the norm of all gradients", norm, expected.norm, expected)
    for name, param in step.parameters():
        _check(f"updated {name}", param.detach(), expected.weights[name], expected)
    meet()


def _check_gradients(found: dict[str, torch.Tensor], expected: _Expected) -> None:
    """Of the wrong ones, the first that backward makes is told: where it goes wrong, it begins."""
    wrong: list[tuple[str, Wrong]] = []
    for name, gradient in found.items():
        try:
            _check(f"gradient of {name}", gradient, expected.gradients[name], expected)
        except Wrong as error:
            wrong.append((name, error))
    if wrong:
        names = [name for name, _ in wrong]
        right = [name for name in found if name not in names]
        few = ", ".join(right[-3:]) or "none"
        raise Wrong(
            f"{wrong[-1][1]}\n{len(names)} of this rank's {len(found)} gradients are wrong; of those "
            f"that are right, nearest to the loss: {few}"
        )


def _check(what: str, found: object, wanted: object, expected: _Expected) -> None:
    check_numbers(what, found, wanted, expected.who, expected.sizes, **TOLERANCES)


class _HeldMicrobatches:
    """An observer: for how many microbatches, at most, the backward was still to come."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def start(self, call: Call) -> None:
        """A traced call begins."""
        self.now += {"forward-compute": 1, "backward-compute": -1}.get(call.name, 0)
        self.most = max(self.most, self.now)

    def stop(self, call: Call) -> None:
        """A traced call ends."""
