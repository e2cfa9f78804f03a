"""Parallel equals serial: losses, every raw gradient, and weights after two or three steps.

In float64, and where the case says so in float32. `make test` runs a covering array of all options,
in which every two values meet, and the named cases; `make test-full` runs the whole grids too.
"""

from pathlib import Path

import pytest

from tests.figures import figure
from tests.parity import Case, reference, run_cases
from tests.parity_cases import (
    NAMED_CASES,
    SPACE,
    all_cases,
    case_of,
    pairwise_cases,
    pairwise_rows,
    system_cases,
    unusual_cases,
)
from tests.ranks import run_ranks

WORLDS = SPACE.axes["world"]
LONG = 900.0
"""Seconds for the longest grids, of `make test-full` alone: eight ranks on two slow processors."""
MEMORY = pytest.mark.parametrize("shared_memory", [True, False], ids=("shared", "gloo"))


def check(
    cases: list[Case],
    world: int,
    folder: Path,
    shared_memory: bool = True,
    num_steps: int | None = None,
    timeout: float = 280,
) -> None:
    cases = [case for case in cases if case.world == world]
    assert cases, f"no case for {world} ranks"
    work = [(case, reference(case.serial(), folder)) for case in cases]
    how = {"timeout": timeout, "shared_memory": shared_memory}
    results = run_ranks(run_cases, world, work, num_steps, **how)
    problems = [problem for rank in results for *_, found in rank for problem in found]
    assert problems == []
    compared = sum(number for rank in results for _, number, _, _ in rank)
    worst = max(worst for rank in results for _, _, worst, _ in rank)
    figure(f"{world} ranks: {len(cases)} cases, {compared} tensors, worst difference {worst:.1e}")
    assert compared > 20 * len(cases)


# -- In every run of the tests --


@MEMORY
@pytest.mark.parametrize("world", WORLDS)
def test_every_two_options_equal_one_process(world, shared_memory, tmp_path_factory):
    cases, folder = pairwise_cases(shared_memory), tmp_path_factory.getbasetemp()
    check(cases, world, folder, shared_memory, num_steps=2)


@pytest.mark.parametrize("world", sorted({case.world for case in NAMED_CASES.values()}))
def test_named_cases_equal_one_process(world, tmp_path_factory):
    check(list(NAMED_CASES.values()), world, tmp_path_factory.getbasetemp())


def test_every_two_values_that_may_meet_do_meet():
    rows = pairwise_rows()
    covered = {pair for row in rows for pair in SPACE.pairs_of(row)}
    never = [pair for pair in SPACE.pairs() if pair not in covered]
    # Of those that never meet, the rules allow none, whatever the other options are.
    assert [pair for pair in never if SPACE.complete(SPACE.row_of(pair)) is not None] == []
    assert all(SPACE.allows(row) for row in rows)
    for row in rows[::5]:
        others = [other for other in rows if other is not row]
        left = {pair for other in others for pair in SPACE.pairs_of(other)}
        assert covered - left, "a row that shows nothing of its own"
    figure(f"{len(rows)} cases cover {len(covered)} pairs; {len(never)} pairs are illegal")


def test_cases_say_what_their_rows_say():
    cases = [case_of(row) for row in pairwise_rows()]
    assert {case.world for case in cases} == set(WORLDS)
    assert {case.vp for case in cases} == {None, 2, 3}
    assert {case.M % case.G > 0 for case in cases if case.G} == {True, False}
    assert any(case.overlap for case in cases) and any(case.pp > case.M for case in cases)
    assert {case.deferral_limit for case in cases if case.defer_embedding} == {0, 1, 2}
    assert {case.dtype for case in cases} == {"float64", "float32"}


# -- In `make test-full` --


@pytest.mark.full
@pytest.mark.parametrize("world", WORLDS)
def test_gpt_equals_one_process(world, tmp_path_factory):
    check(all_cases(), world, tmp_path_factory.getbasetemp())


@pytest.mark.full
@pytest.mark.parametrize("world", WORLDS)
def test_memory_savings_change_nothing(world, tmp_path_factory):
    """Sequence parallelism, recompute and ZeRO-1, together in every way."""
    check(system_cases(), world, tmp_path_factory.getbasetemp())


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_what_systems_without_shared_memory_get(world, tmp_path_factory):
    """The same over gloo alone."""
    cases = [case for case in all_cases() + system_cases() if case.world == world][::4]
    check(cases, world, tmp_path_factory.getbasetemp(), shared_memory=False)


@pytest.mark.full
@pytest.mark.timeout(LONG + 20)
@MEMORY
@pytest.mark.parametrize("world", WORLDS)
def test_options_that_nobody_combines(world, shared_memory, tmp_path_factory):
    """Loss scale, evaluation between steps, deferral, delay, overlap and the rest, drawn at random."""
    cases = unusual_cases(40, world, seed=1 if shared_memory else 2)
    check(cases, world, tmp_path_factory.getbasetemp(), shared_memory, timeout=LONG)
