"""The part of a lab that runs on the ranks: one training step of a broken copy, beside one process.

Called by: `labs`, through the launcher. Calls: `bench_gpt`, twice: as it is, for what one process
finds; then as it is in the copy, with everything that it imports. Megatron has no counterpart.
"""

import contextlib
import importlib
import sys
import threading
import traceback
from collections.abc import Iterator

import torch.distributed as dist

from minimegatron.core.tracing import Call, call_traced, observed_by
from minimegatron.exercises import bench_gpt
from minimegatron.exercises.feedback import Wrong, check_numbers
from minimegatron.exercises.labs import LabJob
from minimegatron.exercises.rank_side import Told, printing_to, verdict_on
from minimegatron.exercises.verdict import RAISED, Verdict

MOVE_SECONDS = 0.5
TOLERANCES = {"rtol": 1e-9, "atol": 1e-9}
KEPT = ("minimegatron.core.tracing", "minimegatron.doctor", "minimegatron.launcher")
"""Watching goes on as before, so who watches must be who is told."""
REPLACED = ("minimegatron.exercises.bench_", "minimegatron.exercises.check")


def step_on_rank(job: LabJob) -> str:
    """One step on this rank. Raises Told, with what was noticed, if anything was."""
    with printing_to(job.pipes):
        try:
            case = bench_gpt.StepCase(**job.layout)
            expected = _Expected(case, dist.get_world_size() // (case.tp * case.pp))
            _use_copy(job.package)
            _compare(job, expected)
        except Wrong as error:
            raise Told(verdict_on(error, job.path).to_json()) from error
        except BaseException as error:
            raise Told(_raised(error, job.package).to_json()) from error
    return "nothing noticed"


def _raised(error: BaseException, package: str) -> Verdict:
    """An exception, with the last lines of the copy that it came through."""
    summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    lines = [f"rank {dist.get_rank()} raised {summary}"]
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(package):
            name = frame.filename.removeprefix(package).lstrip("/")
            lines.append(f"  {name}:{frame.lineno}, in {frame.name}:  {frame.line}")
    return Verdict(RAISED, "\n".join([lines[0], *lines[1:][-6:]]), rank=dist.get_rank())


class _Expected:
    """What one process finds with the package as it is."""

    def __init__(self, case: bench_gpt.StepCase, dp: int):
        step = bench_gpt.one_process(case, dp)
        reports = step.forward_backward()
        self.dp = dp
        self.losses = [report["loss"].item() for report in reports]
        self.gradients = step.gradients()
        _, self.norm, _ = step.optimizer.step()
        self.weights = {name: param.detach().clone() for name, param in step.parameters()}


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
        gpt = importlib.import_module("minimegatron.exercises.bench_gpt")
        rendezvous = importlib.import_module("minimegatron.exercises.bench_rendezvous")
        check = importlib.import_module("minimegatron.exercises.check")
    case = gpt.StepCase(**job.layout)
    step = gpt.on_these_ranks(case)
    place, sizes, groups = step.place(), step.sizes(), step.groups
    held = _Held()
    with contextlib.ExitStack() as around:
        if job.strict:
            ours = (rendezvous.RendezvousTransport, rendezvous.GET_TRANSPORT)
            around.enter_context(check.installed(*ours))
        around.enter_context(observed_by(held))
        reports = step.forward_backward()
    if groups.pp.rank() == groups.pp.size() - 1:
        losses = [report["loss"].item() for report in reports]
        mine = expected.losses[groups.dp.rank() :: expected.dp]
        check_numbers("the loss of microbatches", losses, mine, place, sizes, **TOLERANCES)
    # A rank that ends here leaves the others in a collective; first all compare what they have.
    dist.barrier()
    for name, param in step.parameters():
        wanted = step.mine(expected.gradients[name], param)
        found = param.main_grad
        check_numbers(f"gradient of {name}", found, wanted, place, sizes, **TOLERANCES)
    dist.barrier()
    if case.vp is None and case.pp > 1:
        most = min(case.pp - groups.pp.rank(), case.num_microbatches)
        if held.most > most:
            raise Wrong(
                f"rank {place}: all numbers are right, but it holds the activations of {held.most} "
                f"microbatches at once; 1F1B needs min(pp - stage, microbatches) = {most}"
            )
    dist.barrier()
    _, norm, _ = step.optimizer.step()
    check_numbers("the norm of all gradients", norm, expected.norm, place, sizes, **TOLERANCES)
    for name, param in step.parameters():
        wanted = step.mine(expected.weights[name], param)
        check_numbers(f"updated {name}", param.detach(), wanted, place, sizes, **TOLERANCES)
    dist.barrier()


class _Held:
    """An observer: for how many microbatches, at most, the backward was still to come."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def start(self, call: Call) -> None:
        """A traced call begins."""
        self.now += {"forward-compute": 1, "backward-compute": -1}.get(call.name, 0)
        self.most = max(self.most, self.now)

    def stop(self, call: Call) -> None:
        """A traced call ends."""
