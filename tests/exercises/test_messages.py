"""What a check says first asks a question; what it counts is counted right; wrong reads as wrong."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from minimegatron.exercises.check import engine
from minimegatron.exercises.check.engine import check_file
from minimegatron.exercises.exercise import Exercise, exercises, find
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.missing_keys import missing_key_words
from minimegatron.exercises.room.reading import returning_names, wanted_names
from minimegatron.exercises.room.verdict import Verdict, render
from tests.exercises.ten_seeds import HIDDEN
from tests.exercises.wrong_solutions import ONE_OF_MANY, wrong_solutions

NUMBERS = [one.number for one in exercises()]


def functions(path: Path) -> dict[str, str]:
    """Each function and class of a file, without its docstring."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.dump(node)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.dump(node.value)
    return found


@pytest.mark.parametrize("number", NUMBERS)
def test_d_every_function_has_a_version_that_does_nothing_clever(number, tmp_path):
    exercise = find(number)
    right = functions(exercise.folder / "solution.py")
    nothing = [one for one in wrong_solutions(exercise) if one.does_nothing]
    assert len(nothing) >= 3
    changed = set()
    for one in nothing:
        mine = functions(one.write(tmp_path))
        changed |= {name for name, text in mine.items() if right.get(name) != text}
    # What only calls a class, or is given, has nothing in it that could be left out.
    plain = {name for name in wanted_names(exercise) if name in GIVEN.get(number, ())}
    helpers = {"ex02": {"copy_to_tensor_model_parallel_region"}, "ex20": {"combine"}}
    assert set(wanted_names(exercise)) - changed <= plain | helpers.get(number, set())


GIVEN = {
    "ex02": ("copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"),
    "ex10": ("version_a", "version_b", "version_c", "RIGHT"),
    "ex20": ("_AllToAll", "all_to_all"),
    "ex22": ("attend",),
    "ex23": ("MTPLossAutoScaler",),
}


# -- A question first --


def said(exercise: Exercise) -> Iterator[tuple[str, str]]:
    """(place, text) of each string that a check may say; docstrings say nothing."""
    for path in exercise.folder.glob("*.py"):
        if path.stem not in ("stub", "solution", "__init__"):
            tree = ast.parse(path.read_text())
            silent = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
            for node in ast.walk(tree):
                text = (
                    node.value if isinstance(node, ast.Constant) and id(node) not in silent else ""
                )
                if isinstance(text, str) and " " in text:
                    yield f"{path.name}:{node.lineno}", text


def names_of_the_answer(exercise: Exercise) -> set[str]:
    """What the reference calls, and neither the stub nor the page names."""
    tree = ast.parse((exercise.folder / "solution.py").read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    given = [(exercise.folder / name).read_text() for name in ("stub.py", "page.md")]
    return {name for name in names if not re.search(rf"\b{name}\b", " ".join(given))}


@pytest.mark.parametrize("number", NUMBERS)
def test_d_a_first_message_does_not_hold_the_answer(number):
    """`add_`, `x.clone()`, `new_empty` of the reference: that is what hints are for."""
    exercise = find(number)
    as_code = [
        re.compile(rf"\.{name}\b|\b{name}\(" + (rf"|\b{name}\b" if "_" in name else ""))
        for name in names_of_the_answer(exercise) - {"apply"}
    ]
    for place, text in said(exercise):
        assert not any(one.search(text) for one in as_code), f"{number} {place}: {text!r}"


# -- Words --


@pytest.mark.parametrize("number", NUMBERS)
def test_d_names_of_cases_count_right(number):
    exercise = find(number)
    for name in ("alone", "check"):
        if (exercise.folder / f"{name}.py").is_file():
            module = importlib.import_module(f"{exercise.module}.{name}")
            for seed in (0, *HIDDEN):
                for case in module.cases(seed):
                    assert not ONE_OF_MANY.search(str(case)), str(case)


def test_d_the_list_of_exercises_counts_right(tmp_path, capsys, monkeypatch):
    from minimegatron.__main__ import main

    monkeypatch.chdir(tmp_path)
    assert main(["exercises", "list"]) == 0
    out = capsys.readouterr().out
    assert not ONE_OF_MANY.search(out) and "1 rank " in out


@pytest.mark.parametrize("kind", [kind for kind in verdict.HEADLINES if kind != verdict.PASSED])
def test_d_wrong_reads_as_wrong_in_plain_letters(kind):
    text = render(
        Verdict(kind, part="b", parts=("a", "b", "c"), passed_parts=("a",), num_cases=3), "ex"
    )
    assert text.startswith("[no] ex: ") and text.isascii()
    assert "[ok] a: right" in text and "[no] b: not right" in text and "[  ] c: not judged" in text


# -- A forgotten return --


def without_returns(exercise: Exercise, name: str) -> str:
    """The reference; the function does all that it does, and returns None."""
    tree = ast.parse((exercise.folder / "solution.py").read_text())
    function = tree
    for part in name.split("."):
        (function,) = [node for node in function.body if getattr(node, "name", None) == part]

    class Forgetting(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return self.generic_visit(node) if node is function else node

        visit_Lambda = visit_ClassDef = lambda self, node: node

        def visit_Return(self, node):
            none = ast.parse("return None").body[0]
            return [ast.Expr(node.value), none] if node.value else node

    return ast.unparse(ast.fix_missing_locations(Forgetting().visit(function) and tree))


def forgetful() -> list:
    found = []
    for number in NUMBERS:
        stub, is_alone = find(number).folder / "stub.py", not find(number).num_ranks
        for name in returning_names(stub):
            is_for_full = [] if is_alone or name == "merge" else [pytest.mark.full]
            found.append(pytest.param(number, name, id=f"{number}-{name}", marks=is_for_full))
    return found


@pytest.mark.parametrize(("number", "name"), forgetful())
def test_exb_a_forgotten_return_is_told_in_every_exercise(number, name, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "AGAIN_SECONDS", 0.0)
    if (number, name) == ("ex18", "schedule"):
        pytest.skip("it yields, and returns nothing")
    path = tmp_path / f"{name}.py"
    path.write_text(without_returns(find(number), name))
    found = check_file(find(number), path, patience=4.0)
    assert not found.has_passed and found.kind != verdict.DEFECT
    assert "`return` forgotten?" in found.text, found.text
    assert name in found.text.split("forgotten?")[0] or "None" in found.text, found.text


# -- A missing key --


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            'return parts["recv_prev"]',
            "`parts` has no 'recv_prev' here; it has 'send_next', 'recv_next'",
        ),
        ("return grid.sizes[token]", "`grid.sizes` has no 'tp-pp' here; it has 'tp', 'pp'"),
        ("if parts[token]:\n        return 1", "`parts` has no 'tp-pp' here; it has"),
        ("return {}[token]", ""),
        ('raise KeyError("x")', ""),
    ],
)
def test_d_a_missing_key_is_told_with_those_that_are_there(line, words, tmp_path):
    path = tmp_path / "keys.py"
    path.write_text(f"def look(parts, grid, token):\n    {line}\n")
    space: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), space)

    class Grid:
        def __init__(self):
            self.sizes = {"tp": 2, "pp": 4}

    with pytest.raises(KeyError) as caught:
        space["look"]({"send_next": 1, "recv_next": 2}, Grid(), "tp-pp")
    assert missing_key_words(caught.value, str(path)).startswith(words)
    assert bool(missing_key_words(caught.value, str(path))) == bool(words)


def test_d_ex01_says_which_key_a_token_is_not(tmp_path):
    text = (find("ex01").folder / "solution.py").read_text()
    old = 'inside = token.split("-")'
    assert old in text
    path = tmp_path / "ex01_rank_arithmetic.py"
    path.write_text(
        text.replace(old, 'inside = token.split("-") if self.name_to_size[token] else []')
    )
    found = check_file(find("ex01"), path, patience=4.0)
    assert found.kind == verdict.RAISED
    assert "`self.name_to_size` has no 'tp-pp' here; it has 'tp'" in found.text


# -- After the first function --


@pytest.mark.parametrize("number", ("ex19", "ex22", "ex23"))
def test_d_an_exercise_of_many_functions_is_checked_after_the_first(number, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "AGAIN_SECONDS", 0.0)
    exercise = find(number)
    page = " ".join((exercise.folder / "page.md").read_text().split())
    assert "Check after the first function" in page
    first = next(name for name in wanted_names(exercise) if name not in GIVEN.get(number, ()))
    path = tmp_path / f"{exercise.name}.py"
    path.write_text(with_function(exercise, first))
    found = check_file(exercise, path, patience=4.0)
    assert found.kind == verdict.UNWRITTEN and found.text.startswith("Write ")
    assert found.passed_parts == found.parts[:1]


def with_function(exercise: Exercise, name: str) -> str:
    """The stub with one function of the reference."""
    texts = [(exercise.folder / f"{one}.py").read_text() for one in ("stub", "solution")]
    nodes = [
        next(node for node in ast.parse(text).body if getattr(node, "name", None) == name)
        for text in texts
    ]
    stub, solution = (text.splitlines() for text in texts)
    stub[nodes[0].lineno - 1 : nodes[0].end_lineno] = solution[
        nodes[1].lineno - 1 : nodes[1].end_lineno
    ]
    return "\n".join(stub) + "\n"
