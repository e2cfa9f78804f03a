"""Reports of hostile texts: safe wherever they are opened, always written, silent on hidden runs."""

import contextlib
import csv
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from minimegatron.exercises.check.engine import Sheet
from minimegatron.exercises.exercise import find
from minimegatron.exercises.grading import grade as grading
from minimegatron.exercises.grading.cell import SAME_USER
from minimegatron.exercises.grading.cells import Cell, CellEnded
from minimegatron.exercises.grading.grade import (
    FAILED,
    NOT_RUN,
    NOT_SUBMITTED,
    NOT_THE_STUDENTS,
    PASSED,
    Grade,
    Report,
    Settings,
)
from minimegatron.exercises.grading.remarks import TOO_DEEP, remarks_on
from minimegatron.exercises.grading.remarks_apart import UNREAD, remarks_apart
from minimegatron.exercises.grading.reports import (
    student_folders,
    summary,
    to_csv,
    to_gradescope,
    to_json,
    to_junit,
    write_report,
)
from minimegatron.exercises.grading.submissions import Submission
from minimegatron.exercises.room import plain_text, verdict
from minimegatron.exercises.room.plain_data import to_line
from minimegatron.exercises.room.verdict import Verdict
from tests.exercises.sample.ex00_ring import EXERCISE

ROOT = Path(__file__).parents[2]
NAME = "ex01_rank_arithmetic"
NASTY = "\x1b[2J\x9b31m\x00\x07\r\u202eevil\u2066\udcff\ud800\ufffe\U000e0041"
FORMS = ("grades.csv", "grades.json", "grades.xml", "results.json")


def report(*grades: Grade, problems: dict | None = None) -> Report:
    students = list(dict.fromkeys(grade.student for grade in grades))
    names = list(dict.fromkeys(grade.exercise for grade in grades))
    return Report(list(grades), students, names, 987654321, SAME_USER, problems or {})


def written(one: Report, folder: Path) -> dict[str, str]:
    """All four reports, read as UTF-8, which none may fail to be."""
    paths = [path for name in FORMS for path in write_report(one, folder / name)]
    return {path.relative_to(folder).as_posix(): path.read_bytes().decode() for path in paths}


# -- What students may see --

SECRETS = ("4217.5", "rank 3", "seed 987654321", "frame of the check", "case dp=7", "88.25")


def hidden_failure(kind: str) -> Grade:
    return Grade(
        "ada",
        NAME,
        PASSED,
        FAILED,
        message="\n".join(SECRETS),
        remarks=("a remark on the file",),
        achieved=({"case": SECRETS[4], "makespan": "4217.5"},),
        seconds=88.25,
        kind=kind,
        incidents=("the cell ended early: it used 4217.5 MiB",),
        public_seconds=1.5,
    )


@pytest.mark.parametrize("kind", [*verdict.HEADLINES, NOT_THE_STUDENTS, "", "\x1b[31m4217.5"])
def test_of_hidden_runs_students_see_the_kind_only(kind, tmp_path):
    texts = written(report(hidden_failure(kind)), tmp_path)
    words = grading.HIDDEN_WORDS.get(kind, "no answer")
    for name in ("grades.xml", "results.json"):
        assert not [secret for secret in (*SECRETS, "987654321", "4217") if secret in texts[name]]
        assert words in texts[name] and "hidden checks failed" in texts[name]
    assert 'time="1.500"' in texts["grades.xml"]
    data = json.loads(texts["grades.json"])
    assert data["grades"][0]["message"] == "\n".join(SECRETS) and data["seed"] == 987654321
    assert "it used 4217.5 MiB" in texts["grades.csv"] and "a remark on" in texts["grades.csv"]


def test_of_public_runs_students_see_the_message(tmp_path):
    one = Grade("ada", NAME, FAILED, NOT_RUN, message="rank 3: it is 4217.5", kind=verdict.WRONG)
    texts = written(report(one), tmp_path)
    assert "rank 3: it is 4217.5" in texts["grades.xml"]
    assert "rank 3: it is 4217.5" in texts["results.json"]


class Graded(grading._Grader):
    """Its cells answer so that the checks end as given."""

    def __init__(self, *endings: Verdict | CellEnded):
        super().__init__(SimpleNamespace(cell=nullcell), SAME_USER, 987654321, Settings())
        self.endings = iter(endings)

    def _check(self, *_: object) -> Verdict:
        if isinstance(ending := next(self.endings), CellEnded):
            raise ending
        return ending


def nullcell(*_: object) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def graded(*endings: Verdict | CellEnded) -> Grade:
    return Graded(*endings).graded(ADA, find("ex01"), is_alone=True)


ADA = Submission("ada", {NAME: "x = 1\n"})
RIGHT = Verdict(verdict.PASSED, num_passed=1, num_cases=1, seconds=1.5)


def test_what_a_grade_tells_the_student():
    wrong = Verdict(verdict.WRONG, "4217.5", case="dp=7", rank=3, seconds=80.0)
    assert "4217.5" in graded(wrong).told
    hidden = graded(RIGHT, wrong)
    assert hidden.told == "Of the hidden checks: Not right yet."
    assert "4217.5" in hidden.message and hidden.public_seconds == 1.5 and hidden.seconds == 81.5
    cheat = graded(RIGHT, RIGHT, RIGHT)
    assert "without the functions" in cheat.told and cheat.points == 0
    dead = graded(RIGHT, CellEnded("it used 4217 MiB of memory"))
    assert dead.told == "Of the hidden checks: no answer." and "4217" in dead.incidents[0]
    assert graded(RIGHT, RIGHT, Verdict(verdict.UNWRITTEN)).told == ""
    # No answer of the run that must not pass is no proof that the student cheats.
    slowed = graded(RIGHT, RIGHT, CellEnded("it was not over after 40 s"))
    assert (slowed.hidden, slowed.points) == (NOT_RUN, 0) and slowed.ran_out_of_time
    assert slowed.told == "Of the hidden checks: no answer."


@pytest.mark.parametrize(
    "answer",
    ["{}", "[]", "7", "no JSON", "", '{"ended": {}}', '{"ended": "it used 9 MiB"}']
    + [json.dumps({"collected": said}) for said in (7, "7", '{"dict": []}', [], {})]
    + [json.dumps({"collected": to_line({"lines": [[7]]})})]
    + [json.dumps({"collected": to_line({"lines": [["{}"]], "ending": "passed"})})],
)
def test_a_failure_while_grading_one_student_is_this_students_row(answer, monkeypatch):
    class OneAnswer:
        def cell(self, room: dict, file: str, source: str, seconds: float) -> Cell:
            ours, theirs = socket.socketpair()
            theirs.sendall(f"{answer}\n".encode())
            return Cell(ours, {"room": room}, seconds)

    grader = grading._Grader(OneAnswer(), SAME_USER, 987654321, Settings())
    monkeypatch.setattr(grader, "_judge", JudgeHere)
    found = grader.graded(ADA, find("ex01"), is_alone=True)
    assert found.student == "ada" and found.points == 0
    assert found.message and (found.incidents or found.kind)
    assert "Traceback" not in found.told and str(ROOT) not in found.told


@pytest.mark.parametrize("error", [TimeoutError("late"), RuntimeError("it ended")])
def test_after_a_failed_judgement_comes_another_judge(error):
    class Failing(JudgeHere):
        def open(self, exercise, seed: int) -> list:
            raise error

        def __exit__(self, *_: object) -> None:
            self.is_over = True

    grader = grading._Grader(SimpleNamespace(cell=nullcell), SAME_USER, 987654321, Settings())
    grader._mine.judge = first = Failing()
    found = grader.graded(ADA, find("ex01"), is_alone=True)
    assert found.points == 0 and "could not be judged" in found.incidents[0]
    assert first.is_over and not hasattr(grader._mine, "judge")


def test_who_ran_out_of_time_beside_others_is_graded_again_alone(monkeypatch):
    class NoTemplate:
        __enter__ = __exit__ = lambda self, *_: self

    def grade(self, submission, exercise):
        asked.append(submission.student)
        late = submission.student == "bob" and asked.count("bob") == 1
        incidents = ("the cell ended early: it was not over after 40 s",) * late
        return Grade(submission.student, NAME, PASSED, PASSED, not late, incidents=incidents)

    asked, told = [], []
    monkeypatch.setattr(grading, "Template", NoTemplate)
    monkeypatch.setattr(grading, "strongest_kind", lambda *_: SAME_USER)
    monkeypatch.setattr(grading._Grader, "grade", grade)
    students = [Submission(name, {NAME: ""}) for name in ("ada", "bob", "cid")]
    found = grading.grade(students, Settings(jobs=2), tell=lambda one: told.append(one.student))
    assert asked[-1] == "bob" and len(asked) == 4 and sorted(told) == ["ada", "bob", "cid"]
    assert [found.points(name) for name in ("ada", "bob", "cid")] == [1, 1, 1]


def test_a_file_that_takes_long_to_read_is_not_read_to_its_end():
    slow = "def f():\n    import a" + ".b" * 60_000
    assert remarks_apart(find("ex01"), slow, seconds=1) in ((UNREAD,), (TOO_DEEP,))
    assert remarks_apart(find("ex01"), "import gc", seconds=10) == remarks_on(
        find("ex01"), "import gc"
    )


def test_a_teachers_own_exercise_is_looked_at_as_ours(monkeypatch):
    """It is known by its module: ours may have the same number."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert remarks_apart(EXERCISE, "import gc") == remarks_on(EXERCISE, "import gc") != ()


def test_whoever_stops_the_grading_keeps_what_was_at_hand(monkeypatch):
    class NoTemplate:
        __enter__ = __exit__ = lambda *_: None

    def grade(self, submission, exercise):
        asked.append(submission.student)
        if len(asked) == 10:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        return Grade(submission.student, NAME, PASSED, PASSED, 1)

    asked, told = [], []
    monkeypatch.setattr(grading, "Template", NoTemplate)
    monkeypatch.setattr(grading, "strongest_kind", lambda *_: SAME_USER)
    monkeypatch.setattr(grading._Grader, "grade", grade)
    students = [Submission(f"s{number}", {NAME: ""}) for number in range(200)]
    with pytest.raises(KeyboardInterrupt):
        grading.grade(students, Settings(jobs=2), tell=lambda one: told.append(one.student))
    assert sorted(told) == sorted(asked) and 10 <= len(asked) < 200


def test_whoever_stops_at_once_waits_for_no_cell(monkeypatch):
    class Silent:
        def cell(self, room: dict, file: str, source: str, seconds: float) -> Cell:
            ours, theirs = socket.socketpair()
            kept.append(theirs)
            return Cell(ours, {"room": room}, seconds)

    kept, told = [], []
    grader = grading._Grader(Silent(), SAME_USER, 987654321, Settings(), told.append)
    monkeypatch.setattr(grader, "_judge", JudgeHere)
    threading.Timer(0.3, grader.close).start()
    found = grader.graded(ADA, find("ex01"), is_alone=True)
    assert found.points == 0 and told == []
    assert "it cannot be reached" in found.message or "without an answer" in found.message


class JudgeHere:
    """A judge without a process."""

    def open(self, exercise, seed: int) -> list:
        self.sheet = Sheet(exercise, seed)
        return self.sheet.questions

    def judge(self, number: int, collected) -> bool:
        return self.sheet.judge(number, collected)

    def verdict(self) -> Verdict:
        return self.sheet.verdict()


def test_one_failure_ends_nothing(monkeypatch):
    class NoTemplate:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def fail(self, submission, exercise):
        if submission.student == "bob":
            raise RecursionError("deep")
        return Grade(submission.student, exercise.name, PASSED, PASSED, points=1)

    def tell(grade):
        raise BrokenPipeError if grade.student == "ada" else UnicodeEncodeError("x", "y", 0, 1, "z")

    monkeypatch.setattr(grading, "Template", NoTemplate)
    monkeypatch.setattr(grading, "strongest_kind", lambda template, settings: settings.kind)
    monkeypatch.setattr(grading._Grader, "grade", fail)
    students = [Submission(name, {NAME: ""}) for name in ("ada", "bob", "cid")]
    found = grading.grade(students, Settings(kind=SAME_USER), tell=tell)
    assert [found.points(name) for name in found.students] == [1, 0, 1]
    assert found.of("bob")[0].incidents == ("the grader failed: RecursionError: deep",)
    assert "ex01_rank_arithmetic: the grader failed: RecursionError: deep" in to_csv(found)


# -- Texts that do something --


def nasty_report() -> Report:
    name = f"{NASTY}\n=name"
    bad = Grade(
        name,
        f"{NAME}{NASTY}",
        FAILED,
        NOT_RUN,
        message=f"{NASTY}\n\tsecond line",
        remarks=(NASTY,),
        achieved=({NASTY: NASTY, "nan": float("nan"), "inf": [float("inf")], "big": 10**5000},),
        kind=NASTY,
        incidents=(NASTY,),
    )
    good = Grade("bob", bad.exercise, PASSED, PASSED, points=1)
    return report(bad, good, problems={name: [NASTY, "\n=2+3"]})


def test_nothing_nasty_reaches_a_reader(tmp_path):
    texts = written(nasty_report(), tmp_path)
    assert len(texts) == 5
    everything = [*texts.values(), summary(nasty_report())]
    everything += [str(json.loads(text)) for name, text in texts.items() if "json" in name]
    for text in everything:
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066\ud800-\udfff\ufffe]", text)
        assert "U000e0041" in text or "\U000e0041" not in text
    assert "\\x1b[2J" in texts["grades.csv"] and "\\xff" in texts["grades.csv"]
    root = ElementTree.fromstring(texts["grades.xml"].encode())
    assert "\\x1b[2J" in root.find("testsuite").get("name")
    assert "\n\tsecond line" in root.find(".//failure").text
    data = json.loads(texts["grades.json"], parse_constant=pytest.fail)
    assert data["grades"][0]["message"].endswith("\n\tsecond line")
    assert data["grades"][0]["achieved"][0]["nan"] == "nan"


def test_writers_do_not_ask_the_locale(tmp_path):
    polish = ascii("Żółć")
    program = (
        "import sys; from pathlib import Path; from tests.exercises.test_reports import *\n"
        "from minimegatron.commands import exercises as command\n"
        "for name in FORMS: write_report(nasty_report(), Path(sys.argv[1]) / name)\n"
        f"write_report(report(Grade({polish}, 'ex01')), Path(sys.argv[1]) / 'other.csv')\n"
        f"command._tell([], Grade({polish} + NASTY, 'ex01', PASSED))\n"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment |= {"PYTHONIOENCODING": "ascii:strict", "PYTHONPATH": str(ROOT)}
    asked = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(asked, env=environment, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"  \\u017b\\xf3\\u0142\\u0107\\x1b[2J")
    assert "Żółć" in (tmp_path / "other.csv").read_text(encoding="utf-8")


BEGINS = ("=", "+", "-", "@", "\t", "\r", "\uff1d")
FORMULA = "cmd|'/c calc'!A0"


@pytest.mark.parametrize("begin", BEGINS)
@pytest.mark.parametrize(
    "before", ["", " ", '"', "'", ' "', "x,", "x;", "x; ", "x\t", "x\n", 'x",']
)
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_no_cell_is_a_formula_whatever_separates_them(begin, before, separator):
    text = before + begin + FORMULA
    one = Grade(text, NAME, FAILED, remarks=(text,), incidents=(text,))
    table = to_csv(report(one, problems={text: [text, text]}))
    rows = list(csv.reader(io.StringIO(table)))
    assert len(rows) == 2 and len(rows[0]) == len(rows[1]) == 4
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        for row in csv.reader(io.StringIO(table), delimiter=separator, quoting=quoting):
            for cell in row:
                assert cell.lstrip(" \"'\u00a0")[:1] not in BEGINS or "'" in leading(cell), cell


def leading(cell: str) -> str:
    """What stands before the first character that matters."""
    return cell[: len(cell) - len(cell.lstrip(" \"'\u00a0"))]


def test_a_long_message_is_cut_and_says_so(tmp_path):
    long = "x" * (50 << 20)
    one = Grade(long, NAME, FAILED, message=long, remarks=(long,), incidents=(long,))
    texts = written(report(one, problems={long: [long]}), tmp_path)
    for name, text in texts.items():
        assert len(text) < 200_000, name
        assert re.search(r"\[cut here: 52,4\d\d,\d00 of 52,428,800 characters are left out\]", text)
    (row,) = list(csv.reader(io.StringIO(texts["grades.csv"])))[1:]
    assert max(map(len, row)) < 32_767


def test_many_items_are_cut_and_deep_ones_are_said():
    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    assert json.dumps(plain_text.data(deep)).count("[") < 50
    one = Grade("ada", NAME, PASSED, PASSED, 1, achieved=(deep,))
    assert len(json.loads(to_json(report(one)))["grades"]) == 1
    assert plain_text.data(list(range(5000)))[-1] == "[cut here: 4000 more]"
    assert plain_text.data({str(n): n for n in range(5000)})["[cut here]"] == "4000 more"
    many = report(*(Grade(f"s{n:05}", NAME) for n in range(3000)))
    assert len(json.loads(to_json(many))["grades"]) == 3000


def test_what_ranks_achieved_may_be_anything():
    odd = (7, None, [], "makespan", {"makespan": None}, {"makespan": "x"}, {"makespan": ""})
    grades = [Grade(str(n), NAME, PASSED, PASSED, 1, achieved=(x,)) for n, x in enumerate(odd)]
    grades.append(Grade("nan", NAME, PASSED, PASSED, 1, achieved=({"makespan": "nan"},)))
    grades.append(Grade("good", NAME, PASSED, PASSED, 1, achieved=({"makespan": "5 s"},)))
    assert summary(report(*grades)).splitlines()[-1].split() == ["1", "5", "good"]
    assert len(json.loads(to_json(report(*grades)))["grades"]) == 9


# -- Files --


def test_every_student_has_a_folder_of_their_own(tmp_path):
    names = [
        "a b",
        "a_b",
        "a/b",
        "A_B",
        "é",
        "e\u0301",
        "É",
        "ﬁ",
        "fi",
        "..",
        ".",
        "",
        "con",
        "NUL.x",
    ]
    names += [
        "x" * 300,
        "x" * 299 + "y",
        "../../etc",
        "=evil()",
        "trailing.",
        "ß",
        "SS",
        "-rf",
        "\udcff",
    ]
    folders = student_folders(names)
    assert set(folders) == set(names)
    same = {unicodedata.normalize("NFKC", one.casefold()) for one in folders.values()}
    assert len(same) == len(names)
    assert folders["a_b"] == "a_b" and folders["ß"] == "ß"
    assert student_folders(names[::-1])["a b"] == folders["a b"]
    for folder in folders.values():
        assert re.fullmatch(r"\w[\w.-]*", folder) and len(folder) < 90
        assert not re.fullmatch(r"(?i)(con|nul)(\..*)?", folder) and not folder.endswith(".")
    paths = write_report(report(*(Grade(name, NAME) for name in names)), tmp_path / "results.json")
    assert len(set(paths)) == len(names)
    assert all(path.is_file() and path.parent.parent == tmp_path for path in paths)


def test_formats_keep_their_form():
    right = Grade(
        "ada", NAME, PASSED, PASSED, 1, remarks=("a remark",), seconds=3, public_seconds=1
    )
    one = report(right, Grade("bob", NAME), problems={"bob": ["no file"]})
    assert to_csv(one) == (
        f"student,points,{NAME},remarks\nada,1,1,{NAME}: a remark\nbob,0,,no file\n"
    )
    root = ElementTree.fromstring(to_junit(one))
    assert [suite.attrib for suite in root] == [
        {"name": "ada", "tests": "1", "failures": "0", "skipped": "0"},
        {"name": "bob", "tests": "1", "failures": "0", "skipped": "1"},
    ]
    assert root.find(".//skipped").get("message") == NOT_SUBMITTED
    assert root.find(".//system-out").text == "a remark"
    assert to_junit(one).startswith("<?xml version='1.0' encoding='utf-8'?>\n<testsuites ")
    told = json.loads(to_gradescope(one, "bob"))
    assert told["score"] == 0 and told["output"].endswith("\nno file")
    assert json.loads(to_json(one))["grades"][0]["remarks"] == ["a remark"]
