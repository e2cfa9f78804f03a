"""A student's room: what may come out of it, what it cannot reach, and how its ends are told."""

import builtins
import inspect
import math
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.core.tensor_parallel import mappings
from minimegatron.exercises.bench.cases import Wrong
from minimegatron.exercises.bench.replacing import withheld
from minimegatron.exercises.check.engine import Sheet, check_file
from minimegatron.exercises.exercise import find
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.collect import collect
from minimegatron.exercises.room.collected import Collected, Question
from minimegatron.exercises.room.integrity import Seal
from minimegatron.exercises.room.plain_data import NotPlain, from_line, to_line
from minimegatron.exercises.room.verdict import render
from tests.exercises.cheats import CHEATS
from tests.test_launcher import wait_until_gone

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


# -- Plain data --


@settings(deadline=None, max_examples=60)
@given(PLAIN)
def test_plain_values_come_back_as_they_were(value):
    line = to_line(value)
    assert "\n" not in line
    back = from_line(line)
    assert back == value and repr(back) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (2, 0, 4)])
def test_tensors_come_back_as_they_were(dtype, shape):
    value = torch.randn(shape).to(dtype)
    back = from_line(to_line({"tensor": value}))["tensor"]
    assert back.dtype == dtype and back.shape == value.shape and torch.equal(back, value)
    assert math.isnan(from_line(to_line(math.nan)))


def test_an_empty_part_of_a_tensor_comes_back():
    back = from_line(to_line(torch.zeros(0, 4, dtype=torch.float64)[:, -1].clone()))
    assert back.shape == (0,) and back.dtype == torch.float64


class Sneaky(dict):
    """Not exactly a dict."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Sneaky(), "the answer is a tests.exercises.test_rooms.Sneaky"),
        ([1, {"a": {2}}], "the answer[1]['a'] is a set"),
        (torch.nn.Parameter(torch.zeros(1)), "is a torch.nn.parameter.Parameter"),
        (print, "builtin_function_or_method"),
        ({"rank": 10**5000}, "the answer['rank'] is an int of 16610 bits; 4096 are allowed"),
        (
            [torch.zeros(2).to_sparse()],
            "the answer[0] is a tensor of layout sparse_coo; an ordinary",
        ),
        ({"loss": torch.zeros(2, device="meta")}, "the answer['loss'] is a meta tensor"),
        (torch.zeros(1, dtype=torch.complex64), "the answer is a tensor of complex64"),
    ],
)
def test_other_values_do_not_leave(value, words):
    with pytest.raises(NotPlain, match=words.replace("[", r"\[").replace("]", r"\]")):
        to_line(value)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"\xff",
        b'{"a": 1, "b": 2}',
        b'{"module": "os"}',
        b'{"tensor": ["float64", [1000000000000], ""]}',
        b'{"tensor": ["uint8", [200], ""]}',
        b'{"tensor": ["uint8", [], ""]}',
        b'{"tensor": ["object", [1], "AAAA"]}',
        b'{"dict": [[{"dict": []}, 1]]}',
        b"[" * 5000,
    ],
)
def test_what_no_room_writes_is_refused(line):
    with pytest.raises(ValueError):
        from_line(line)


# -- Cheats --


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_does_not_pass(name, tmp_path):
    number, source = CHEATS[name]
    exercise = find(number)
    path = tmp_path / f"{exercise.name}.py"
    path.write_text(source)
    found = check_file(exercise, path, 20261123, patience=4.0)
    assert not found.has_passed
    assert found.kind != verdict.DEFECT, found.text


EX12 = "minimegatron.exercises.catalog.ex12_interleaved_table"
FROM_THE_CATALOGUE = {
    "from": f"from {EX12} import solution as ours",
    "by its name": f"import {EX12}.solution as ours",
    "importlib": f"import importlib\nours = importlib.import_module({EX12 + '.solution'!r})",
    "late": "class ours:\n    def __getattr__(self, name):\n"
    f"        return getattr(__import__({EX12 + '.solution'!r}, fromlist=['x']), name)\nours = ours()",
}


@pytest.mark.parametrize("way", FROM_THE_CATALOGUE)
def test_v8_a_file_that_imports_the_solution_is_told_so(way, tmp_path):
    """Was: it passed, if it called the solution's functions within its own."""
    path = tmp_path / "ex12_interleaved_table.py"
    path.write_text(
        f"{FROM_THE_CATALOGUE[way]}\n"
        "def get_schedule_table(*sizes):\n    return ours.get_schedule_table(*sizes)\n"
        "def count_rank_microbatches(*sizes, **options):\n"
        "    return ours.count_rank_microbatches(*sizes, **options)\n"
    )
    found = check_file(find("ex12"), path, 1, patience=4.0)
    assert found.kind == verdict.FORGED
    assert f"ex12_interleaved_table.py imports {EX12}.solution, and in the catalogue" in found.text


@pytest.mark.parametrize("name", ["alone.OURS", "tables", "check"])
def test_v8_nor_is_what_checks_it_imported(name, tmp_path):
    outer, _, inner = f"{EX12}.{name}".rpartition(".")
    path = tmp_path / "ex12_interleaved_table.py"
    path.write_text(f"def get_schedule_table():\n    from {outer} import {inner}\n")
    found = check_file(find("ex12"), path, 1)
    assert found.kind == verdict.FORGED and f"imports {outer}.{inner}, and" in found.text


def test_what_a_room_forges_is_not_believed():
    """Whatever lines come, only right answers to all cases pass."""
    sheet = Sheet(find("ex05"), 0)
    forged = [
        to_line({"case": 0, "answer": {"kind": "passed"}}),
        to_line({"over": True}),
        '{"kind": "passed"}',
        "nonsense",
        to_line({"case": 1, "failed": "passed", "text": "all right"}),
    ]
    assert not sheet.judge(0, Collected([forged]))
    assert not sheet.verdict().has_passed


# -- Ends --


def run_alone(tmp_path: Path, body: str, seconds: float = 1.0) -> tuple[verdict.Verdict, float]:
    """The verdict on a `predict_order`, and how long it took."""
    exercise = find("ex05")
    path = tmp_path / f"{exercise.name}.py"
    head = (exercise.folder / "solution.py").read_text().partition("def predict_order")[0]
    path.write_text(f"{head}def predict_order(pp_size, pp_rank, num_microbatches):\n{body}")
    began = time.monotonic()
    found = check_file(exercise, path, patience=seconds)
    return found, time.monotonic() - began


def test_an_endless_loop_of_a_pure_part_is_found_at_its_line(tmp_path):
    found, _ = run_alone(tmp_path, "    while True:\n        pass\n")
    assert found.kind == verdict.TIMEOUT
    assert "Is there a loop without end, or does it try too many" in found.text
    assert "in predict_order:" in found.text
    assert found.part == "part 2, the rule" and found.passed_parts == ("part 1, by hand",)


def test_the_word_of_a_time_limit_in_an_exception_is_none(tmp_path):
    found, _ = run_alone(tmp_path, "    raise ValueError('Timeout (')\n", 4.0)
    assert found.kind == verdict.RAISED and "ValueError: Timeout (" in found.text


def test_what_lies_beside_the_file_is_not_there(tmp_path):
    (tmp_path / "my_helpers.py").write_text("one = 1\n")
    found, _ = run_alone(tmp_path, "    import my_helpers\n", 4.0)
    assert found.kind == verdict.RAISED and "Your file is checked alone" in found.text


def test_an_answer_that_changes_is_named(tmp_path):
    body = "    import random\n    return [str(random.random())]\n"
    found, _ = run_alone(tmp_path, body, 4.0)
    assert found.kind == verdict.WRONG
    assert "asked the same thing twice, your code gave two answers" in found.text


def test_what_a_pure_part_prints_is_shown_and_a_flood_is_cut(tmp_path):
    body = "    print('x' * 3_000_000)\n    return []\n"
    found, _ = run_alone(tmp_path, body, 4.0)
    assert "bytes left out" in found.printed["0"] and len(found.printed["0"]) < 4000


def test_a_message_is_cut_and_a_terminal_obeys_nothing(tmp_path):
    body = "    print('\\x1b[2Jprinted')\n    raise ValueError('\\x1b[31m' * 10_000_000)\n"
    found, _ = run_alone(tmp_path, body, 4.0)
    text = render(found, "ex05")
    assert re.search(r"cut here: 49,997,\d+ of 50,000,\d+ characters are left out", text)
    assert "in predict_order:" in text and "| \\x1b[2Jprinted" in text
    assert "\x1b" not in text and len(text) < 20_000


def test_a_process_left_behind_does_not_hold_the_check(tmp_path):
    body = "    import os, time\n    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\n"
    found, seconds = run_alone(tmp_path, body, 20.0)
    assert found.kind == verdict.DIED and seconds < 30


ENDLESS = ("while True:\n        pass", "import time\n    time.sleep(9999)")


def test_nothing_is_left_of_a_check_that_is_killed(tmp_path):
    """Both at once: each room ends by itself, at its time limit."""
    begun = [start_and_kill(tmp_path / str(number), body) for number, body in enumerate(ENDLESS)]
    assert wait_until_gone(begun) == []


def start_and_kill(folder: Path, body: str) -> int:
    """A check whose room is in `predict_order`, and nobody waits for it; the room's process."""
    exercise, begun = find("ex05"), folder / "begun"
    folder.mkdir()
    path = folder / f"{exercise.name}.py"
    path.write_text(
        f"import os\n\n\ndef predict_order(*_):\n"
        f"    open({str(begun)!r}, 'w').write(str(os.getpid()))\n    {body}\n"
        "\n\nPREDICTION = {0: 'F0', 1: 'F0', 2: 'F0'}\n"
    )
    check = subprocess.Popen(
        [sys.executable, "-m", "minimegatron.exercises.check.engine", str(path)]
    )
    deadline = time.monotonic() + 60
    while not (begun.exists() and begun.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    check.kill()
    check.wait()
    return int(begun.read_text())


def test_parts_are_told_one_by_one(tmp_path):
    found, _ = run_alone(tmp_path, "    return []\n", 4.0)
    text = render(found, "ex05")
    assert "[ok] part 1, by hand: right" in text
    assert "[no] part 2, the rule: not right" in text


def test_a_part_that_was_not_judged_may_have_been_reached():
    """An exception after the warm-up ends the step, and with it everything that would be judged."""
    found = verdict.Verdict(
        verdict.RAISED, "NameError", part="steady", parts=("warm-up", "steady"), num_cases=5
    )
    assert "[  ] warm-up: not judged" in render(found, "ex06")


def test_torch_is_no_answer_of_a_pure_part(tmp_path):
    """There it is a stand-in: it can be imported, and computes nothing."""
    found, _ = run_alone(tmp_path, "    import torch\n    return torch.arange(3).tolist()\n", 4.0)
    assert found.kind == verdict.WRONG
    assert "comes from torch.arange" in found.text
    assert "torch.arange is used: this part is checked without numpy and torch" in found.text


USES = (
    *(
        "np.abs(-1) + 1",
        "3 // np.abs(-1)",
        "-np.abs(-1)",
        "np.pi * 2",
        "max(0, np.inf)",
        "abs(np.pi)",
    ),
    *(
        "int(np.abs(-1))",
        "float(np.pi)",
        "bool(np.any([1]))",
        "len(np.ones(2))",
        "list(np.ones(2))",
    ),
    *("np.ones(2)[0]", "range(np.abs(2))", "3 in np.ones(2)", "np.abs(-1) == 1", "1 | np.abs(-1)"),
    *("f'F{np.abs(-1)}'", "str(np.abs(-1))", "[0, 1][np.argmin([2, 1])]", "round(np.pi)"),
)


def test_every_use_of_a_stand_in_is_told_alike(tmp_path):
    """One file for all: what each use raises is its answer."""
    body = ["    import numpy as np", "    found = []"]
    for use in USES:
        body += ["    try:", f"        found.append(repr({use}))"]
        body += ["    except TypeError as error:", "        found.append(str(error)[:6])"]
    found, _ = run_alone(tmp_path, "\n".join([*body, "    raise ValueError(found)\n"]), 4.0)
    assert found.text.startswith(f"ValueError: {['numpy.'] * len(USES)}"), found.text


def test_a_stand_in_may_be_used_while_a_file_is_loaded(tmp_path):
    """Nobody asks for its value then."""
    head = """
    import numpy as np
    import torch

    DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    TWICE = 2 * np.pi

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor | None) -> "np.ndarray": ...

    @torch.no_grad()
    def nothing(): ...
    """
    path = tmp_path / "ex05_predict_1f1b.py"
    source = (find("ex05").folder / "solution.py").read_text()
    path.write_text(textwrap.dedent(head) + source)
    found = check_file(find("ex05"), path, patience=4.0)
    assert found.has_passed, found.text


def test_a_pure_part_imports_no_torch(tmp_path):
    body = "    import sys\n    return [str(hasattr(sys.modules.get('torch'), '__version__'))]\n"
    found, _ = run_alone(tmp_path, body, 4.0)
    assert "'False' is not an action" in found.text


def test_a_question_says_what_it_asks():
    (question,) = Sheet(find("ex05"), 0).questions
    assert question.is_alone and isinstance(question, Question) and not question.hangs
    assert collect(question, find("ex05").folder / "stub.py", 4.0).ending == ""


# -- Ours, out of reach for a while --


def test_d_what_is_withheld_for_a_block_is_there_again_as_it_was():
    kind = mappings._CopyToModelParallelRegion
    before = inspect.getattr_static(kind, "forward")
    refused = pytest.raises(Wrong, match="your code calls .*_CopyToModelParallelRegion.forward")
    with withheld([f"{kind.__module__}.{kind.__name__}.forward"]), refused:
        kind.forward(None, torch.ones(1), None)
    assert inspect.getattr_static(kind, "forward") is before


def test_a_function_that_is_changed_is_named_whatever_else_is(monkeypatch):
    """Another function, other code in the same one; also where what compares them is another."""
    seal = Seal()
    assert seal.broken() is None
    with monkeypatch.context() as patch:
        patch.setattr(mappings, "copy_to_tensor_model_parallel_region", abs)
        assert seal.broken() == f"{mappings.__name__}.copy_to_tensor_model_parallel_region"
    with monkeypatch.context() as patch:
        patch.setattr(check_file, "__code__", check_file.__code__.replace(co_name="other"))
        assert seal.broken() == f"{check_file.__module__}.check_file"
        patch.setattr(builtins, "all", lambda _: True)
        patch.setattr(builtins, "map", zip)
        assert seal.broken() in ("builtins.all", "builtins.map")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "allclose", abs)
        assert seal.broken() == "torch.allclose"
    assert seal.broken() is None
