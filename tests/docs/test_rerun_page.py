"""What the page on steps that are run again shows: every verdict, what it costs, what is forgotten."""

import doctest
import importlib

import pytest

from minimegatron.core.rerun.states import EXITS, RerunState
from minimegatron.core.rerun_state_machine import get_rerun_state_machine

reruns = importlib.import_module("cases.reruns")


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()[2:]]


def test_every_exit_and_every_state_has_a_row():
    found = [reruns.outcome(case) for case in reruns.CASES]
    assert {exits for _, exits, _ in found} == {*EXITS.values(), reruns.GO_ON, None}
    passed = {state for states, _, _ in found for state in states}
    assert passed == {*RerunState}


def test_the_verdicts_are_those_of_the_drawing():
    rows = {row[0]: row[1:] for row in cells(reruns.verdicts_table()) if row[1] == "yes"}
    assert rows["2"] == ["yes", "1", "go on", "nothing"]
    assert rows["NaN, 2"] == ["yes", "1 → 2", "no, yes, 17", "transient error"]
    assert rows["NaN, NaN"][1:] == ["1 → 2 → 3", "yes, yes, 16", "no transient error"]
    assert rows["NaN, NaN; on another device: 2"][2:] == ["no, yes, 17", "persistent error"]
    assert rows["NaN, NaN; on another device: NaN"][2:] == ["no, yes, 17", "correct result"]
    assert rows["NaN, NaN; on the suspected device: NaN"][2] == "no, yes, 16"
    assert rows["NaN, in mode `disabled`"][2:] == ["`RuntimeError`", "the loss is not finite"]
    for word in ("transient error", "persistent error", "correct result", "exit 16", "exit 17"):
        assert word in reruns.drawing()


def test_a_script_with_too_many_runs_is_an_error():
    with pytest.raises(ValueError, match="ran 1 times, and 2 were written"):
        reruns.judge_step(reruns.new_machine(), [[2.0], [2.0]])


def test_what_it_costs():
    runs, numbers = zip(
        *((found.runs, found.numbers) for found in reruns.costs().values()), strict=True
    )
    assert runs == (1, 1, 2, 1, 2) and numbers == ([], [1], [1, 3], [3], [1])
    assert [row[-1] for row in cells(reruns.costs_table())] == ["0", *"2222"]


def test_what_is_forgotten_shows():
    nothing, no_rewind, no_random, no_zero = (reruns.repeat(**o) for o in reruns.LEFT_OUT.values())
    assert nothing.first == nothing.second and no_zero.first == no_zero.second
    assert no_rewind.second != no_rewind.first == no_random.first != no_random.second
    verdicts = [found.said.partition(":")[0] for found in (nothing, no_rewind, no_random, no_zero)]
    assert verdicts == ["no transient error", *["transient error"] * 2, "no transient error"]
    assert no_zero.gradient == 2 * nothing.gradient
    assert get_rerun_state_machine().get_mode() == "disabled"


def test_examples():
    result = doctest.testmod(reruns)
    assert result.attempted >= 10 and not result.failed
