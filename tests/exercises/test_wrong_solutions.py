"""Every known mistake is a patch of the reference that fits, and makes another program of it."""

import ast

import pytest

from minimegatron.exercises.exercise import exercises
from tests.exercises.wrong_solutions import FOLDER, patched, wrong_solutions

REFERENCE = '"""Solved."""\n\n\ndef f(x):\n    """One more."""\n    y = x + 1\n    return y\n'


def program(text: str) -> str:
    return ast.dump(ast.parse(text))


@pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.name)
def test_every_patch_fits_and_makes_a_program_of_its_own(exercise):
    reference = (exercise.folder / "solution.py").read_text()
    programs = {program(reference): "the reference"}
    for wrong in wrong_solutions(exercise):
        assert wrong.patch["why"]
        same = programs.setdefault(program(wrong.text), wrong.name)
        assert same == wrong.name, f"{wrong.name} is the same program as {same}"


def test_every_file_belongs_to_an_exercise():
    assert {path.stem for path in FOLDER.iterdir()} == {one.name for one in exercises()}


def test_texts_and_bodies_are_replaced():
    change = {"old": "x + 1", "new": "x + 2"}
    assert "    y = x + 2\n" in patched(REFERENCE, {"change": [change]})
    found = patched(REFERENCE, {"body": {"f": "    return g(x)"}, "imports": "from h import g"})
    assert found == (
        '"""Solved."""\n\nfrom h import g\n\n\ndef f(x):\n    """One more."""\n    return g(x)\n'
    )


MISFITS = {
    "gone": ({"change": [{"old": "x + 3", "new": ""}]}, "stands 0 times in the reference"),
    "twice": ({"change": [{"old": "x", "new": "z"}]}, "times in the reference, not once"),
    "overlap": (
        {"change": [{"old": "y = x", "new": ""}, {"old": "x + 1", "new": ""}]},
        "stands 0 times in what the changes before it left",
    ),
    "no function": ({"body": {"g": "    pass"}}, "has 0 functions g"),
    "mistyped": ({"changes": []}, "a patch has no changes"),
}


@pytest.mark.parametrize(("patch", "words"), MISFITS.values(), ids=list(MISFITS))
def test_a_patch_that_does_not_fit_is_refused(patch, words):
    with pytest.raises(ValueError, match=words):
        patched(REFERENCE, patch)
