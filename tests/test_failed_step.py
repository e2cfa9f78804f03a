"""A step that fails on one rank, then a good step in the same ranks: with the right numbers.

Every place where a step can fail, on every rank in turn, over several ways of cutting the model. The
rank that fails raises; those that wait for it are told and raise too, long before a time-out. Nothing
that the failed step left behind, a message, a gradient held back, may enter the next one.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.core import collectives, parallel_state
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.utils import get_model_config, unwrap_model
from tests.figures import figure
from tests.parity import (
    Case,
    batches,
    build,
    compare,
    forward_step_func,
    load_reference,
    reference,
    run_step,
    train_steps,
)
from tests.ranks import has_shared_memory, run_ranks

PLACES = ("arguments", "forward", "loss", "backward", "no_sync", "grad_scale", "finalize")
FORWARD_ONLY_PLACES = ("arguments", "interrupt", "model", "forward", "loss")
BEFORE_THE_STEP = {"arguments": ValueError, "interrupt": KeyboardInterrupt, "model": RuntimeError}
"""Places where a step fails, on one rank, before it has begun there; and what that rank raises."""
CASES = [
    Case(pp=2, M=3),
    Case(pp=4, M=4),
    Case(tp=2, pp=2, M=3, sp=True),
    Case(pp=2, dp=2, M=3, overlap_grad_reduce=True),
    Case(pp=2, vp=2, G=2, M=4, batched=False, overlap=True, deallocate=True, dp=2, dist_opt=True),
    Case(dp=2, M=2, overlap_grad_reduce=True),
]


class Planted(Exception):
    """What a test makes a step raise."""


def _raise(*unused: Any, **unused_too: Any) -> None:
    raise Planted("planted")


class Interrupted(list):
    """Iterators, while whose number is counted somebody presses Ctrl-C."""

    def __len__(self) -> int:
        raise KeyboardInterrupt


class FailingStep:
    """A forward step function that raises at one place of the second microbatch.

    At the place `layer` it raises in the first: in a chunk's last layer, when the first are done.
    """

    def __init__(self, place: str, config: Any):
        self.place, self.config, self.num_forwards = place, config, 0
        self.hooks, self.handles = dict(vars(config)), []
        if place == "grad_scale":
            config.grad_scale_func = _raise
        elif place == "finalize":
            config.finalize_model_grads_func = _raise
        elif place == "no_sync":
            several = isinstance(config.no_sync_func, list)
            config.no_sync_func = [_raise] if several else _raise

    def restore(self) -> None:
        """Undoes what it did to config and model."""
        vars(self.config).update(self.hooks)
        for handle in self.handles:
            handle.remove()

    def __call__(self, data_iterator, model, *recompute):
        if self.place == "layer":
            last = unwrap_model(model).decoder.layers[-1]
            self.handles.append(last.register_forward_pre_hook(_raise))
        output, loss_func = forward_step_func(data_iterator, model, *recompute)
        self.num_forwards += 1
        if self.num_forwards >= 2:
            if self.place == "forward":
                _raise()
            if self.place == "loss":  # only a chunk that ends in the loss calls it
                return output, _raise
            if self.place == "backward" and output.requires_grad:
                output.register_hook(_raise)
        return output, loss_func


def fail(case: Case, groups: Any, chunks: list, place: str, rank: int, forward_only: bool) -> str:
    """One step of the model that fails at `place` on `rank`; returns what this rank raised."""
    is_failing = torch.distributed.get_rank() == rank
    step = FailingStep(place, get_model_config(chunks[0])) if is_failing else forward_step_func
    # Not the batch of the good step: a message left over must have other numbers.
    data = batches(2 * case.M)[case.M :]
    iterators = [iter(data) for _ in chunks]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    if is_failing and place == "arguments":
        iterators = [iter(data) for _ in range(len(chunks) + 1)]
    elif is_failing and place == "interrupt":
        iterators = Interrupted(iterators)
    elif is_failing and place == "model":
        chunks = [torch.nn.Linear(1, 1)]  # which has no config
    try:
        with torch.set_grad_enabled(not forward_only):
            run_step(case, groups, chunks, iterators, forward_only, step)
    except (BEFORE_THE_STEP.get(place, Planted), ConnectionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if is_failing:
            step.restore()
    return ""


def places_of(case: Case, rank: int, groups_of: Any) -> list[tuple[str, bool]]:
    """(place, forward only) of what can fail on a rank: only the last stage has a loss."""
    is_last = groups_of(rank) == case.pp - 1
    places = [*PLACES, "interrupt", "model"]
    found = [(place, False) for place in places if is_last or place not in ("loss", "grad_scale")]
    return found + [(p, True) for p in FORWARD_ONLY_PLACES if is_last or p != "loss"]


Failure = tuple[int, str, bool]
"""Which rank fails, where, and whether the step is forward only."""


def failures(case: Case, every: bool) -> list[Failure]:
    """Of every place on every rank; else every place once, on one rank after the other."""
    ranks_of: dict[tuple[str, bool], list[int]] = {}
    for rank in range(case.world):
        for where in places_of(case, rank, lambda r: r // (case.tp * case.dp)):
            ranks_of.setdefault(where, []).append(rank)
    found = []
    for number, (where, ranks) in enumerate(ranks_of.items()):
        chosen = ranks if every else [ranks[(number + case.M) % len(ranks)]]
        found += [(rank, *where) for rank in chosen]
    assert {rank for rank, _, _ in found} == set(range(case.world))
    return sorted(found)


def fail_and_recover(case: Case, path: str, planned: list[Failure]) -> tuple[int, list[str]]:
    """Each failure, and after each the step that `compare` knows the right numbers of."""
    parallel_state.initialize_model_parallel(case.tp, case.pp, case.vp)
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    problems, num_failures = [], 0
    for rank, place, forward_only in planned:
        chunks, _ = build(case, groups)
        raised = fail(case, groups, chunks, place, rank, forward_only)
        kind = BEFORE_THE_STEP.get(place, Planted).__name__
        if torch.distributed.get_rank() == rank and kind not in raised:
            problems.append(f"{place} on rank {rank}: raised {raised!r}")
        num_failures += 1
        _, _, found = compare(case, load_reference(path), groups, num_steps=1)
        problems += [f"after {place} on rank {rank}: {problem}" for problem in found]
    return num_failures, problems


# Over gloo a rank cannot tell the others that it has failed; see the last test.
tells = pytest.mark.skipif(not has_shared_memory(), reason="gloo's ranks wait for the time-out")


NAMED = pytest.mark.parametrize(
    "case", CASES, ids=lambda c: str(c).replace("=", "").replace(" ", "-")
)


@tells
@NAMED
def test_a_good_step_follows_a_failed_one(case, tmp_path_factory):
    """Over two ranks every place on every rank; over four every place, and every rank."""
    check(case, failures(case, every=case.world == 2), tmp_path_factory.getbasetemp())


@pytest.mark.full
@tells
@NAMED
def test_a_good_step_follows_a_failed_one_wherever_it_failed(case, tmp_path_factory):
    check(case, failures(case, every=True), tmp_path_factory.getbasetemp())


def check(case: Case, planned: list[Failure], folder: Path) -> None:
    path = reference(case.serial(), folder)
    results = run_ranks(fail_and_recover, case.world, case, path, planned, timeout=250)
    assert [problem for _, found in results for problem in found] == []
    figure(f"{case}: {results[0][0]} failures, each followed by a good step")


GATHERED_LATER = [
    Case(
        dp=2, M=2, num_layers=4, dist_opt=True, overlap_grad_reduce=True, overlap_param_gather=True
    ),
    Case(
        pp=2,
        vp=2,
        G=2,
        M=4,
        dp=2,
        batched=False,
        num_layers=8,
        dist_opt=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
]


def fail_between_two_steps(case: Case, path: str) -> list[str]:
    """Trains a step, fails one before its parameters are gathered, and trains another."""
    parallel_state.initialize_model_parallel(case.tp, case.pp, case.vp)
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    expected, problems = load_reference(path), []
    data = batches(case.M * case.dp)[groups.dp.rank() :: case.dp]
    for rank in range(case.world):
        for place in ("layer", "forward", "backward"):
            chunks, optimizer = build(case, groups)
            steps = train_steps(case, chunks, optimizer, groups, data)
            next(steps)
            for forward_only in (False, True) if place == "layer" else (False,):
                raised = fail(case, groups, chunks, place, rank, forward_only)
                if torch.distributed.get_rank() == rank and "Planted" not in raised:
                    problems.append(f"{place} on rank {rank}: raised {raised!r}")
            _, _, norm = next(steps)
            wanted = expected["norm of step 1"].item()
            if not abs(norm - wanted) < 1e-9:
                problems.append(f"after {place} on rank {rank}: norm {norm}, expected {wanted}")
    return problems


@tells
@pytest.mark.parametrize("case", GATHERED_LATER, ids=("plain", "interleaved"))
def test_parameters_whose_gathering_a_failed_step_began_are_right(case, tmp_path_factory):
    # A rank that fails early has not begun to gather what others have.
    path = reference(case.serial(), Path(tmp_path_factory.getbasetemp()))
    results = run_ranks(fail_between_two_steps, case.world, case, path, timeout=250)
    assert [problem for found in results for problem in found] == []


# -- A loss that is averaged over copies of the model --


class FailingAverage(FailingStep):
    """As `FailingStep`, but each microbatch's report is summed over the copies of the model."""

    def __init__(self, place: str, config: Any, group: Any):
        super().__init__(place, config)
        self.group = group

    def __call__(self, data_iterator, model, *recompute):
        output, loss_func = super().__call__(data_iterator, model, *recompute)
        return output, partial(self.average, loss_func)

    def average(self, loss_func: Any, output: torch.Tensor) -> tuple:
        loss, num_tokens, report = loss_func(output)
        total = report["loss"].clone().reshape(1)
        collectives.all_reduce(total, self.group)
        return loss, num_tokens, {"loss": total}


def fail_while_averaging(case: Case) -> list[str]:
    """Evaluations that fail on one rank, each followed by two good ones; what was not right."""
    parallel_state.initialize_model_parallel(case.tp, case.pp, case.vp)
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks, _ = build(case, groups)
    config, rank, problems = get_model_config(chunks[0]), torch.distributed.get_rank(), []
    good, other = (batches(2 * case.M)[i * case.M : (i + 1) * case.M] for i in range(2))

    def evaluate(data: list, step: Any) -> list[float]:
        with torch.no_grad():
            reports = run_step(case, groups, chunks, [iter(data) for _ in chunks], True, step)
        return [report["loss"].item() for report in reports]

    # Every copy has the same data, and the first evaluation does without the other copies.
    expected = [case.dp * loss for loss in evaluate(good, forward_step_func)]
    for failing, place in product(range(case.world), ("layer", "forward", "loss")):
        is_last_stage = failing // case.dp == case.pp - 1
        if place == "loss" and not is_last_stage:
            continue
        where = f"{place} on rank {failing}"
        step = FailingAverage(place if rank == failing else "", config, groups.dp)
        try:
            evaluate(other, step)
            if rank == failing or rank // case.dp == case.pp - 1:
                problems.append(f"{where}: rank {rank} raised nothing")
        except (Planted, ConnectionError):
            step.restore()
        for number in range(2):
            found = evaluate(good, FailingAverage("", config, groups.dp))
            if found != pytest.approx(expected, rel=1e-12):
                problems.append(f"after {where}, step {number}: {found}, expected {expected}")
    return problems


@tells
@pytest.mark.parametrize("case", [Case(dp=2, M=3), Case(pp=2, dp=2, M=3)], ids=("dp", "pp-dp"))
def test_an_evaluation_that_failed_leaves_nothing_to_other_copies(case):
    """Was: a loss averaged over copies was averaged with the failed evaluation's."""
    results = run_ranks(fail_while_averaging, case.world, case, timeout=120)
    assert [problem for found in results for problem in found] == []


def evaluate_unevenly(case: Case, path: str) -> list[str]:
    """Before a training step, the second copy of the model evaluates twice more than the first."""
    parallel_state.initialize_model_parallel(case.tp, case.pp, case.vp)
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks, _ = build(case, groups)
    for _ in range(groups.dp.rank()):
        build(case, groups)  # and has models that are never trained
    for _ in range(2 * groups.dp.rank()):
        run_step(case, groups, chunks, [iter(batches(case.M)) for _ in chunks], True)
    total = torch.ones(1)
    collectives.all_reduce(total, groups.dp)  # between two steps, all meet
    assert total.item() == case.dp
    return compare(case, load_reference(path), groups)[2]


def test_copies_of_the_model_may_evaluate_a_different_number_of_times(tmp_path_factory):
    """Was: their steps had different numbers from then on, and each waited for the other."""
    case = Case(pp=2, dp=2, M=3, overlap_grad_reduce=True, overlap_param_gather=True, dist_opt=True)
    path = reference(case.serial(), Path(tmp_path_factory.getbasetemp()))
    assert run_ranks(evaluate_unevenly, 4, case, path) == [[]] * 4


def tell_everybody(case: Case) -> list[str]:
    parallel_state.initialize_model_parallel(
        case.tp, case.pp, case.vp, distributed_timeout_minutes=10 / 60
    )
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks, _ = build(case, groups)
    return [fail(case, groups, chunks, "forward", case.world - 1, False)]


@tells
def test_ranks_that_wait_for_a_failed_one_are_told_why():
    case = replace(Case(tp=2, pp=2, M=3), sp=True)
    (first,), (second,), (third,), (failed,) = run_ranks(tell_everybody, 4, case)
    assert failed == "Planted: planted"
    for told in (first, second, third):
        assert "given up this step" in told and "planted" in told


def fail_and_make_groups_again(
    case: Case, path: str, failing: list[int]
) -> tuple[list[str], list[str]]:
    """What each rank raised, and what is wrong with the good step after it, in new groups."""
    raised, problems = [], []
    for rank in failing:
        parallel_state.initialize_model_parallel(
            case.tp, case.pp, case.vp, distributed_timeout_minutes=3 / 60
        )
        model_parallel_cuda_manual_seed(1)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chunks, _ = build(case, groups)
        raised.append(fail(case, groups, chunks, "forward", rank, False))
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(case.tp, case.pp, case.vp)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        _, _, found = compare(case, load_reference(path), groups, num_steps=1)
        problems += [f"after a failure on rank {rank}: {problem}" for problem in found]
        parallel_state.destroy_model_parallel()
    return raised, problems


@pytest.mark.parametrize("failing", [[1], pytest.param([0, 1], marks=pytest.mark.full)])
def test_without_shared_memory_a_good_step_follows_in_new_groups(failing, tmp_path_factory):
    """The other rank waits for a time-out."""
    case = Case(pp=2, M=3)
    path = reference(case.serial(), Path(tmp_path_factory.getbasetemp()))
    results = run_ranks(
        fail_and_make_groups_again, 2, case, path, failing, shared_memory=False, timeout=120
    )
    assert [problem for _, found in results for problem in found] == []
    for first, second in zip(*(raised for raised, _ in results), strict=True):
        assert sorted(text.split(":")[0] for text in (first, second)) == [
            "ConnectionError",
            "Planted",
        ]
