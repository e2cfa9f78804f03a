"""Parallel equals serial where ranks share sequences: losses, gradients, weights after two steps.

`make test` runs a covering array of all options, in which every two values meet, and named cases.
"""

import pytest

from tests.covering import covering_array
from tests.parity_context import (
    NAMED_CASES,
    SPACE,
    WIDE,
    case_of,
    pairwise_cases,
    pairwise_rows,
)
from tests.test_parity import LONG, check

WORLDS = SPACE.axes["world"]
CASES = [*pairwise_cases(), *NAMED_CASES.values()]


@pytest.mark.parametrize("world", WORLDS)
def test_every_two_options_and_named_cases_equal_one_process(world, tmp_path_factory):
    check(CASES, world, tmp_path_factory.getbasetemp(), num_steps=2)


@pytest.mark.full
@pytest.mark.timeout(LONG + 20)
def test_eight_ranks_equal_one_process(tmp_path_factory):
    cases = [case_of(row) for row in covering_array(WIDE)]
    check(cases, 8, tmp_path_factory.getbasetemp(), timeout=LONG)


def test_every_two_values_that_may_meet_do_meet():
    rows = pairwise_rows()
    covered = {pair for row in rows for pair in SPACE.pairs_of(row)}
    never = [pair for pair in SPACE.pairs() if pair not in covered]
    assert [pair for pair in never if SPACE.complete(SPACE.row_of(pair)) is not None] == []


def test_cases_say_what_their_rows_say():
    cases = [case_of(row) for row in pairwise_rows()]
    assert {case.world for case in cases} == set(WORLDS)
    assert {case.cp for case in cases} == {2, 4} and {case.ep for case in cases} == {1, 2}
    assert all(case.sp == (case.tp > 1) for case in cases)
