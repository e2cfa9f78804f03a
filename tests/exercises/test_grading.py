"""A class is graded: the grader ends, the honest are graded right, nobody else gains by a trick.

The students are in `class_of_sixty`. What they hand in runs in cells of the strongest kind that this
machine can make.
"""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minimegatron.__main__ import main
from minimegatron.exercises.check.engine import Sheet
from minimegatron.exercises.exercise import exercises, find
from minimegatron.exercises.grading import cell, cells
from minimegatron.exercises.grading.cell import NAMESPACES, OTHER_USER, SAME_USER, Limits
from minimegatron.exercises.grading.cells import NUM_ROOMS, Cell, CellEnded, Template
from minimegatron.exercises.grading.grade import (
    FAILED,
    NOT_RUN,
    NOT_SUBMITTED,
    PASSED,
    Grade,
    Report,
    Settings,
    _kept_back,
    _solutions,
    grade,
)
from minimegatron.exercises.grading.remarks import SAME_CODE
from minimegatron.exercises.grading.reports import form_of, summary, to_csv, to_junit, write_report
from minimegatron.exercises.grading.submissions import find_submissions
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.verdict import Verdict
from tests.exercises.class_of_sixty import (
    ATTACKS,
    BODY,
    DOZEN,
    HONEST,
    HOSTILE,
    PLACES,
    SLEEPER,
    WRONG,
    Student,
    attacker,
    everybody,
)
from tests.exercises.wrong_solutions import wrong_solutions
from tests.figures import figure, slowness

ROOT = Path(__file__).parents[2]
FIRST = find("ex01")
SOLUTION = (FIRST.folder / "solution.py").read_text()
# With 45 processes ready on two processors, an honest one was not over after 25 s.
LIMITS = Limits(seconds=90, memory_bytes=2 << 30)


class Outcome:
    """What came of a class."""

    def __init__(self, base: Path, students: list[Student]):
        self.students, self.base = students, base
        for name in ("submissions", "teacher"):
            (base / name).mkdir()
        (base / "teacher/exam.txt").write_text("secret")
        for student in students:
            student.hand_in(base / "submissions")
        self.before, began = self.everything(), time.monotonic()
        found = find_submissions(base / "submissions")
        hidden = (str(base / "submissions"), str(base / "teacher"))
        self.report = grade(found, Settings(41, jobs=2, patience=2.0, limits=LIMITS, hidden=hidden))
        self.seconds, self.after = time.monotonic() - began, self.everything()

    def of(self, kind: str) -> list[tuple[Student, Grade]]:
        """The students of a kind, and the grade of what each handed in."""
        found = [(one, self.report.of(one.name)) for one in self.students if one.kind == kind]
        return [(one, next(g for g in all if g.exercise == one.exercise)) for one, all in found]

    def everything(self) -> dict[str, tuple]:
        """What hostile code could change, as far as one can look."""
        seen = {}
        for root in (self.base, ROOT / "minimegatron/exercises/grading"):
            for path in root.rglob("*"):
                if "__pycache__" not in path.parts:
                    status = path.lstat()
                    seen[str(path)] = (status.st_mode, status.st_size, status.st_mtime)
        for folder in PLACES:
            for name in ("evil", "late", "../evil"):
                seen[f"{folder}/{name}"] = os.path.lexists(f"{folder}/{name}")
        return seen


# A class of sixty may take longer than any one test: see `test_everybody_has_a_row_and_it_ends`.
SIXTY = pytest.param("sixty", marks=[pytest.mark.full, pytest.mark.timeout(1800)])


@pytest.fixture(scope="module", params=["dozen", SIXTY])
def outcome(request, tmp_path_factory) -> Outcome:
    students = everybody()
    if request.param == "dozen":
        students = [one for one in students if one.name in DOZEN]
        assert len(students) == len(DOZEN)
    return Outcome(tmp_path_factory.mktemp("grading"), [*students, *ordinary()])


def ordinary() -> list[Student]:
    """Who did nothing, or has got it wrong."""
    texts = {
        "wrong": wrong_solutions(FIRST)[0].text,
        "stub": (FIRST.folder / "stub.py").read_text(),
    }
    students = [
        Student(name, WRONG, lambda base, name=name, text=text: hand_in(base, name, text))
        for name, text in texts.items()
    ]
    return [*students, Student("empty", "nothing", lambda base: (base / "empty").mkdir())]


def hand_in(base: Path, name: str, text: str) -> None:
    (base / name).mkdir()
    (base / name / f"{FIRST.name}.py").write_text(text)


def test_everybody_has_a_row_and_it_ends(outcome):
    report, num_students = outcome.report, len(outcome.students)
    assert sorted(report.students) == sorted(one.name for one in outcome.students)
    assert report.isolation in (NAMESPACES, OTHER_USER)
    figure(
        f"{outcome.seconds:.0f} s for {num_students} students in cells of kind {report.isolation!r}"
    )
    # A hostile one ends with its exercise, or by the limit.
    num_hostile = len(outcome.of(HOSTILE))
    assert outcome.seconds < (60 + 4 * num_students + 25 * num_hostile) * slowness()


def test_the_honest_have_full_points_and_no_remark(outcome):
    for student, done in outcome.of(HONEST):
        assert (done.public, done.hidden, done.points) == (PASSED, PASSED, 1), done
        assert not done.remarks and not done.incidents, done
        known = ("with others",)  # other files lie beside this one's, and that is told
        assert student.name in known or student.name not in outcome.report.problems


def test_nobody_else_gains_by_a_trick(outcome):
    for kind in ("broken", "hostile", "cheat"):
        assert outcome.of(kind)
        for student, done in outcome.of(kind):
            assert done.points == 0 or done.remarks, f"{student.name}: {done}"
            problems = outcome.report.problems.get(student.name, ())
            assert done.message or done.remarks or problems, f"{student.name}: {done}"
    for student, done in outcome.of(HOSTILE):
        assert (done.points, done.public) == (0, FAILED) and done.message, student.name


def test_who_did_nothing_has_no_points(outcome):
    for _, done in outcome.of(WRONG):
        assert (done.public, done.hidden, done.points) == (FAILED, NOT_RUN, 0)
        assert not done.remarks
    assert outcome.report.points("empty") == 0
    assert all(grade.public == NOT_SUBMITTED for grade in outcome.report.of("empty"))


def test_nothing_outside_has_changed(outcome):
    before, after = outcome.before, outcome.after
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not changed
    assert (outcome.base / "teacher/exam.txt").read_text() == "secret"


def test_nothing_is_left_running(outcome):
    nothing_is_left()


def nothing_is_left() -> None:
    strangers = range(cell.STRANGER, cell.STRANGER + 1000)
    deadline = time.monotonic() + 10
    while (left := [pid for pid in cell._all_pids() if is_left(pid, strangers)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert not left


def is_left(pid: int, strangers: range) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    if SLEEPER.encode() in command:
        return True
    return cell._uid(pid) in strangers and not is_in_another_grading(pid)


def is_in_another_grading(pid: int) -> bool:
    """Whether a grading that is not this test's still has the process: others may run beside."""
    templates = []
    while pid > 1 and pid != os.getpid():
        with contextlib.suppress(OSError):
            templates += [b"grading.template" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        pid = cell._parent(pid)
    return pid != os.getpid() and any(templates)


def test_a_solution_is_remarked_on(outcome):
    for student, done in outcome.of("cheat"):
        if student.name == "cheat the solution as it is":
            assert done.points == 1 and done.remarks == (SAME_CODE,)


def test_reports_say_no_more_than_is_known(outcome, tmp_path):
    report, num_students = outcome.report, len(outcome.students)
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert len(rows) == num_students
    points = {row["student"]: row["points"] for row in rows}
    assert points["honest ex01"] == "1" and points["hostile forge"] == points["stub"] == "0"
    assert next(row for row in rows if row["student"] == "empty")[FIRST.name] == ""
    (path,) = write_report(report, tmp_path / "grades.json")
    data = json.loads(path.read_text())
    assert data["seed"] == 41 and "whether the student can explain it" in data["ungraded"]
    root = ElementTree.fromstring(to_junit(report))
    assert len(root.findall("testsuite")) == num_students
    num_failed = sum(g.points == 0 and g.public != NOT_SUBMITTED for g in report.grades)
    assert len(root.findall(".//failure")) == num_failed
    paths = write_report(report, tmp_path / "scope" / "results.json")
    assert len(paths) == num_students
    own = next(path for path in paths if path.parent.name.startswith("honest_ex01-"))
    one = json.loads(own.read_text())
    assert one["score"] == 1 and one["tests"][0]["status"] == "passed"
    assert one["tests"][0]["output"] == "public checks passed, hidden checks passed"
    assert "Not graded here: whether the student can explain it" in one["output"]
    assert "not graded: whether the student can explain it" in summary(report)


def test_whoever_has_the_shortest_step_leads(outcome):
    achieved = ({"case": "a", "makespan": "30"}, {"case": "b", "makespan": "12"})
    slow = replace(outcome.report.of("honest ex01")[0], student="right00", achieved=achieved)
    quick = replace(slow, student="zoe", achieved=({"case": "a", "makespan": "40"},))
    text = summary(replace(outcome.report, grades=[slow, quick], students=["right00", "zoe"]))
    board = text.partition("by the sum of the steps' lengths:\n")[2].splitlines()[:2]
    assert [line.split() for line in board] == [["1", "40", "zoe"], ["2", "42", "right00"]]
    assert "makespan" not in to_csv(outcome.report)


def test_a_name_cannot_become_a_formula_or_a_path(tmp_path):
    name = "=evil()/../x"
    done = Grade(name, FIRST.name, PASSED, PASSED, points=1)
    small = Report([done], [name, "y"], [FIRST.name], 41, NAMESPACES)
    assert to_csv(small).splitlines()[1].startswith("'=evil()")
    paths = write_report(small, tmp_path / "results.json")
    assert all(path.parent.parent == tmp_path for path in paths)


# -- One cell at a time --


@pytest.fixture(scope="module")
def template():
    with Template() as running:
        yield running


def open_cell(
    template, kind: str, source: str, number: int = 900, limits: Limits = LIMITS, **more: object
) -> Cell:
    room = {"kind": kind, "number": number, "limits": vars(limits), "hidden": [], "emptied": []}
    room |= more
    return template.cell(room, f"{FIRST.name}.py", source, limits.seconds)


def ask(template, kind: str, source: str, **room) -> Verdict:
    """The public check's verdict on a file in a cell of its own."""
    sheet = Sheet(FIRST, seed=0)
    (question,) = sheet.questions
    with open_cell(template, kind, source, **room) as one:
        sheet.judge(0, one.collect(question, patience=2.0))
    return sheet.verdict()


@pytest.mark.parametrize("kind", (NAMESPACES, SAME_USER))
def test_every_kind_of_cell_checks_and_ends(kind, template):
    if kind != SAME_USER and os.getuid() != 0:
        pytest.skip("only root can make this kind everywhere")
    assert ask(template, kind, SOLUTION).has_passed
    daemon = ATTACKS["daemon"].replace("SLEEPER", SLEEPER).replace("FOLDERS0", "/tmp")
    with contextlib.suppress(CellEnded):
        ask(template, kind, f"import os\n\n\ndef attack():\n{daemon}{BODY}")
    nothing_is_left()


GRADER_UID = 60_990


@pytest.mark.parametrize(
    ("uid", "asked", "kinds"),
    [
        (0, OTHER_USER, [OTHER_USER]),
        (GRADER_UID, "", [NAMESPACES]),
        pytest.param(GRADER_UID, SAME_USER, [SAME_USER], marks=pytest.mark.full),
        pytest.param(GRADER_UID, OTHER_USER, [], marks=pytest.mark.full),
    ],
    ids=["root, other user", "a user", "a user, same user", "a user, other user"],
)
def test_graders_of_every_kind(uid, asked, kinds):
    """By root in cells of a stranger; and by a user who is not root."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        done = graded_by(uid, asked, base)
    finally:
        shutil.rmtree(base)
    if not kinds or (not asked and done.returncode != 0):
        # Some systems let nobody but root make namespaces; then it says so.
        assert done.returncode != 0 and "the grader is not root" in done.stderr
        return
    report = json.loads(done.stdout)
    assert report["isolation"] in kinds
    points = {grade["student"]: grade["points"] for grade in report["grades"]}
    assert points == {"ada": 1, "bob": 0}
    nothing_is_left()


def graded_by(uid: int, kind: str, base: Path) -> subprocess.CompletedProcess:
    """What comes of one honest and one hostile file."""
    base.chmod(0o755)
    hand_in(base, "ada", SOLUTION)
    hand_in(base, "bob", attacker("daemon", (str(base),)))
    command = [sys.executable, "-m", "tests.exercises.as_user", str(base), str(uid), kind]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200 * slowness(), cwd=ROOT
    )


def test_a_cell_sees_no_other_process_no_file_and_no_network(template, tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can make this kind everywhere")
    (tmp_path / "other.txt").write_text("another student's")
    with socket.create_server(("127.0.0.1", 0)) as server:
        look = (
            "    import socket\n"
            "    said = [len([name for name in os.listdir('/proc') if name.isdigit()])]\n"
            f"    said.append(os.path.exists({str(tmp_path / 'other.txt')!r}))\n"
            "    said += [os.getuid(), os.access('/etc', os.W_OK)]\n"
            f"    there = ('127.0.0.1', {server.getsockname()[1]})\n"
            "    said.append(socket.socket().connect_ex(there) == 0)\n"
            "    raise RuntimeError(f'saw {said}')\n"
        )
        found = ask(template, NAMESPACES, f"import os\n\n\ndef attack():\n{look}{BODY}")
    text = found.text
    seen = json.loads(text[text.index("saw [") + 4 : text.index("]") + 1].lower())
    num_processes, sees_file, uid, may_write, reaches = seen
    assert num_processes <= 4 and uid == cell.STRANGER + 900
    assert not sees_file and not may_write and not reaches


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("def coordinates(self, rank)\n    return 1\n", verdict.SYNTAX, "py:1: expected ':'"),
        ("x = " + "(" * 5000 + ")" * 5000, verdict.SYNTAX, "too many nested parentheses"),
        ("def coordinates():\n    0\n", verdict.MISSING, "no longer defines `get_ranks`"),
        ("import my_helpers\ncoordinates = get_ranks = 1\n", verdict.RAISED, "checked alone"),
        ("coordinates = get_ranks = 1\nprint('x' * (20 << 20))\n", verdict.RAISED, "TypeError"),
    ],
)
def test_in_a_cell_as_at_home_it_is_the_students_mistake(source, kind, words, template):
    found = ask(template, SAME_USER, source)
    assert found.kind == kind and words in found.text and len(found.text) < 20_000
    assert "minimegatron/exercises" not in found.text


FILL = """
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "/home"):
        for number in range(5):
            try:
                with open(f"{folder}/{number}", "wb") as file:
                    sizes.append(file.write(bytes(15 << 20)))
            except OSError:
                pass
    raise RuntimeError(f"wrote {sum(sizes) >> 20} MiB")
"""
SEE = """
    seen = []
    for folder in sys.path:
        for name in ("tests", ".git", "minimegatron/exercises/catalog/CATALOGUE/__pycache__"):
            for file in glob.glob(f"{folder}/{name}/**", recursive=True):
                is_read = "solution." in file or "catalog" not in file
                if is_read and os.path.isfile(file) and os.path.getsize(file):
                    seen.append(file)
    raise RuntimeError(f"saw {len(seen)} files {seen[:1]}")
""".replace("CATALOGUE", FIRST.name)
UNSHARE = """
    import ctypes
    if (child := os.fork()) == 0:
        os._exit(1) if ctypes.CDLL(None).unshare(0x10000000) else time.sleep(20)
    os.waitpid(child, 0)
    raise RuntimeError("this system does not let it")
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (FILL, r"wrote (\d|[1-5]\d|6[0-4]) MiB"),
        (SEE, r"saw 0 files \[\]"),
        (UNSHARE, "it made a user namespace of its own|this system does not let it"),
    ],
    ids=["fill", "see", "unshare"],
)
def test_a_closed_room(body, words, template):
    if os.getuid() != 0:
        pytest.skip("only root can make this kind everywhere")
    compiled = FIRST.folder / "__pycache__" / "solution.cpython-0.pyc"
    compiled.parent.mkdir(exist_ok=True)
    compiled.write_text("x")
    try:
        hidden = {"hidden": list(_kept_back()), "emptied": [*_solutions(), str(compiled)]}
        source = f"import glob, os, sys, time\nsizes = []\n\n\ndef attack():{body}{BODY}"
        try:
            said = ask(template, NAMESPACES, source, **hidden).text
        except CellEnded as ended:
            said = str(ended)
    finally:
        compiled.unlink()
    assert re.search(words, said), said


def test_what_cells_do_not_see():
    emptied = {Path(name).relative_to(FIRST.folder.parent).parts[0] for name in _solutions()}
    assert emptied == {exercise.folder.name for exercise in exercises()}
    assert str(ROOT / "tests") in _kept_back()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no such files")
def test_memory_in_files_without_a_folder_counts(template):
    source = f"import os\n\n\ndef attack():\n{ATTACKS['memory in files']}{BODY}"
    (question,) = Sheet(FIRST, seed=0).questions
    limits = replace(LIMITS, memory_bytes=256 << 20)
    told = pytest.raises(CellEnded, match="it used .* MiB of memory; 256 are allowed")
    with open_cell(template, SAME_USER, source, 2, limits) as one, told:
        one.collect(question, patience=20.0)


def test_two_gradings_share_no_user(monkeypatch):
    class Claims(Template):
        def __init__(self) -> None:
            self.claim_users()

    first, second = Claims(), Claims()
    assert abs(first._first_number - second._first_number) >= NUM_ROOMS
    monkeypatch.setattr(cells, "MOST_GRADINGS", 0)
    with pytest.raises(ValueError, match="0 gradings go on here already"):
        Claims()


def test_closing_the_connection_ends_a_cell(template):
    source = f"import os\n\n\ndef attack():\n{ATTACKS['sleep']}{BODY}"
    (question,) = Sheet(FIRST, seed=0).questions
    with open_cell(template, SAME_USER, source, 1) as one:
        one._connection.settimeout(2.0)
        with pytest.raises(CellEnded, match="cannot be reached"):
            one.collect(question, patience=20.0)
    deadline = time.monotonic() + 10
    while (left := children_of(template._process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def children_of(pid: int) -> list[int]:
    return [one for one in cell._all_pids() if cell._parent(one) == pid]


# -- The command --


def test_what_cannot_be_graded_is_refused(tmp_path, capsys):
    assert main(["exercises", "grade", str(tmp_path / "none"), "--out", "x.csv"]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["exercises", "grade", str(tmp_path), "--out", "x.csv"]) == 2
    assert "holds neither folders nor zip files" in capsys.readouterr().err
    assert main(["exercises", "grade", str(tmp_path), "--out", "x.doc"]) == 2
    assert "end the name in .csv, .json or .xml" in capsys.readouterr().err
    assert form_of(Path("a/results.json")) == "gradescope"


def test_submissions_are_read_with_care(tmp_path):
    (tmp_path / "linked").mkdir()
    (tmp_path / "target.py").write_text("x")
    (tmp_path / "linked" / f"{FIRST.name}.py").symlink_to(tmp_path / "target.py")
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "ex01.py").write_text("#" * (2 << 20))
    (tmp_path / "broken.zip").write_bytes(b"PK no zip")
    (tmp_path / "twice" / "old").mkdir(parents=True)
    (tmp_path / "twice" / "ex01.py").write_text("new")
    (tmp_path / "twice" / "old" / "ex01.py").write_text("old")
    (tmp_path / "target.py").unlink()
    found = {one.student: one for one in find_submissions(tmp_path)}
    assert set(found) == {"linked", "big", "broken", "twice"}
    assert not found["linked"].sources and not found["big"].sources
    assert "2097152 bytes" in found["big"].problems[0]
    assert "cannot be opened" in found["broken"].problems[0]
    assert found["twice"].sources == {FIRST.name: "new"}
