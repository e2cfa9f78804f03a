"""What the teacher is told to look at: never what the stub or the solution does itself."""

import ast
import re

import pytest

from minimegatron.exercises.catalog import exercises, find
from minimegatron.exercises.grading import remarks
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
            "where the solutions are it uses importlib, which this exercise does not need",
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
    assert bool(found) == bool(words) and words in " ".join(found)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import re\nopened, state = re.compile('x'), 'open'\nself.open()", ""),
        ("source = open(__file__).read()", "open"),
        ("exec('x = 1')", "exec"),
        ("from inspect import getsource as text", "inspect"),
        ("import sys as s\ns.modules['x'] = None", "sys.modules"),
        ("from sys import settrace", "sys.settrace"),
        ("import types\nf = types.FunctionType(g.__code__, {})", "types.FunctionType, __code__"),
        ("getattr(f, '__globals__')", "__globals__"),
        ("from importlib.machinery import SourceFileLoader", "importlib"),
        ("from pathlib import Path\nPath('x').read_text()", "pathlib"),
        ("__builtins__['eval']('1')", "__builtins__"),
        ("import os\nos.getpid(), os.environ", ""),
        ("import os as o\no._exit(0)", "os._exit"),
    ],
)
def test_remarks_on_means_that_no_exercise_needs(source, words):
    remark = f"it uses {words}, which this exercise does not need"
    assert remarks_on(find("ex12"), source) == ((remark,) if words else ())


def test_what_the_stub_uses_is_not_remarked_on(monkeypatch):
    monkeypatch.setattr(remarks, "_text", lambda *_: "import gc")
    assert remarks_on(find("ex01"), "import gc\ngc.collect()") == ()
