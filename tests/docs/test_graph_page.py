"""What the page on captured steps shows: kinds of calls, buffers, a late result, what is refused."""

import doctest
import importlib

import pytest

from minimegatron.core.full_cuda_graph import FullCudaGraphWrapper

graphs = importlib.import_module("cases.graphs")


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()[2:]]


def test_the_calls_are_two_eager_ones_a_capture_and_replays():
    found = graphs.calls()
    assert [call.kind for call in found] == [
        *["eager"] * 2,
        "capture, then replay",
        *["replay"] * 2,
    ]
    # By hand: the losses of 1 and 2 are 1 + 4, and the gradient of (w x)² is 2 x² where w = 1.
    assert [call.loss for call in found] == [5, 25, 61, 113, 181]
    assert [call.gradient for call in found] == [2 * call.loss for call in found]
    assert [call.length for call in found] == [2, 4, 6, 6, 6]
    assert len({call.place for call in found}) == 1
    assert FullCudaGraphWrapper.curr_iteration["training"] == 0


def test_an_eager_run_has_the_same_numbers_and_a_longer_list():
    assert graphs.is_equal_to_eager() == "the same"
    assert [call.length for call in graphs.calls(is_captured=False)] == [2, 4, 6, 8, 10]


def test_a_late_reader_sees_the_last_replay():
    at_once, eager, captured = zip(*(row[1:] for row in cells(graphs.late_table())), strict=True)
    assert at_once == eager == ("5", "25", "61", "113", "181")
    assert captured == ("5", "25", "181", "181", "181")


def test_a_buffer_that_is_replaced_is_not_read():
    memory, results = zip(*(row[2:] for row in cells(graphs.rebound_table())), strict=True)
    assert memory == ("the same", "the same", "another") and results == ("9", "25", "25")


def test_what_is_forbidden_and_what_is_refused():
    assert len(cells(graphs.forbidden_table())) == len(graphs.READERS)
    rows = cells(graphs.refused_table())
    assert len(rows) == len(graphs.REFUSED) + 1
    assert rows[0] == [
        "the check for NaN",
        "reads numbers of each microbatch",
        f"add `{graphs.QUIET}`",
    ]
    with pytest.raises(ValueError, match="not refused"):
        graphs._refused(f"{graphs.QUIET} --attention-dropout 0")
    with pytest.raises(ValueError, match="lets it pass"):
        graphs._asked_for(lambda: graphs.X.sum())


def test_examples():
    result = doctest.testmod(graphs)
    assert result.attempted >= 4 and not result.failed
