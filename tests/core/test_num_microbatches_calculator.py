"""The number of microbatches: constant, ramped up, and refused with the numbers in the message."""

import pytest

from minimegatron.core import num_microbatches_calculator as nmc


@pytest.fixture(autouse=True)
def forget():
    nmc.destroy_num_microbatches_calculator()
    yield
    nmc.destroy_num_microbatches_calculator()


def test_constant():
    nmc.init_num_microbatches_calculator(0, None, 32, 2, 4)
    assert nmc.get_num_microbatches() == 4
    assert nmc.get_current_global_batch_size() == 32
    assert nmc.get_micro_batch_size() == 2
    nmc.update_num_microbatches(10_000)
    assert nmc.get_num_microbatches() == 4


def test_rampup_follows_the_documented_steps():
    # 16 -> 32 by 8 over 300 samples: two steps, each size held for 150 samples.
    nmc.init_num_microbatches_calculator(0, [16, 8, 300], 32, 2, 2)
    seen = []
    for consumed in (0, 149, 150, 299, 300, 301, 10_000):
        nmc.update_num_microbatches(consumed)
        seen.append((consumed, nmc.get_current_global_batch_size(), nmc.get_num_microbatches()))
    assert seen == [
        (0, 16, 4),
        (149, 16, 4),
        (150, 24, 6),
        (299, 24, 6),
        (300, 32, 8),
        (301, 32, 8),
        (10_000, 32, 8),
    ]


def test_rampup_boundaries_are_exact_for_samples_that_do_not_divide():
    nmc.init_num_microbatches_calculator(0, [1, 1, 10], 8, 1, 1)  # seven steps over ten samples
    for consumed in range(11):
        nmc.update_num_microbatches(consumed)
        assert nmc.get_num_microbatches() == 1 + consumed * 7 // 10


def test_rampup_of_nothing():
    nmc.init_num_microbatches_calculator(0, [8, 4, 0], 8, 2, 2)
    assert nmc.get_num_microbatches() == 2
    nmc.reconfigure_num_microbatches_calculator(0, [4, 4, 0], 8, 2, 2)
    assert nmc.get_num_microbatches() == 2


def test_decrease_batch_size_if_needed_rounds_down():
    nmc.init_num_microbatches_calculator(0, None, 30, 4, 2, decrease_batch_size_if_needed=True)
    assert nmc.get_current_global_batch_size() == 30
    assert nmc.get_current_running_global_batch_size() == 24
    assert nmc.get_num_microbatches() == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, 30, 4, 2), ["30", "4", "2", "= 8", "try 24"]),
        ((None, 4, 4, 2), ["4", "= 8", "try 8"]),
        ((None, 0, 4, 2), ["global_batch_size is 0"]),
        ((None, 8, -1, 2), ["micro_batch_size is -1"]),
        (([16, 5, 100], 32, 2, 2), ["starts at 16", "by 5", "32", "16 must be"]),
        (([40, 8, 100], 32, 2, 2), ["starts at 40"]),
        (([16, 2, 100], 32, 2, 2), ["batch size 18", "= 4"]),
        (([16, 0, 100], 32, 2, 2), ["16 0 100"]),
        (([16, 8], 32, 2, 2), ["2 numbers", "give 3"]),
        (([16, 8, -3], 32, 2, 2), ["16 8 -3"]),
    ],
)
def test_bad_sizes_are_refused_with_their_numbers(arguments, words):
    with pytest.raises(ValueError) as error:
        nmc.init_num_microbatches_calculator(0, *arguments)
    for word in words:
        assert word in str(error.value)


def test_asked_too_early_or_set_up_twice():
    with pytest.raises(ValueError, match="not known yet"):
        nmc.get_num_microbatches()
    nmc.init_num_microbatches_calculator(0, None, 8, 1, 1)
    with pytest.raises(AssertionError, match="already set up; call destroy_num_micro"):
        nmc.init_num_microbatches_calculator(0, None, 8, 1, 1)
    assert nmc.get_num_microbatches() == 8


def test_a_calculator_is_built_beside_the_runs():
    nmc.init_num_microbatches_calculator(0, None, 8, 1, 1)
    ramp = nmc._build_num_microbatches_calculator(0, [16, 16, 48], 32, 8, 2, False)
    assert (ramp.get(), ramp.ramup_samples, ramp.batch_size_increment) == (1, 48, 16)
    assert nmc.get_num_microbatches() == 8
