"""A student's folder: what is written, what is kept, what is refused. No ranks."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import minimegatron
from minimegatron.__main__ import main
from minimegatron.exercises.exercise import exercises, find
from minimegatron.exercises.room.verdict import PASSED, WRONG, Verdict
from minimegatron.exercises.student import pages
from minimegatron.exercises.student.student_folder import STATE, StudentFolder, digest, hints

FIRST = exercises()[0]
PACKAGE = Path(minimegatron.__file__).parent
SAID_BY_ALL = (
    *("bench/feedback", "bench/feedback_numbers", "check/engine"),
    *("room/collect", "room/collected", "room/on_ranks", "room/room"),
)
"""Modules of `exercises` whose messages any exercise may show."""


@pytest.fixture
def folder(tmp_path):
    return StudentFolder.open(tmp_path)


def run(tmp_path, *words: str) -> int:
    return main(["exercises", "--folder", str(tmp_path), *words])


def pass_all(folder: StudentFolder) -> None:
    for exercise in exercises():
        folder.start(exercise)
        folder.note(exercise, Verdict(PASSED), digest(folder.file(exercise)))


def test_names_may_be_shortened():
    assert find("ex01") is find("1") is find("01") is find(FIRST.name) is find(f"{FIRST.name}.py")
    assert find("rank_arith") is FIRST
    with pytest.raises(
        ValueError, match="there is no exercise 'ex99'; `minimegatron exercises list`"
    ):
        find("ex99")
    with pytest.raises(ValueError, match=r"\d+ exercises fit 'ex1'|there is no exercise|fit 'ex'"):
        find("ex")


def test_listing_imports_no_torch(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from minimegatron.__main__ import main\n"
        f"main(['exercises', '--folder', {str(tmp_path)!r}, 'list'])\n"
        f"main(['exercises', '--folder', {str(tmp_path)!r}, 'start'])\n"
        f"main(['exercises', '--folder', {str(tmp_path)!r}, 'hint'])\n"
        f"main(['exercises', 'lab', 'list'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert FIRST.name in done.stdout and "Hint 1" in done.stdout


def test_start_puts_stub_and_tutor_there_and_remembers(folder, tmp_path, capsys):
    assert run(tmp_path, "start", "ex01") == 0
    assert folder.file(FIRST).read_text() == (FIRST.folder / "stub.py").read_text()
    assert "Be a tutor" in (tmp_path / "AGENTS.md").read_text()
    state = json.loads((tmp_path / STATE).read_text())
    assert state["current"] == FIRST.name
    assert list(state["progress"]) == [FIRST.name]
    out = capsys.readouterr().out
    assert FIRST.summary in out and "exercises check" in out
    folder.file(FIRST).write_text("mine")
    assert run(tmp_path, "start", "ex01") == 2
    assert "is already here; go on with it" in capsys.readouterr().err
    assert folder.file(FIRST).read_text() == "mine"


def test_hints_come_one_by_one_and_are_counted(tmp_path, capsys):
    run(tmp_path, "start", "ex01")
    for number in (1, 2, 3, 3):
        capsys.readouterr()
        assert run(tmp_path, "hint") == 0
        out = capsys.readouterr().out
        said = re.sub(r"[^a-zA-Z]", "", hints(FIRST)[number - 1].replace("python", ""))
        assert out.startswith(f"Hint {number}\n") and said in re.sub(r"[^a-zA-Z]", "", out)
    assert StudentFolder.open(tmp_path).of(FIRST).hints == 3


def read_messages(paths) -> str:
    """The sources as one line, with strings put together that go on in the next line."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    return " ".join(re.sub(r'"\s*\n\s*f?"', "", text).split())


@pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.name)
def test_hints_on_failures_fit_what_checks_say(exercise):
    text = (exercise.folder / "hints.md").read_text(encoding="utf-8")
    fragments = re.findall(r'^## When "(.+)"$', text, re.MULTILINE)
    assert len(fragments) >= 2
    assert len(fragments) == len(set(fragments)) == text.count("## When")
    assert text.rindex("## Hint") < text.index("## When")
    own = [path for path in exercise.folder.glob("*.py") if path.stem not in ("stub", "solution")]
    shared = [PACKAGE / "exercises" / f"{name}.py" for name in SAID_BY_ALL]
    said = read_messages([*own, *shared, *(PACKAGE / "doctor").glob("*.py")])
    for fragment in fragments:
        assert fragment.removeprefix("part: ") in said, fragment


def test_reset_keeps_the_students_file(folder, tmp_path, capsys):
    run(tmp_path, "start", "ex01")
    for text in ("first", "second"):
        folder.file(FIRST).write_text(text)
        assert run(tmp_path, "reset", "1") == 0
    assert folder.file(FIRST).read_text() == (FIRST.folder / "stub.py").read_text()
    kept = sorted(path.name for path in tmp_path.glob("*.old"))
    assert kept == [f"{FIRST.name}.1.old", f"{FIRST.name}.2.old"]
    assert (tmp_path / kept[1]).read_text() == "second"


def test_a_change_after_passing_is_not_finished(folder):
    folder.start(FIRST)
    assert not folder.is_finished(FIRST)
    folder.note(FIRST, Verdict(PASSED), digest(folder.file(FIRST)))
    assert StudentFolder.open(folder.path).is_finished(FIRST)
    folder.file(FIRST).write_text("broken again")
    assert not folder.is_finished(FIRST)
    folder.note(FIRST, Verdict(WRONG, "no"), digest(folder.file(FIRST)))
    again = StudentFolder.open(folder.path)
    assert again.of(FIRST).passed, "what has passed once counts in the list"
    assert not again.is_finished(FIRST)
    assert again.of(FIRST).attempts == 2


def test_submit_packs_the_exercises_only(tmp_path, capsys):
    run(tmp_path, "start", "1")
    (tmp_path / "secret.txt").write_text("mine")
    target = tmp_path / "out.zip"
    assert run(tmp_path, "submit", "--output", str(target)) == 0
    assert sorted(zipfile.ZipFile(target).namelist()) == [STATE, f"{FIRST.name}.py"]
    out = capsys.readouterr().out
    assert "not passed as it is" in out and "Public checks are not the grade" in out


def test_what_makes_no_sense_is_refused_in_a_line(tmp_path, capsys):
    for words, message in (
        (("check",), "no exercise is started here"),
        (("hint",), "no exercise is started here"),
        (("submit",), "there is no exercise in"),
        (("start", "ex77"), "there is no exercise 'ex77'"),
    ):
        assert run(tmp_path, *words) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    (tmp_path / STATE).write_text("{")
    assert run(tmp_path, "list") == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_list_shows_progress_and_what_is_next(folder):
    assert f"0 of {len(exercises())} passed" in pages.overview(folder)
    assert "next: `minimegatron exercises start ex01`" in pages.overview(folder)
    folder.start(FIRST)
    assert f"[-] {FIRST.number} " in pages.overview(folder)
    folder.note(FIRST, Verdict(PASSED), "x")
    assert f"[x] {FIRST.number} " in pages.overview(folder)
    assert "start ex01b" in pages.overview(folder)


def test_the_end_says_something_good(folder):
    pass_all(folder)
    assert folder.next() is None
    assert f"All {len(exercises())} exercises pass" in pages.overview(folder)
    assert "lab list" in pages.overview(folder)


def test_pages_and_solutions_are_there(tmp_path, capsys):
    assert run(tmp_path, "page", "ex01") == 0
    assert capsys.readouterr().out.split("\n", 1)[0].strip() == find("ex01").title
    assert run(tmp_path, "solution", "ex01") == 0
    assert capsys.readouterr().out.strip().endswith("ex01_rank_arithmetic/solution.py")
