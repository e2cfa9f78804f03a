"""What the teacher is told to look at: never what the stub or the solution does itself."""

import ast
import re
from pathlib import Path

import pytest

from minimegatron.exercises.exercise import exercises, find
from minimegatron.exercises.grading import remarks
from minimegatron.exercises.grading.remarks import SAME_CODE, TOO_DEEP, remarks_on


@pytest.mark.parametrize("exercise", exercises(), ids=lambda one: one.number)
def test_no_remark_on_what_was_given(exercise):
    stub = (exercise.folder / "stub.py").read_text()
    solution = (exercise.folder / "solution.py").read_text()
    assert remarks_on(exercise, stub) == ()
    assert remarks_on(exercise, solution + "\n# mine\n") == (SAME_CODE,)


HONEST = sorted((Path(__file__).parent / "honest").glob("*.py"))


@pytest.mark.parametrize("path", HONEST, ids=lambda one: one.stem)
def test_no_remark_on_who_is_honest(path):
    assert remarks_on(find(path.stem.partition("_")[0]), path.read_text(encoding="utf-8")) == ()


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
        (
            "ex05",
            "from minimegatron.planner.plan import plan",
            "it uses minimegatron.planner.plan, which this exercise does not need",
        ),
        ("ex18", "from minimegatron.planner import plan", ""),
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


PLANNER = "minimegatron.planner.plan, minimegatron.planner.memory"


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
        (
            "import math, torch.nn.functional as F\nfrom torch import nn\nfrom os.path import join",
            "",
        ),
        ("from minimegatron.planner.plan import plan", "minimegatron.planner.plan"),
        ("from minimegatron.planner import plan as p, memory", PLANNER),
        ("import minimegatron.planner.plan\nminimegatron.planner.memory.x", PLANNER),
        ("import minimegatron", "minimegatron"),
        ("from .schedule_table import x", "a relative import"),
        ("import sys\nsys.path.insert(0, 'x')\nimport schedule_table", "schedule_table, sys.path"),
        ("import shutil\nfrom math import pi\nshutil.copy(pi.__file__, 'x')", "shutil, __file__"),
        ("import multiprocessing as m\nm.get_context('spawn').Pool", "multiprocessing"),
        ("import torch\ntorch.multiprocessing.Pool, torch.hub", "torch.hub, torch.multiprocessing"),
        ("from dataclasses import inspect", "inspect"),
        ("import random\nrandom._os.system('x')", "os.system"),
        ("from sys import *", "sys.*"),
        ("from torch import *\ninspect.x", "inspect"),
        ("from operator import attrgetter\nattrgetter('__init__.__globals__')", "__globals__"),
        ("import argparse, datetime, traceback, struct\nargparse.ArgumentParser()", ""),
        ("import argparse\nargparse.FileType()('x')", "argparse.FileType"),
        ("import doctest\ndoctest.testmod()", "doctest"),
        ("import pdb, timeit\npdb.set_trace()\ntimeit.default_timer()", ""),
        ("import pdb, timeit\npdb.run('x')\ntimeit.timeit('x')", "pdb.run, timeit.timeit"),
        ("import os\nos.spawnv(os.P_WAIT, 'x', [])", "os.P_WAIT, os.spawnv"),
        ("import os\nos.read(3, 100)\nos.path.join('a', 'b')", "os.read"),
        ("import sys\nsys.exit(len(sys.argv) > sys.maxsize)", ""),
        ("import sys\nsys.__dict__['modules']", "sys.__dict__"),
        ("import json\njson.__dict__['codecs']", "json.__dict__"),
        ("import sys\nhere = sys\nhere.modules['x']", "the module sys as a value, sys.modules"),
        ("import sys\ngetattr(sys, 'modules')", "the module sys as a value"),
        ("import sys\nfor m in [sys]:\n    m.modules", "the module sys as a value"),
        ("import sys\ndef f(m=sys):\n    return m.modules", "the module sys as a value"),
        ("import sys\n(m := sys).modules", "the module sys as a value"),
        ("import time\ndef f(time):\n    return time", ""),
        ("import torch\nF = torch.nn.functional\nF.relu(torch.ones(1))", ""),
        ("import torch\nS = torch.serialization\nS.load('x')", "torch.serialization"),
        ("import torch\ntorch.os.system('x')", "os.system"),
        ("import torch\nx = torch.os", "os"),
        ("import json\njson.codecs.open('x')", "codecs"),
        ("import enum\nenum.bltns.open('x')", "builtins"),
        ("error.__traceback__.tb_frame.f_builtins['exec']", "f_builtins, tb_frame"),
        ("import numpy as np\nnp.fromfile('x'), np.array([1])", "numpy.fromfile"),
        ("import typing\ntyping.get_type_hints(f)", "typing.get_type_hints"),
        ("group._get_backend(d).allgather([x], [y])", "_get_backend"),
    ],
)
def test_remarks_on_means_that_no_exercise_needs(source, words):
    remark = f"it uses {words}, which this exercise does not need"
    assert remarks_on(find("ex12"), source) == ((remark,) if words else ())


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(x):\n    open = [x]\n    return open.pop()", ""),
        ("def f(open, *, compile=0):\n    return lambda: open + compile", ""),
        ("def f(p):\n    return [open for open in p], {gc: 1 for gc in p}", ""),
        ("def open(i):\n    i += 1\n    return open(i)\nopen(1)", ""),
        ("def open(i):\n    'Nothing.'\nopen(1)", ""),
        ("open, gc = 1, 2\ndef f():\n    return open + gc", ""),
        ("for socket in 1, 2:\n    inspect = socket\n    print(inspect)", ""),
        ("class Slot:\n    open: bool = True\nSlot().open", ""),
        ("def f(open=open):\n    return open('x')", "open"),
        ("def g(open):\n    return open\ndef f():\n    return open('x')", "open"),
        ("if 0:\n    open = 1\nopen('x')", "open"),
        ("open = (\n    open\n)\nopen('x')", "open"),
        ("def open(\n    real=open,\n):\n    real('x')", "open"),
        ("open = 1\ndel open\nopen('x')", "open"),
        ("open = 1\ntry:\n    1 / 0\nexcept Exception as open:\n    0\nopen('x')", "open"),
        ("open('x')\nopen = 1", "open"),
        ("def f():\n    global open\n    open = 1\nopen('x')", "open"),
        ("import gc\ndef f(gc):\n    return gc", "gc"),
    ],
)
def test_a_files_own_names_may_be_called_as_pythons(source, words):
    remark = f"it uses {words}, which this exercise does not need"
    assert remarks_on(find("ex12"), source) == ((remark,) if words else ())


def test_many_modules_are_soon_looked_at_and_few_are_named():
    names = [f"a{number}" for number in range(20_000)]
    (remark,) = remarks_on(find("ex12"), f"import {','.join(names)}")
    listed = ", ".join(names[:10])
    assert remark == f"it uses {listed}, 19990 more, which this exercise does not need"


def test_what_the_stub_uses_is_not_remarked_on(monkeypatch):
    monkeypatch.setattr(remarks, "_text", lambda *_: "import gc")
    assert remarks_on(find("ex01"), "import gc\ngc.collect()") == ()
