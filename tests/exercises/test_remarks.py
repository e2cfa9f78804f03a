"""What the teacher is told to look at: never what the stub or the solution does itself."""

import ast
import re

import pytest

from minimegatron.exercises.catalog import exercises, find
from minimegatron.exercises.grading.remarks import SAME_CODE, TOO_DEEP, remarks_on


@pytest.mark.parametrize("exercise", exercises(), ids=lambda one: one.number)
def test_no_remark_on_what_was_given(exercise):
    stub = (exercise.folder / "stub.py").read_text()
    solution = (exercise.folder / "solution.py").read_text()
    assert remarks_on(exercise, stub) == ()
    assert remarks_on(exercise, solution + "\n# mine\n") == (SAME_CODE,)


@pytest.mark.parametrize(
    ("number", "remarks"), [("ex05", ()), ("ex10", ()), ("ex16", (SAME_CODE,))]
)
def test_short_answers_are_alike(number, remarks):
    exercise = find(number)
    bare = ast.unparse(ast.parse((exercise.folder / "solution.py").read_text()))
    without_words = re.sub(r'(?s)""".*?"""', '"""Mine."""', bare)
    assert remarks_on(exercise, without_words) == remarks


@pytest.mark.parametrize(
    ("number", "source", "words"),
    [
        ("ex01", "from minimegatron.core.rank_generator import *", ""),
        ("ex01", "import minimegatron.core.rank_generator as r\nr.RankGenerator", ""),
        (
            "ex01",
            "from minimegatron.core.rank_generator import RankGenerator as R\n"
            "def get_ranks(self, token):\n    return R.get_ranks(self, token)",
            "it uses minimegatron.core.rank_generator.RankGenerator.get_ranks",
        ),
        (
            "ex12",
            "from minimegatron.core.pipeline_parallel.schedule_table import get_schedule_table as f",
            "it uses minimegatron.core.pipeline_parallel.schedule_table.get_schedule_table",
        ),
        (
            "ex12",
            "from minimegatron.core.pipeline_parallel import schedule_table as t\n"
            "f = t.get_schedule_table",
            "it uses minimegatron.core.pipeline_parallel.schedule_table.get_schedule_table",
        ),
        ("ex12", "from minimegatron.core.pipeline_parallel.schedule_table import *", "it uses"),
        ("ex12", '"""minimegatron.exercises.catalog.ex12"""', ""),
        (
            "ex12",
            "import importlib\n"
            "importlib.import_module('minimegatron.exercises.catalog.ex12_x.solution')",
            "it imports from the catalogue",
        ),
        (
            "ex12",
            "from minimegatron.exercises.catalog import find",
            "it imports from the catalogue",
        ),
        ("ex12", "def f(:", ""),
        ("ex12", "x = 1" + " + 1" * 40_000, TOO_DEEP),
        ("ex12", "-" * 150_000 + "1", TOO_DEEP),
        ("ex12", "x = [" + "1," * 200_000, "it has 400005 characters, and was not looked at"),
        ("ex12", "x = '\0'", ""),
        ("ex12", "# \ud800", ""),
    ],
)
def test_remarks(number, source, words):
    found = remarks_on(find(number), source)
    assert len(found) == bool(words) and words in " ".join(found)
