"""Parallel equals serial for Mamba and its hybrids: losses, gradients, weights after two steps."""

import pytest

from tests.parity_mamba import SPACE, all_cases
from tests.test_parity import check


@pytest.mark.parametrize("world", SPACE.axes["world"])
def test_every_two_options_and_named_cases_equal_one_process(world, tmp_path_factory):
    check(all_cases(), world, tmp_path_factory.getbasetemp(), num_steps=2)


def test_cases_say_what_their_rows_say():
    cases = all_cases()
    assert {case.world for case in cases} == set(SPACE.axes["world"])
    assert all(len(case.pattern) == case.num_layers for case in cases)
    assert {letter for case in cases for letter in case.pattern} == set("M*-")
