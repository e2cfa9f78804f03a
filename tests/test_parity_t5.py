"""T5 on several ranks equals T5 in one process: losses, gradients, weights after two steps.

`make test` runs a covering array of all options, in which every two values meet, and named cases. The
pipelines are those with a split rank: the encoder on the stages before it, the decoder on the others.
"""

import pytest

from tests.parity_t5 import NAMED_CASES, SPACE, SPLITS, case_of, pairwise_rows
from tests.test_parity import check

WORLDS = SPACE.axes["world"]
CASES = [*map(case_of, pairwise_rows()), *NAMED_CASES.values()]


@pytest.mark.parametrize("world", WORLDS)
def test_every_two_options_and_named_cases_equal_one_process(world, tmp_path_factory):
    check(CASES, world, tmp_path_factory.getbasetemp(), num_steps=2)


def test_every_two_values_that_may_meet_do_meet():
    rows = pairwise_rows()
    covered = {pair for row in rows for pair in SPACE.pairs_of(row)}
    never = [pair for pair in SPACE.pairs() if pair not in covered]
    assert [pair for pair in never if SPACE.complete(SPACE.row_of(pair)) is not None] == []


def test_every_split_is_tried():
    assert {case.world for case in CASES} == set(WORLDS)
    splits = {(pp, split) for pp, of_pp in SPLITS.items() for split in of_pp}
    assert {(case.pp, case.split) for case in CASES} == splits | {(4, 1)}
