"""Every exercise: the stub says what to write, the solution passes, known mistakes are named.

All checks go through one warm forkserver. The wrong solutions are patches of the reference, in `wrong/`
(`wrong_solutions`). In `right/` are natural solutions that a check has refused once.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from minimegatron.exercises.check import engine
from minimegatron.exercises.check.engine import Sheet, check_file
from minimegatron.exercises.exercise import Exercise, exercises, find
from minimegatron.exercises.room import on_ranks, verdict
from minimegatron.exercises.room.plain_data import from_line
from minimegatron.exercises.room.reading import wanted_names
from minimegatron.exercises.room.verdict import Verdict
from minimegatron.exercises.student.beside import beside
from minimegatron.exercises.student.student_folder import hints
from tests.exercises.wrong_solutions import ONE_OF_MANY, wrong_solutions

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE = 4.0
"""Other tests may run at the same time."""


def words(found: Verdict) -> str:
    return " ".join(found.text.split())


def expect_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes 1.5 s without a call for a hang. Ranks that are slow are ready to run: they have more."""
    monkeypatch.setattr(on_ranks, "HANG_SECONDS", 1.0)


@pytest.fixture(params=exercises(), ids=lambda exercise: exercise.name)
def exercise(request) -> Exercise:
    return request.param


def test_there_are_twenty_eight_in_three_tiers():
    numbers = ["ex01", "ex01b", *(f"ex{n:02}" for n in range(2, 28))]
    assert sorted(one.number for one in exercises()) == numbers
    assert [one.number for one in exercises()][:4] == ["ex01", "ex01b", "ex05", "ex02"]
    assert {one.tier for one in exercises()} == {"warm-up", "core", "stretch"}
    assert all(10 <= one.minutes <= 45 for one in exercises())
    for number in numbers:
        assert find(number).number == find(number.removeprefix("ex")).number == number


def test_an_exercise_is_complete(exercise):
    for name in ("__init__", "stub", "solution"):
        assert (exercise.folder / f"{name}.py").is_file()
    # What needs no ranks is asked without; what needs some says how many.
    assert any((exercise.folder / f"{name}.py").is_file() for name in ("alone", "check"))
    assert (exercise.folder / "check.py").is_file() == (exercise.num_ranks > 0)
    assert exercise.question.endswith("?")
    assert exercise.name == exercise.folder.name
    assert exercise.summary and exercise.title
    assert len(hints(exercise)) == 3 and all(hints(exercise))
    page = (exercise.folder / "page.md").read_text()
    # The title is put above it, by the command and by the site.
    assert not page.startswith("# ") and len(page.split()) > 120
    assert wanted_names(exercise)
    assert len(wrong_solutions(exercise)) >= 3


def test_the_wheel_has_every_file():
    with open(ROOT / "pyproject.toml", "rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]
    folder = ROOT / "minimegatron" / "exercises"
    packed = {path for glob in data["minimegatron.exercises"] for path in folder.glob(glob)}
    files = {
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert {path for path in files if path.suffix != ".py"} == packed
    for path in files - packed:
        assert (path.parent / "__init__.py").is_file(), f"{path.parent} is no package"


def test_stub_and_solution_have_the_same_signatures(exercise):
    for name in wanted_names(exercise):
        stub, solution = (
            definition(exercise.folder / f"{x}.py", name) for x in ("stub", "solution")
        )
        assert type(stub) is type(solution)
        if isinstance(stub, ast.FunctionDef):
            assert ast.unparse(stub.args) == ast.unparse(solution.args)
    tail = 'if __name__ == "__main__":\n    from minimegatron.exercises.check import main\n\n'
    assert (exercise.folder / "stub.py").read_text().endswith(f"{tail}    main(__file__)\n")


def definition(path: Path, name: str) -> ast.AST:
    return next(
        node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name
    )


def test_what_an_exercise_mirrors_exists(exercise):
    if exercise.mirrors:
        path, _, name = exercise.mirrors.rpartition(".")
        file = ROOT / (path.replace(".", "/") + ".py")
        if not file.is_file():  # a method, or something a package's own file defines
            folder = ROOT / path.replace(".", "/")
            file = folder / "__init__.py" if folder.is_dir() else folder.parent.with_suffix(".py")
        assert re.search(rf"\b(def|class) {name}\b|^{name}\b", file.read_text(), re.MULTILINE)


def test_the_stub_says_what_to_write(exercise):
    found = check_file(exercise, exercise.folder / "stub.py", patience=PATIENCE)
    assert found.num_passed == 0
    if found.kind == verdict.WRONG:  # what is left open first is a list, not a function
        assert "Write " in found.text
        return
    assert found.kind == verdict.UNWRITTEN, found.text
    assert found.text.startswith("Write ")
    assert re.search(r"stub\.py:\d+, in \w+:", found.text)


PUBLIC_SEED, HIDDEN_SEED = 0, 20261121
SOLUTIONS = [
    pytest.param(
        one,
        seed,
        id=f"{one.name}-{seed}",
        marks=[pytest.mark.full] if one.num_ranks and seed == HIDDEN_SEED else [],
    )
    for one in exercises()
    for seed in (PUBLIC_SEED, HIDDEN_SEED)
]


@pytest.mark.parametrize(("exercise", "seed"), SOLUTIONS)
def test_the_solution_passes(exercise, seed, monkeypatch):
    if exercise.number == "ex01b":  # one of its cases shall hang
        expect_a_hang(monkeypatch)
    path = exercise.folder / "solution.py"
    found = check_file(exercise, path, seed, patience=PATIENCE)
    assert found.has_passed, found.text
    assert found.num_cases == len(found.achieved) > 0
    assert not ONE_OF_MANY.search(verdict.render(found, exercise.name))
    assert not found.printed


def test_hidden_cases_are_others(exercise):
    public, hidden = (Sheet(exercise, seed).questions for seed in (0, 12345))
    assert public != hidden
    # The seed itself must not be told by what the student's room is asked.
    assert not any(re.search(r"\b12345\b", question.cases) for question in hidden)


def test_the_room_learns_nothing_but_cases(exercise):
    """Only what judges may compare; what `run` uses has no expected value."""
    for question in Sheet(exercise, 0).questions:
        for name, part, values in from_line(question.cases):
            assert type(name) is str and type(part) is str and type(values) is dict


def test_the_real_functions_are_found(exercise):
    for symbol in exercise.real:
        assert symbol.rpartition(".")[2] in beside(exercise, exercise.folder / "solution.py", 200)


OTHERS = [
    pytest.param(one, path, id=f"{one.number}-{path.stem}")
    for one in exercises()
    for path in sorted((HERE / "right" / one.name).glob("*.py"))
]


@pytest.mark.parametrize(("exercise_", "path"), OTHERS)
def test_another_right_way_passes(exercise_, path):
    found = check_file(exercise_, path, patience=PATIENCE)
    assert found.has_passed, found.text


MISTAKES_ON_RANKS = 2
"""Of each kind, for each exercise on ranks, in `make test`; the others are in `make test-full`."""


def mistakes(does_nothing: bool) -> list:
    cases = []
    for one in exercises():
        kept = 0
        for wrong in wrong_solutions(one):
            if wrong.does_nothing != does_nothing:
                continue
            is_left = wrong.is_for_full or (one.num_ranks > 0 and kept == MISTAKES_ON_RANKS)
            kept += not is_left
            name = f"{one.number}-{wrong.name.removeprefix('does_nothing_')}"
            marks = [pytest.mark.full] if is_left else []
            cases.append(pytest.param(wrong, id=name, marks=marks))
    return cases


@pytest.mark.parametrize("wrong", mistakes(does_nothing=False))
def test_a_known_mistake_is_named(wrong, tmp_path, monkeypatch):
    check_that_it_is_named(wrong, tmp_path, monkeypatch)


@pytest.mark.parametrize("wrong", mistakes(does_nothing=True))
def test_d_what_does_nothing_clever_fails(wrong, tmp_path, monkeypatch):
    """The input, a constant, the stub's order, no exchange, no overlap, nothing freed."""
    check_that_it_is_named(wrong, tmp_path, monkeypatch)


def check_that_it_is_named(wrong, tmp_path, monkeypatch):
    # `test_engine` asks a second time; here the first answer is enough.
    monkeypatch.setattr(engine, "AGAIN_SECONDS", 0.0)
    if wrong.hangs:
        expect_a_hang(monkeypatch)
    assert len(wrong.says) > 5, f"{wrong.name} does not say what is expected"
    found = check_file(wrong.exercise, wrong.write(tmp_path), patience=PATIENCE)
    assert not found.has_passed
    assert found.kind in (verdict.WRONG, verdict.HANG, verdict.RAISED, verdict.DIED), found.text
    assert wrong.says in words(found), found.text
    assert not ONE_OF_MANY.search(words(found)), found.text
    # Parts are told one by one: those before the one that failed are right.
    if found.part in found.parts:
        assert found.passed_parts == found.parts[: found.parts.index(found.part)]
