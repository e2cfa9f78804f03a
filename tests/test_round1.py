"""Checkpoints, recordings, folders, schedules and imports of earlier versions: all still load.

The files are in `fixtures`, with what the version that made them said of them; its README says how they
were made. They name modules by the places that these had then.
"""

import importlib
import json
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from minimegatron.__main__ import main
from minimegatron.exercises.check.engine import check_file
from minimegatron.exercises.exercise import find
from minimegatron.exercises.grading.cell import SAME_USER
from minimegatron.exercises.grading.grade import PASSED
from minimegatron.exercises.grading.submissions import find_submissions
from minimegatron.exercises.room import verdict
from minimegatron.exercises.student.student_folder import StudentFolder
from minimegatron.training import training
from tests.ranks import run_ranks
from tests.training import short_runs

FIXTURES = Path(__file__).parent / "fixtures"
TIMES = ["round1", "seam"]


@cache
def read(time: str, name: str):
    return json.loads((FIXTURES / time / f"{name}.json").read_text())


def unpacked(time: str, name: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / time / f"{name}.tar.xz") as archive:
        archive.extractall(folder / time, filter="data")
    return folder / time / name


# -- Imports --


@pytest.mark.processes
@pytest.mark.parametrize("time", TIMES)
def test_imports(time):
    """Each module at its old place has each name."""
    missing = []
    for module, names in read(time, "imports").items():
        found = importlib.import_module(module)
        for name in names:
            if not hasattr(found, name):
                try:
                    importlib.import_module(f"{module}.{name}")
                except ImportError:
                    missing.append(f"{module}.{name}")
    assert not missing


# -- Checkpoints --

MODEL = (
    "--hidden-size 8 --ffn-hidden-size 8 --num-attention-heads 2 --padded-vocab-size 264 "
    "--hidden-dropout 0 --attention-dropout 0 "
    f"--data-path {FIXTURES}/round1/data/licence_text_document"
)
SAVED = [
    (time, name)
    for time, names in (("round1", ("tp2_pp2", "dp2_pp2")), ("seam", ("in_a_v",)))
    for name in names
]
OTHER_LAYOUTS = {
    "tp2_pp2": f"{short_runs.PP2} --overlap-grad-reduce",
    "dp2_pp2": f"{short_runs.PP4} --bf16",
    "in_a_v": f"{short_runs.PP2} {short_runs.VP2} {short_runs.ZERO1}",
}


def go_on(cases: list[tuple[str, str, bool]]) -> list[dict]:
    """In a rank: loads each checkpoint and makes two more steps."""
    step, found = training.train_step, []
    for folder, flags, double in cases:
        norms = []

        def noted(*args, norms=norms, **kwargs):
            results = step(*args, **kwargs)
            norms.append(results[-2])
            return results

        with mock.patch.object(training, "train_step", noted):
            result = short_runs.run(f"{MODEL} {flags} --load {folder}", 5, double=double)
        result["norms"] = norms
        found.append(result)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    places = {time: unpacked(time, "checkpoints", folder) for time in TIMES}
    return {name: places[time] / name for time, name in SAVED}


def resumed(saved: dict[str, Path], world_size: int, flags_of) -> dict[str, dict]:
    cases = []
    for time, name in SAVED:
        then = read(time, "checkpoints")[name]
        flags = flags_of(name, then["flags"].replace("seam/", f"{FIXTURES}/seam/"))
        cases.append((str(saved[name]), flags, then["double"]))
    names = [name for _, name in SAVED]
    return dict(zip(names, run_ranks(go_on, world_size, cases, timeout=120)[0], strict=True))


def require_same(found: dict[str, dict], kind: str) -> None:
    """The losses and norms that the old code computed, as near as its own layouts are to each other."""
    for time, name in SAVED:
        then = read(time, "checkpoints")[name]
        assert found[name]["began"] == 3
        # Weights of bf16 differ in their last bit, from one layout to another, by 2 ** -9.
        relative = 1e-6 if "--bf16" not in then["flags"] else 2e-4
        if then["double"]:
            assert found[name]["losses"] == pytest.approx(then[kind]["losses"], rel=1e-12), name
        assert found[name]["losses"] == pytest.approx(then[kind]["losses"], rel=relative), name
        assert found[name]["norms"] == pytest.approx(then[kind]["norms"], rel=relative), name


def test_checkpoints_at_their_layout(saved):
    require_same(resumed(saved, 4, lambda name, flags: flags), "again")


def test_checkpoints_in_one_process(saved):
    def flags_of(name: str, flags: str) -> str:
        return "--bf16" if "--bf16" in flags else ""

    require_same(resumed(saved, 1, flags_of), "alone")


def test_checkpoints_at_another_layout(saved):
    require_same(resumed(saved, 4, lambda name, flags: OTHER_LAYOUTS[name]), "again")


# -- Recordings and plans --


@pytest.mark.parametrize("time", TIMES)
def test_recordings(time, tmp_path, capsys):
    folder = unpacked(time, "trace", tmp_path)

    def figures(text: str) -> list[str]:
        return re.findall(r"\d+(?:\.\d+)?", text)

    for words in (["show", folder], ["diff", folder, "plan"]):
        assert main(["trace", *map(str, words)]) == 0
        out = capsys.readouterr().out
        assert "plan: followed exactly, 28 actions and 6 messages on 2 ranks" in out
        assert figures(out) == figures(read(time, "trace")["show"])
    assert main(["trace", "show", str(folder), "--rank", "1"]) == 0
    assert figures(capsys.readouterr().out) == figures(read(time, "trace")["tree"])
    for kind, inside in (("html", "<html"), ("chrome", "train_step"), ("json", '"ranks"')):
        path = tmp_path / f"out.{kind}"
        assert main(["trace", "export", str(folder), "--format", kind, "--output", str(path)]) == 0
        assert inside in path.read_text()
    assert "minimegatron/training/training.py" in (tmp_path / "out.html").read_text()


def test_recordings_of_two_times_did_the_same(tmp_path, capsys):
    folders = [str(unpacked(time, "trace", tmp_path)) for time in TIMES]
    assert main(["trace", "diff", *folders]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("time", TIMES)
def test_plans(time, tmp_path):
    """The same plan now has the same actions and messages at the same times."""
    path, then = tmp_path / "plan.json", read(time, "plan")
    sizes = ["--pp", "2", "--microbatches", "3", "--forward-time", "1/3", "--comm-time", "0.25"]
    assert main(["plan", *sizes, "--format", "json", "--output", str(path)]) == 0
    now = json.loads(path.read_text())
    assert (now["schema"], now["version"]) == (then["schema"], then["version"])
    for key in ("config", "summary"):
        assert then[key].items() <= now[key].items()
    for before, after in zip(then["ranks"], now["ranks"], strict=True):
        for one, other in zip(before, after, strict=True):
            assert one.items() <= other.items()


# -- A user's schedules --

FILES = {"round1": "user_schedules.py", "seam": "user_orders.py"}
PLANNED = [(time, name) for time in TIMES for name in read(time, "user_schedules")["plans"]]


@pytest.mark.parametrize(("time", "name"), PLANNED, ids=lambda word: word)
def test_a_users_schedule_is_planned(time, name, capsys):
    words = ["plan", "--pp", "3", "--microbatches", "4", "--user-schedule"]
    is_wrong = name in ("sends_too_late", "forgets_a_backward")
    code = main([*words, f"{FIXTURES / time / FILES[time]}:{name}"])
    assert code == (1 if is_wrong else 0)
    then, now = read(time, "user_schedules")["plans"][name], capsys.readouterr()
    if is_wrong:
        problem = r"^rank \d+, microbatch \d+, chunk \d+: [\w-]+"
        found, wanted = (re.findall(problem, text, re.MULTILINE) for text in (now.err, then))
        assert found == wanted and found
    else:
        # The two lines above it say in words what was asked for.
        assert now.out[now.out.index("\ntime ") :] == then[then.index("\ntime ") :]


def results_of(program: str) -> list[dict]:
    """In a rank: what the program's own `run` returns."""
    with mock.patch.object(sys, "path", [str(Path(program).parent), *sys.path]):
        return runpy.run_path(program)["run"]()


def require_same_results(time: str, results: list[list[dict]]) -> None:
    for before, after in zip(read(time, "user_schedules")["ranks"], results, strict=True):
        for then, now in zip(before, after, strict=True):
            assert now == {key: pytest.approx(value, rel=1e-12) for key, value in then.items()}


@pytest.mark.parametrize("time", TIMES)
def test_ranks_follow_a_users_schedules(time):
    program = FIXTURES / time / "user_training.py"
    require_same_results(time, run_ranks(results_of, 2, str(program), timeout=120))


@pytest.mark.full
@pytest.mark.parametrize("time", TIMES)
def test_a_users_program_runs(time):
    """As a user starts it; it starts its ranks itself."""
    program = [sys.executable, str(FIXTURES / time / "user_training.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    require_same_results(time, json.loads(done.stdout))


# -- A student's folder --

SOLVED = ["ex01", "ex04", "ex06", "ex08", "ex12", "ex13", "ex16", "ex18"]
STUBS = ["ex02", "ex09", "ex14", "ex17"]
SOME = ["ex01", "ex06"]


@pytest.fixture
def student(tmp_path) -> Path:
    shutil.copytree(FIXTURES / "round1" / "student", tmp_path / "ada")
    return tmp_path / "ada"


def all_but(some: list[str], names: list[str]) -> list:
    """`some` in every run, the others of `names` in `make test-full`."""
    return [name if name in some else pytest.param(name, marks=pytest.mark.full) for name in names]


def exercises(student: Path, *words: object) -> int:
    return main(["exercises", "--folder", str(student), *map(str, words)])


def test_a_students_folder_is_read(student, capsys):
    assert exercises(student, "list") == 0
    listed = capsys.readouterr().out
    for marks, names in (("x", ["ex01", "ex12"]), ("-", [*STUBS, "ex05", "ex06"])):
        for name in names:
            assert f"[{marks}] {name} " in listed, listed
            assert StudentFolder.open(student).is_finished(find(name)) == (marks == "x")
    # One hint was seen.
    for number in (2, 3):
        assert exercises(student, "hint") == 0
        assert capsys.readouterr().out.startswith(f"Hint {number}\n")
    state = json.loads((student / ".minimegatron.json").read_text())
    assert state["progress"]["ex05_predict_1f1b"]["hints"] == 3
    then = json.loads((FIXTURES / "round1" / "student" / ".minimegatron.json").read_text())
    for name, progress in then["progress"].items():
        if name != "ex05_predict_1f1b":
            assert progress.items() <= state["progress"][name].items()


@pytest.mark.parametrize("name", all_but([*SOME, "ex18"], SOLVED))
def test_a_students_solution_passes(student, name):
    exercise = find(name)
    found = check_file(exercise, student / f"{exercise.name}.py", patience=4.0)
    assert found.has_passed, verdict.render(found, name)


@pytest.mark.parametrize("name", all_but(["ex02", "ex17"], STUBS))
def test_a_students_stub_says_what_to_write(student, name):
    exercise = find(name)
    found = check_file(exercise, student / f"{exercise.name}.py", patience=4.0)
    assert found.kind == verdict.UNWRITTEN, verdict.render(found, name)


@pytest.mark.full
@pytest.mark.processes
def test_the_command_checks_a_students_file(student):
    assert exercises(student, "check", "ex12") == 0
    assert exercises(student, "check", "ex05") == 1
    state = json.loads((student / ".minimegatron.json").read_text())["progress"]
    assert [state[find(name).name]["attempts"] for name in ("ex12", "ex05")] == [2, 2]


def test_a_students_folder_can_be_handed_in(student, tmp_path):
    archive = tmp_path / "in" / "ada.zip"
    archive.parent.mkdir()
    assert exercises(student, "submit", "--output", archive) == 0
    (found,) = find_submissions(archive.parent)
    for name, source in found.sources.items():
        assert source == (student / f"{name}.py").read_text()
    assert {find(name).name for name in SOLVED + STUBS} < set(found.sources)


@pytest.mark.full
@pytest.mark.processes
def test_a_students_folder_is_graded(student, tmp_path):
    out = tmp_path / "grades.json"
    words = ["--exercises", ",".join(SOLVED), "--out", out, "--seed", 7, "--isolation", SAME_USER]
    assert exercises(student, "grade", student.parent, *words) == 0
    grades = json.loads(out.read_text())["grades"]
    assert {grade["exercise"] for grade in grades} == {find(name).name for name in SOLVED}
    for grade in grades:
        assert (grade["public"], grade["hidden"]) == (PASSED, PASSED), grade
