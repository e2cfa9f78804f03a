"""BERT in parallel equals BERT in one process: losses, gradients, weights after two steps."""

import pytest

from tests.parity_bert import NAMED_CASES, SPACE, case_of, pairwise_rows
from tests.test_parity import check

CASES = [*map(case_of, pairwise_rows()), *NAMED_CASES.values()]


@pytest.mark.parametrize("world", sorted({case.world for case in CASES}))
def test_every_two_options_and_named_cases_equal_one_process(world, tmp_path_factory):
    check(CASES, world, tmp_path_factory.getbasetemp(), num_steps=2)


def test_every_two_values_that_may_meet_do_meet():
    covered = {pair for row in pairwise_rows() for pair in SPACE.pairs_of(row)}
    never = [pair for pair in SPACE.pairs() if pair not in covered]
    assert [pair for pair in never if SPACE.complete(SPACE.row_of(pair)) is not None] == []
