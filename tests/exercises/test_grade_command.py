"""`exercises grade`: what it refuses before anything starts, and that no grade is lost after that."""

import os
import signal
from pathlib import Path

import pytest

from minimegatron.__main__ import main
from minimegatron.commands import exercises_command as command
from minimegatron.exercises.grading import reports
from minimegatron.exercises.grading.cell import SAME_USER
from minimegatron.exercises.grading.grade import NOT_RUN, PASSED, Grade
from minimegatron.exercises.grading.reports import (
    MOST_UNREAD,
    summary,
    to_json,
    try_report,
    write_report,
)
from tests.exercises.handed_in import FILE, NAME, SOURCE
from tests.exercises.test_reports import report

BOTH = report(Grade("ada", NAME, PASSED, PASSED, 1), Grade("bob", NAME))


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """Submissions of ada and bob, beside the folder that the test runs in."""
    for student in ("ada", "bob"):
        (tmp_path / "in" / student).mkdir(parents=True)
        (tmp_path / "in" / student / FILE).write_text(SOURCE)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "in"


@pytest.fixture
def graded(monkeypatch) -> list:
    """The calls of `grade`, which does nothing else."""
    calls = []
    monkeypatch.setattr(command, "grade", lambda *given, **_: calls.append(given) or BOTH)
    return calls


def grade(base: Path, *options: object) -> int:
    return main(["exercises", "grade", *map(str, (base, *options))])


# -- Refused before anything starts --


@pytest.mark.parametrize(
    "options",
    [
        *[("--seconds", one) for one in ("nan", "-1", "0", "1e999", "1e9", "x")],
        *[("--memory-mib", one) for one in ("0", "-5", "1.5", "9" * 5000)],
        *[("--jobs", one) for one in ("-1", "1000000", "x")],
    ],
)
def test_numbers_that_make_no_sense(options, base, graded, capsys):
    with pytest.raises(SystemExit, match="2"):
        grade(base, "--out", "x.csv", *options)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"argument {options[0]}: " in line and ": give " in line and len(line) < 300
    assert not graded


def test_an_exercise_named_twice_is_one(base, graded):
    assert grade(base, "--out", "x.csv", "--exercises", "ex01, ex06,ex01,") == 0
    assert [one.number for one in graded[0][2]] == ["ex01", "ex06"]


# -- Reports that cannot be written --


@pytest.mark.parametrize("out", ["folder.csv", "file/x.csv", "link.csv", "null.csv", "y" * 300])
def test_a_path_that_cannot_be_written_is_told_before_grading(out, base, graded, capsys):
    Path("folder.csv").mkdir()
    Path("file").touch()
    Path("link.csv").symlink_to("elsewhere.csv")
    os.mkfifo("null.csv")
    before = sorted(Path.cwd().iterdir())
    assert grade(base, "--out", "good.csv", "--out", out, "--format", "csv") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{out} cannot be written: " in line
    assert not graded and sorted(Path.cwd().iterdir()) == before


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_students_report_that_cannot_be_written_is_told_too(kind, base, graded, capsys):
    Path("ada").touch() if kind == "file" else Path("ada").symlink_to(base)
    assert grade(base, "--out", "results.json") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "ada/results.json cannot be written: " in line and not graded
    assert not Path("bob").exists()


def test_a_folder_that_may_not_be_written_is_told(base, graded, monkeypatch, capsys):
    def refuse(place, *_, **__):
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr(reports.os, "open", refuse)
    assert grade(base, "--out", "new/deep/x.csv") == 2
    assert "new/deep/x.csv cannot be written: Permission denied" in capsys.readouterr().err
    assert not graded and not Path("new").exists()


def test_a_report_that_cannot_be_written_in_the_end_is_kept(base, graded, monkeypatch, capsys):
    def spoil(*_, **__):
        Path("grades.csv").mkdir()
        Path("bob").symlink_to(base)
        return BOTH

    monkeypatch.setattr(command, "grade", spoil)
    monkeypatch.setenv("TMPDIR", str(base))
    monkeypatch.setattr(reports.tempfile, "tempdir", None)
    outs = [x for name in ("grades.csv", "grades.json", "results.json") for x in ("--out", name)]
    assert grade(base, *outs) == 1
    said = capsys.readouterr()
    assert Path("grades.json").is_file() and Path("ada/results.json").is_file()
    first, second = said.err.splitlines()
    assert first.startswith("grades.csv cannot be written: ") and "; it is in " in first
    assert second.startswith("bob/results.json cannot be written: ")
    kept = Path(first.partition("; it is in ")[2])
    assert kept.read_text() == reports.to_csv(BOTH) and kept.stat().st_mode & 0o777 == 0o600
    assert "wrote grades.json" in said.out and "wrote ada/results.json" in said.out
    assert not (base / "results.json").exists()


def test_a_students_link_is_replaced_not_followed(tmp_path):
    (tmp_path / "precious.txt").write_text("precious")
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "results.json").symlink_to(tmp_path / "precious.txt")
    try_report(BOTH.students, tmp_path / "results.json")
    own, _ = write_report(BOTH, tmp_path / "results.json")
    assert not own.is_symlink() and '"score": 1' in own.read_text()
    assert (tmp_path / "precious.txt").read_text() == "precious"
    assert os.listdir(own.parent) == ["results.json"]


def test_a_report_that_was_private_stays_so(tmp_path):
    path = tmp_path / "grades.json"
    path.touch(0o600)
    write_report(BOTH, path)
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text() == to_json(BOTH)


def test_a_report_is_old_or_new_but_never_half(tmp_path, tmp_path_factory, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "grades.json"
    path.write_text("old")
    monkeypatch.setattr(reports.os, "replace", fail)
    elsewhere = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(reports.tempfile, "tempdir", str(elsewhere))
    with pytest.raises(OSError, match="No space left on device"):
        write_report(BOTH, path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["grades.json"]
    (kept,) = elsewhere.iterdir()
    assert kept.read_text() == to_json(BOTH)


# -- What nobody read --


def test_the_summary_names_what_was_not_read(base, graded, capsys):
    (base / "carol\x1b.ipynb").touch()
    (base / "max").symlink_to("/etc/passwd")
    assert grade(base, "--out", base / "x.csv") == 0
    assert "\nnot read: carol\\x1b.ipynb, max\n" in capsys.readouterr().out
    many = [f"notes{number}.txt" for number in range(MOST_UNREAD + 3)]
    assert summary(BOTH, many).endswith(f"notes{MOST_UNREAD - 1}.txt and 3 more")
    assert "not read" not in summary(BOTH)


# -- Ctrl-C --


def test_ctrl_c_while_grading_keeps_what_is_graded(base, monkeypatch, capsys):
    def interrupted(submissions, settings, wanted, tell):
        assert settings.seed and [one.name for one in wanted] == [NAME]
        tell(Grade("ada", NAME, PASSED, PASSED, 1))
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(command, "grade", interrupted)
    (base / "cid").mkdir()
    assert grade(base, "--out", "x.csv", "--out", "x.json", "--isolation", SAME_USER) == 130
    assert signal.getsignal(signal.SIGINT) == before
    rows = Path("x.csv").read_text().splitlines()
    assert (
        rows[1] == "ada,1,1," and rows[2].startswith("bob,0,0,") and rows[3].startswith("cid,0,,")
    )
    assert f'"public": "{NOT_RUN}"' in Path("x.json").read_text()
    said = capsys.readouterr()
    assert "wrote x.csv" in said.out and "Traceback" not in said.err
    assert "stopped by Ctrl-C; 1 of 2 files were graded" in said.err


def test_ctrl_c_before_grading_writes_nothing(base, monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "find_submissions", interrupted)
    assert grade(base, "--out", "x.csv") == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C; nothing was graded\n"
    assert not Path("x.csv").exists()
