"""No grade depends on the hidden seed: it draws numbers, and kinds of cases are fixed.

All known mistakes with ten seeds are in `ten_seeds`, a program; here is what takes no time.
"""

import importlib
import re
import sys
from types import ModuleType
from typing import Any

import pytest

from minimegatron.exercises.exercise import Exercise, exercises, find
from minimegatron.launching.user_file import load_user_file
from tests.exercises.ten_seeds import HIDDEN, kinds_of
from tests.exercises.wrong_solutions import WrongSolution, wrong_solutions

SEEDS = (0, *HIDDEN)


def modules(exercise: Exercise) -> list[ModuleType]:
    names = [name for name in ("alone", "check") if (exercise.folder / f"{name}.py").is_file()]
    return [importlib.import_module(f"{exercise.module}.{name}") for name in names]


def kind(value: Any, is_in_a_list: bool = False) -> Any:
    """What of a value is no number: names, choices, and which dicts and lists hold them.

    Many of one kind, how many ever, are the same as others.
    """
    if isinstance(value, dict):
        return {key: kind(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        kinds = [kind(one, is_in_a_list=True) for one in value]
        return ["many", kinds[0]] if kinds and kinds.count(kinds[0]) == len(kinds) else kinds
    if isinstance(value, int | float) and (is_in_a_list or not isinstance(value, bool)):
        return "number"
    return value


@pytest.mark.parametrize("exercise", exercises(), ids=lambda one: one.number)
def test_d_a_seed_draws_numbers_and_no_kinds(exercise):
    found = {seed: [] for seed in SEEDS}
    for module in modules(exercise):
        for seed, kinds in found.items():
            for case in module.cases(seed):
                name = re.sub(r"\d+(\.\d+)?", "#", str(case))
                kinds.append((name, case.part, case.hangs, kind(case.values)))
    for seed in HIDDEN:
        assert found[seed] == found[0], f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_d_ex20_always_has_a_rank_that_neither_sends_nor_gets(seed):
    (check,) = modules(find("ex20"))
    cases = check.cases(seed)
    matrices = [case.matrix for case in cases if case.part == check.EXCHANGE]
    assert any(
        not any(m[r]) and not any(row[r] for row in m) for m in matrices for r in range(len(m))
    )
    # What each rank's tokens chose; which ranks' experts that are.
    sent = [
        [{expert // case.local for token in own for expert in token} for own in case.chosen]
        for case in cases
        if case.part == check.LAYER and case.ep == 4
    ]
    idle = [r for one in sent for r in range(4) if not one[r] and r not in set().union(*one)]
    assert len(idle) >= 2


PURE = [one for one in exercises() if (one.folder / "alone.py").is_file()]
SAMPLE = SEEDS[:3]


@pytest.mark.parametrize("seeds", (SAMPLE, pytest.param(SEEDS, marks=pytest.mark.full)), ids=len)
@pytest.mark.parametrize("exercise", PURE, ids=lambda one: one.number)
def test_d_no_grade_depends_on_the_seed(exercise, seeds, tmp_path, monkeypatch):
    """All known mistakes in the parts without ranks: right with every seed, or with none."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    alone = modules(exercise)[0]
    for wrong in wrong_solutions(exercise):
        student = load_user_file(wrong.write(tmp_path), wrong.name)
        outcomes = {seed: is_right(alone, student, seed) for seed in seeds}
        assert len(set(outcomes.values())) == 1, f"{wrong.name}: {outcomes}"


def is_right(alone: ModuleType, student: ModuleType, seed: int) -> bool:
    try:
        for case in alone.cases(seed):
            alone.judge(case, alone.run(student, case))
    except Exception:
        return False
    return True


ALL = [
    pytest.param(wrong, id=f"{one.number}-{wrong.name}")
    for one in exercises()
    for wrong in wrong_solutions(one)
    if one not in PURE and wrong.does_nothing and not wrong.hangs
]


@pytest.mark.full
@pytest.mark.parametrize("wrong", ALL)
def test_d_what_does_nothing_clever_fails_with_every_seed(wrong: WrongSolution, tmp_path):
    assert "passed" not in kinds_of(wrong, tmp_path, HIDDEN[:3])
