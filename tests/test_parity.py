"""Parallel equals serial: losses, every raw gradient, and weights after three steps, in float64."""

from pathlib import Path

import pytest

from tests.figures import figure
from tests.parity import Case, reference, run_cases
from tests.parity_cases import all_cases, system_cases, unusual_cases
from tests.ranks import run_ranks

WORLDS = sorted({case.world for case in all_cases()})


def check(cases: list[Case], world: int, folder: Path, shared_memory: bool = True) -> None:
    cases = [case for case in cases if case.world == world]
    work = [(case, reference(case.serial(), folder)) for case in cases]
    results = run_ranks(run_cases, world, work, timeout=280, shared_memory=shared_memory)
    problems = [problem for rank in results for *_, found in rank for problem in found]
    assert problems == []
    compared = sum(number for rank in results for _, number, _, _ in rank)
    worst = max(worst for rank in results for _, _, worst, _ in rank)
    figure(f"{world} ranks: {len(cases)} cases, {compared} tensors, worst difference {worst:.1e}")
    assert compared > 20 * len(cases)


@pytest.mark.parametrize("world", WORLDS)
def test_gpt_equals_one_process(world, tmp_path_factory):
    check(all_cases(), world, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("world", WORLDS)
def test_memory_savings_change_nothing(world, tmp_path_factory):
    """Sequence parallelism, recompute and ZeRO-1, together in every way."""
    check(system_cases(), world, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("world", [2, 4])
def test_what_systems_without_shared_memory_get(world, tmp_path_factory):
    """The same over gloo alone."""
    cases = [case for case in all_cases() + system_cases() if case.world == world][::4]
    check(cases, world, tmp_path_factory.getbasetemp(), shared_memory=False)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_options_that_nobody_combines(world, tmp_path_factory):
    """Loss scale, evaluation between steps, deferral, delay, overlap and the rest, drawn at random."""
    check(unusual_cases(8, world), world, tmp_path_factory.getbasetemp())


@pytest.mark.full
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_more_options_that_nobody_combines(world, shared_memory, tmp_path_factory):
    cases = unusual_cases(40, world, seed=1 if shared_memory else 2)
    check(cases, world, tmp_path_factory.getbasetemp(), shared_memory)
