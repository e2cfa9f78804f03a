"""`watch` as a student sees it: a scripted keyboard, and a checker that answers at once."""

import os
import pty
import subprocess
import sys
import time

import pytest

from minimegatron.exercises.exercise import exercises
from minimegatron.exercises.room.verdict import PASSED, WRONG, Verdict
from minimegatron.exercises.student.student_folder import StudentFolder, digest
from minimegatron.exercises.student.watch_files import _Watching

FIRST, SECOND = exercises()[:2]


class Checker:
    """Passes what contains the word right."""

    def __init__(self):
        self.asked = []

    def ask(self, exercise, path, timeout, **options) -> Verdict:
        self.asked.append(exercise.name)
        is_right = "right" in path.read_text()
        return Verdict(PASSED if is_right else WRONG, "" if is_right else "rank 0: not so")


class Student:
    """Does one thing per look: a key, or a function that edits."""

    def __init__(self, *deeds):
        self.deeds = list(deeds)

    def __call__(self, seconds: float) -> str:
        deed = self.deeds.pop(0) if self.deeds else "q"
        if callable(deed):
            deed()
            return ""
        return deed


@pytest.fixture
def folder(tmp_path):
    return StudentFolder.open(tmp_path)


def watch(folder, *deeds) -> Checker:
    checker = Checker()
    assert _Watching(folder, checker, Student(*deeds)).run() == 0
    return checker


def write(folder, exercise, text):
    return lambda: folder.file(exercise).write_text(text)


def test_it_starts_the_first_and_waits_for_a_change(folder, capsys):
    checker = watch(folder, "", "", "q")
    assert folder.file(FIRST).exists() and not checker.asked
    out = capsys.readouterr().out
    assert FIRST.summary in out and "h hint" in out


def test_it_checks_each_change_once(folder, capsys):
    text = write(folder, FIRST, "wrong")
    checker = watch(folder, text, "", "", text, "", "r", "", write(folder, FIRST, "right"), "")
    # The first change, a wish to run again, the second change; saving the same text is no change.
    assert checker.asked == [FIRST.name] * 3
    out = capsys.readouterr().out
    assert "rank 0: not so" in out and "1 of" in out and f"n: on to {SECOND.name}" in out
    assert StudentFolder.open(folder.path).of(FIRST).attempts == 3


def test_hints_come_by_a_key(folder, capsys):
    watch(folder, "h", "h")
    out = capsys.readouterr().out
    assert "Hint 1" in out and "Hint 2" in out
    assert folder.of(FIRST).hints == 2


def test_what_is_finished_is_not_run_again(folder, capsys):
    folder.start(FIRST)
    folder.file(FIRST).write_text("right")
    folder.note(FIRST, Verdict(PASSED), digest(folder.file(FIRST)))
    checker = watch(folder, "", "")
    assert folder.file(SECOND).exists(), "it goes on with the next"
    checker = watch(folder, write(folder, SECOND, "right"), "", "r", "", "")
    # What is there already is checked at once; then the change; but not what has just passed.
    assert checker.asked == [SECOND.name] * 2
    assert "has passed as it is; it is not run again" in capsys.readouterr().out


def test_the_end_says_something_good(folder, capsys):
    deeds = []
    for exercise in exercises():
        deeds += [write(folder, exercise, "right"), "", "n"]
    checker = watch(folder, *deeds)
    assert checker.asked == [one.name for one in exercises()]
    assert f"All {len(exercises())} exercises pass" in capsys.readouterr().out


def test_in_a_terminal_keys_need_no_enter(tmp_path):
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "minimegatron",
        "exercises",
        "--folder",
        str(tmp_path),
        "watch",
    ]
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        deadline = time.monotonic() + 60
        while b"watching" not in seen and time.monotonic() < deadline:
            seen += os.read(ours, 4096)
        os.write(ours, b"h")
        while b"Hint 1" not in seen and time.monotonic() < deadline:
            seen += os.read(ours, 4096)
        os.write(ours, b"q")
        assert running.wait(timeout=60) == 0
    finally:
        running.kill()
        os.close(ours)
    assert b"Hint 1" in seen
