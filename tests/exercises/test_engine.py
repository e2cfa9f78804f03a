"""What the engine says to code that is wrong in other ways than an exercise foresees.

The exercise is a small one of these tests' own: a sum over two ranks.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minimegatron.exercises.check import engine
from minimegatron.exercises.check.engine import check_file
from minimegatron.exercises.check.runner import ROOT, Runner
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.verdict import Verdict, render
from tests.exercises.sample.ex00_ring import EXERCISE
from tests.exercises.sample.ex00_ring import check as sample_check

REPOSITORY = Path(__file__).parents[2]
HEAD = "import os, sys\nimport torch\nimport torch.distributed as dist\n\n\ndef ring_sum(value):\n"
RIGHT = "    total = value.clone()\n    dist.all_reduce(total)\n    return total\n"

WRONG = {
    "half": (
        "    dist.all_reduce(value)\n    return value / 2\n",
        verdict.WRONG,
        "1 / world (1/2)",
    ),
    "nothing": ("    pass\n", verdict.WRONG, "was `return` forgotten?"),
    "shape": ("    return value[:0]\n", verdict.WRONG, "has shape [0], but [1] is expected"),
    "nan": ("    return value * float('nan')\n", verdict.WRONG, "nan or inf"),
    "crash": (
        "    return value['a']\n",
        verdict.RAISED,
        "crash.py:7, in ring_sum: return value['a']",
    ),
    "sys_exit": ("    sys.exit(0)\n", verdict.RAISED, "sys.exit(0): a rank may not leave"),
    "os_exit": ("    os._exit(0)\n", verdict.DIED, "ended with exit code 0 before it returned"),
    "kill": ("    os.kill(os.getpid(), 9)\n", verdict.DIED, "was killed by SIGKILL"),
    "bad_access": (
        "    os.kill(os.getpid(), 11)\n",
        verdict.DIED,
        "memory that is not there any more",
    ),
    "parent": ("    os.kill(os.getppid(), 0)\n    os._exit(3)\n", verdict.DIED, "exit code 3"),
    "hang": (
        "    if dist.get_rank() == 0:\n        dist.all_reduce(value)\n"
        "    else:\n        dist.recv(value, src=0)\n    return value\n",
        verdict.HANG,
        "Ranks 0 and 1 wait for each other in a circle",
    ),
    "early": (
        "    if dist.get_rank() == 1:\n        return value\n"
        "    dist.all_reduce(value)\n    return value\n",
        verdict.HANG,
        "Rank 1 has come out of your code, and waits for the others in the check. Still in there: "
        "rank 0 waits in torch.distributed.all_reduce",
    ),
    "text": (
        "    return 'three'\n",
        verdict.RAISED,
        "It failed outside your file, with something that your code returned",
    ),
    "forged": (
        "    import minimegatron.exercises.room.room as room\n"
        "    room.to_line = lambda value: '{}'\n    return value\n",
        verdict.FORGED,
        "minimegatron.exercises.room.room.to_line is not what it was before",
    ),
    "torch_patched": (
        "    torch.isclose = lambda a, b, **_: a == a\n    return value\n",
        verdict.FORGED,
        "torch.isclose is not what it was before",
    ),
    "breakpoint": (
        "    breakpoint()\n    return value\n",
        verdict.RAISED,
        "a debugger was started, and nobody can type here",
    ),
    "debugger": (
        "    import pdb\n    pdb.set_trace()\n    return value\n",
        verdict.RAISED,
        "a debugger was started, and nobody can type here",
    ),
    "subclass": (
        "    class Equal(torch.Tensor):\n        def __eq__(self, other):\n"
        "            return True\n    return value.as_subclass(Equal)\n",
        verdict.WRONG,
        "the answer is a subclass.Equal",
    ),
}


def write(tmp_path: Path, name: str, body: str) -> Path:
    path = tmp_path / f"{name}.py"
    path.write_text(HEAD + body)
    return path


def check(path: Path, **options) -> Verdict:
    return check_file(EXERCISE, path, patience=options.pop("patience", 2.0), **options)


@pytest.mark.parametrize("name", WRONG)
def test_other_mistakes_are_told_plainly(name, tmp_path):
    body, kind, fragment = WRONG[name]
    found = check(write(tmp_path, name, body), patience=1.0 if kind == verdict.HANG else 2.0)
    assert found.kind == kind, found.text
    assert fragment in " ".join(found.text.split()), found.text
    assert "rank_side.py" not in found.text and "room.py" not in found.text
    assert "second time" not in found.text
    if name == "hang":
        assert "rank 0 is at hang.py:8, in ring_sum:  dist.all_reduce(value)" in found.text
        assert "rank 1 is at hang.py:10, in ring_sum:  dist.recv(value, src=0)" in found.text
    if name == "bad_access":
        assert "it is at bad_access.py:7, in ring_sum:  os.kill(os.getpid(), 11)" in found.text


def test_a_wrong_answer_that_changes_is_named(tmp_path):
    found = check(write(tmp_path, "chance", "    return torch.full_like(value, os.getpid())\n"))
    assert found.kind == verdict.WRONG
    assert "Asked the same thing a second time, your code gave another answer: " in found.text


def test_exb_what_ranks_say_of_themselves_is_compared_without_their_numbers():
    """Whoever speaks first says its own rows; that is no chance in the student's code."""
    first, second = (
        Verdict(verdict.WRONG, f"rank {r}: 3 rows expected, {r} come ({r}.5)", rank=r)
        for r in (0, 2)
    )
    assert engine._without_ranks(first) == engine._without_ranks(second)
    judged = [Verdict(verdict.WRONG, f"rank 1: it is {number}") for number in (3, 4)]
    assert engine._without_ranks(judged[0]) != engine._without_ranks(judged[1])


def fails_always(case, answers):
    raise ValueError("min() arg is an empty sequence")


def fails_where_it_is_wrong(case, answers):
    if not torch.equal(answers[0], answers[1] * 3):
        raise TypeError("unsupported format string")


def wants_a_number(case, answers):
    return [one + 1 for one in answers]


def wants_a_float(case, answers):
    if isinstance(answers[0], int):
        float(answers[0])


@pytest.mark.parametrize(
    ("judge", "body", "kind", "fragment"),
    [
        (fails_always, RIGHT, verdict.DEFECT, "min() arg is an empty sequence"),
        (fails_where_it_is_wrong, RIGHT, verdict.DEFECT, "unsupported format string"),
        (wants_a_number, "    return None\n", verdict.WRONG, "is not of the kind that is expected"),
        (wants_a_float, "    return 10**400\n", verdict.WRONG, "OverflowError: int too large"),
    ],
    ids=["always", "in its words", "of another kind", "no float"],
)
def test_exb_a_mistake_of_the_judge_is_not_the_students(
    judge, body, kind, fragment, tmp_path, monkeypatch
):
    monkeypatch.setattr(engine, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(sample_check, "judge", judge)
    found = check(write(tmp_path, "file", body))
    assert found.kind == kind and fragment in found.text, found.text
    if kind == verdict.DEFECT:
        assert "this is not your fault" in render(found, "ex00")
        assert f"in {judge.__name__}" in found.text


@pytest.mark.full
def test_an_endless_loop_is_found_at_its_line(tmp_path):
    found = check(write(tmp_path, "loop", "    while True:\n        pass\n"), patience=0.6)
    assert found.kind in (verdict.HANG, verdict.TIMEOUT)
    assert "loop.py:7, in ring_sum" in found.text or "loop.py:8, in ring_sum" in found.text


def test_right_code_passes_and_says_what_it_achieved(tmp_path):
    found = check(write(tmp_path, "right", RIGHT))
    assert found.has_passed
    assert [dict(one) for one in found.achieved] == [
        {"case": "1 values", "values summed": "2"},
        {"case": "4 values", "values summed": "8"},
    ]
    text = render(found, "ex00")
    assert "All public checks passed" in text and "4 values: values summed 8" in text
    assert check(write(tmp_path, "right", RIGHT), seed=3).achieved[0]["case"] == "4 values"


def test_the_control_run_fails_whatever_the_file_does(tmp_path):
    assert check(write(tmp_path, "right", RIGHT), control=True).kind == verdict.UNWRITTEN


def test_what_is_printed_is_shown_and_a_flood_is_cut(tmp_path):
    body = f"    print('here', flush=True)\n    print('x' * 3_000_000)\n{RIGHT}"
    found = check(write(tmp_path, "flood", body))
    assert found.has_passed
    assert found.printed["0"].startswith("here\n")
    assert "bytes left out" in found.printed["1"] and len(found.printed["1"]) < 4000
    assert all(len(line) < 200 for line in render(found, "ex00").splitlines())


@pytest.mark.parametrize(
    ("source", "kind", "fragment"),
    [
        ("def ring_sum(value)\n    return 1\n", verdict.SYNTAX, "file.py:1: expected ':'"),
        ("x = 1\n", verdict.MISSING, "no longer defines `ring_sum`"),
        ("#" * (1 << 20) + "\n", verdict.MISSING, "has 1048577 bytes"),
        (None, verdict.MISSING, "does not exist; `minimegatron exercises start ex00`"),
    ],
)
def test_a_file_that_cannot_run_is_told_without_ranks(source, kind, fragment, tmp_path):
    path = tmp_path / "file.py"
    if source is not None:
        path.write_text(source)
    found = check(path)
    assert found.kind == kind and fragment in found.text
    assert found.seconds < 1


def test_a_mistake_while_the_file_is_loaded_is_the_students(tmp_path):
    found = check(write(tmp_path, "early", RIGHT + "\n\nimport nonsense_module\n"))
    assert found.kind == verdict.RAISED
    assert "No module named 'nonsense_module'" in found.text and "early.py:12" in found.text


def test_the_runner_is_not_fooled_by_what_is_printed_or_returned(tmp_path):
    """Answers come by a way that ranks do not have, and a dead checker is no pass."""
    forged = Verdict(verdict.PASSED, "all right").to_json()
    body = (
        f"    print({forged!r}, flush=True)\n"
        "    for number in range(20):\n        try:\n"
        f"            os.write(number, {(forged + chr(10)).encode()!r})\n"
        "        except OSError:\n            pass\n    os._exit(0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{REPOSITORY}"}
    with Runner(environment=environment) as runner:
        found = runner.ask(EXERCISE, write(tmp_path, "liar", body), 200, patience=3.0)
        assert not found.has_passed and found.text != "all right"
        right = write(tmp_path, "right", RIGHT)
        replay = tmp_path / "replays" / "right.html"
        assert runner.ask(EXERCISE, right, 200, patience=3.0, replay=str(replay)).has_passed
        assert not replay.exists(), "this exercise records nothing"
        runner.process.kill()
        with pytest.raises(RuntimeError, match="ended without an answer"):
            runner.ask(EXERCISE, right, 10)


def test_plain_torchrun_says_the_same(tmp_path):
    """On two ranks of a real exercise's size it is slow; the small one has the same path.

    What a right file prints, and how its processes end: `test_torchrun`.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    tail = (
        "\n\nif __name__ == '__main__':\n"
        "    from minimegatron.exercises import torchrun\n"
        "    from tests.exercises.sample.ex00_ring import EXERCISE\n"
        "    torchrun.exercise_of = lambda path: EXERCISE\n"
        "    from minimegatron.exercises.check import main\n\n    main(__file__)\n"
    )
    path = write(tmp_path, "ex00_ring", WRONG["half"][0] + tail)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", path],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
        },
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert done.stdout.count("[no] ex00_ring: Not right yet") == 1
    assert "1 / world (1/2): the sum over ranks is missing" in done.stdout
    assert not list(temporary.glob("minimegatron-*"))
