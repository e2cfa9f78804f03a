"""Thirty submissions, ten of them hostile or hanging: the grader ends, and the honest are graded right.

What hostile code tries is in `HOSTILE`. It runs in cells of the strongest kind this machine can make.
"""

import contextlib
import csv
import io
import json
import os
import socket
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minimegatron.__main__ import main
from minimegatron.exercises.catalog import find
from minimegatron.exercises.engine import Sheet
from minimegatron.exercises.grading import cell
from minimegatron.exercises.grading.cell import NAMESPACES, OTHER_USER, SAME_USER, Limits
from minimegatron.exercises.grading.cells import Cell, CellEnded, Template
from minimegatron.exercises.grading.grade import (
    FAILED,
    NOT_RUN,
    NOT_SUBMITTED,
    PASSED,
    Settings,
    grade,
)
from minimegatron.exercises.grading.reports import form_of, summary, to_csv, to_junit, write_report
from minimegatron.exercises.grading.submissions import find_submissions
from minimegatron.exercises.verdict import Verdict
from tests.figures import figure, slowness

ROOT = Path(__file__).parents[2]
FIRST, RANKED = find("ex01"), find("ex13")
SOLUTION = (FIRST.folder / "solution.py").read_text()
BODY = "\n\ndef coordinates(*args, **kwargs):\n    attack()\n\n\nget_ranks = coordinates\n"
SLEEPER = "minimegatron-test-sleeper"

HOSTILE = {
    "loop": "    while True:\n        pass\n",
    "sleep": "    import time\n    time.sleep(1000)\n",
    "fork bomb": "    while True:\n        os.fork()\n",
    "exit": "    os._exit(0)\n",
    "flood": "    while True:\n        os.write(1, b'passed ' * 100_000)\n",
    "kill": "    import signal\n    for pid in (os.getppid(), -1):\n"
    "        os.kill(pid, signal.SIGKILL)\n",
    "memory": "    kept = []\n    while True:\n"
    "        kept.append(bytearray(os.urandom(1 << 20) * 64))\n",
    "write": "    for folder in FOLDERS:\n        for name in ('evil', '../evil'):\n            try:\n"
    "                open(os.path.join(folder, name), 'w').write('evil')\n"
    "            except OSError:\n                pass\n    os._exit(0)\n",
    "daemon": "    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
    "            os.execvp('sh', ['sh', '-c', ': SLEEPER; sleep 997; touch FOLDERS0/late'])\n"
    "    os._exit(0)\n",
    "forge": "    import gc, json\n    for folder in range(3, 64):\n        try:\n"
    '            os.write(folder, b\'{"kind": "passed", "text": ""}\\n\')\n'
    "        except OSError:\n            pass\n"
    "    import minimegatron.exercises.room as room\n"
    "    room.Wrong.__init__ = lambda *_: os._exit(0)\n    return 1\n",
}
# With 45 processes ready on two processors, an honest one was not over after 25 s.
LIMITS = Limits(seconds=90, memory_bytes=2 << 30)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("grading")
    found = {name: base / name for name in ("submissions", "teacher")}
    for path in found.values():
        path.mkdir()
    (found["teacher"] / "exam.txt").write_text("secret")
    return found


@pytest.fixture(scope="module")
def expected(folders) -> dict[str, tuple[str, str]]:
    """Writes the submissions; student -> (public, hidden) of the honest ones."""
    base, found = folders["submissions"], {}
    wrong = sorted((ROOT / "tests/exercises/wrong" / FIRST.name).glob("*.py"))
    for number in range(12):
        found[f"right{number:02}"] = submit(base, f"right{number:02}", FIRST, SOLUTION + "# mine\n")
    for number in range(3):
        text = wrong[number % len(wrong)].read_text()
        found[f"wrong{number}"] = submit(base, f"wrong{number}", FIRST, text, FAILED, NOT_RUN)
    stub = (FIRST.folder / "stub.py").read_text()
    found["stub"] = submit(base, "stub", FIRST, stub, FAILED, NOT_RUN)
    found["syntax"] = submit(base, "syntax", FIRST, "def coordinates(:\n", FAILED, NOT_RUN)
    ranked = (RANKED.folder / "solution.py").read_text()
    found["ranked"] = submit(base, "ranked", RANKED, ranked)
    (base / "empty").mkdir()
    with zipfile.ZipFile(base / "zipped.zip", "w") as archive:
        archive.writestr(f"deep/inside/{FIRST.name}.py", SOLUTION)
        archive.writestr("../../outside.py", "evil")
        archive.writestr("submission/.minimegatron.json", "{}")
    found["zipped"] = (PASSED, PASSED)
    places = [str(path) for path in folders.values()]
    places += [str(ROOT), str(Path.home()), "/tmp", "/var/tmp", "/etc", "/dev/shm"]
    for name, attack in HOSTILE.items():
        text = attack.replace("FOLDERS0", places[0]).replace("SLEEPER", SLEEPER)
        source = f"import os\n\nFOLDERS = {places!r}\n\n\ndef attack():\n{text}{BODY}"
        submit(base, f"hostile {name}", FIRST, source)
    return found


def submit(base: Path, student: str, exercise, text: str, *states: str) -> tuple[str, str]:
    (base / student).mkdir()
    (base / student / f"{exercise.name}.py").write_text(text)
    return states or (PASSED, PASSED)


def everything(folders) -> dict[str, tuple]:
    """What hostile code could change, as far as one can look."""
    seen = {}
    for root in (*folders.values(), ROOT / "minimegatron/exercises/grading"):
        for path in root.rglob("*"):
            if "__pycache__" not in path.parts:
                seen[str(path)] = (
                    path.lstat().st_mode,
                    path.lstat().st_size,
                    path.lstat().st_mtime,
                )
    for folder in ("/tmp", "/var/tmp", "/etc", "/dev/shm", Path.home(), ROOT):
        for name in ("evil", "late", "../evil"):
            seen[f"{folder}/{name}"] = os.path.lexists(f"{folder}/{name}")
    return seen


@pytest.fixture(scope="module")
def outcome(folders, expected):
    before = everything(folders)
    began = time.monotonic()
    submissions = find_submissions(folders["submissions"])
    hidden = tuple(map(str, folders.values()))
    settings = Settings(seed=41, jobs=2, patience=2.0, limits=LIMITS, hidden=hidden)
    report = grade(submissions, settings)
    took = time.monotonic() - began
    return report, took, before, everything(folders)


def test_all_thirty_are_graded_and_it_ends(outcome):
    report, took, _, _ = outcome
    assert len(report.students) == 30
    assert report.isolation in (NAMESPACES, OTHER_USER)
    figure(f"{took:.0f} s for 30 submissions in cells of kind {report.isolation!r}")
    # 45 s on two free cores. A hostile one ends with its exercise, or by the limit.
    assert took < (60 + len(HOSTILE) * 25) * slowness()


def test_the_honest_are_graded_right(outcome, expected):
    report, *_ = outcome
    assert len(expected) >= 19
    for student, (public, hidden) in expected.items():
        done = next(g for g in report.of(student) if g.public != NOT_SUBMITTED)
        assert (done.public, done.hidden) == (public, hidden), f"{student}: {done}"
        assert done.points == (hidden == PASSED)
    assert report.points("empty") == 0
    assert all(grade.public == NOT_SUBMITTED for grade in report.of("empty"))


@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_one_gets_a_point(name, outcome):
    report, *_ = outcome
    done = report.of(f"hostile {name}")[0]
    assert done.points == 0 and done.public == FAILED
    assert done.message


def test_nothing_outside_has_changed(outcome, folders):
    _, _, before, after = outcome
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not changed
    assert (folders["teacher"] / "exam.txt").read_text() == "secret"


def test_nothing_is_left_running(outcome):
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
    return cell._uid(pid) in strangers or SLEEPER.encode() in command


def test_a_solution_is_remarked_on(outcome):
    report, *_ = outcome
    remarks = report.of("right00")[0].remarks
    assert "the same code as the reference solution" in remarks


def test_reports_say_no_more_than_is_known(outcome, tmp_path):
    report, *_ = outcome
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert len(rows) == 30
    points = {row["student"]: row["points"] for row in rows}
    assert points["right00"] == "1" and points["hostile loop"] == points["stub"] == "0"
    assert next(row for row in rows if row["student"] == "empty")[FIRST.name] == ""
    (path,) = write_report(report, tmp_path / "grades.json")
    data = json.loads(path.read_text())
    assert data["seed"] == 41 and "whether the student can explain it" in data["ungraded"]
    root = ElementTree.fromstring(to_junit(report))
    assert len(root.findall("testsuite")) == 30
    assert len(root.findall(".//failure")) == 30 - 1 - sum(p == "1" for p in points.values())
    paths = write_report(report, tmp_path / "scope" / "results.json")
    assert len(paths) == 30
    one = json.loads((tmp_path / "scope" / "right00" / "results.json").read_text())
    assert one["score"] == 1 and one["tests"][0]["status"] == "passed"
    assert one["tests"][0]["output"] == "public checks passed, hidden checks passed"
    assert "Not graded here: whether the student can explain it" in one["output"]
    assert "reference solution" not in json.dumps(one)
    assert "not graded: whether the student can explain it" in summary(report)


def test_whoever_has_the_shortest_step_leads(outcome):
    report, *_ = outcome
    achieved = ({"case": "a", "makespan": "30"}, {"case": "b", "makespan": "12"})
    slow = replace(report.of("right00")[0], achieved=achieved)
    quick = replace(slow, student="zoe", achieved=({"case": "a", "makespan": "40"},))
    text = summary(replace(report, grades=[slow, quick], students=["right00", "zoe"]))
    board = text.partition("by the sum of the steps' lengths:\n")[2].splitlines()[:2]
    assert [line.split() for line in board] == [["1", "40", "zoe"], ["2", "42", "right00"]]
    assert "makespan" not in to_csv(report)


def test_a_name_cannot_become_a_formula_or_a_path(outcome, tmp_path):
    report, *_ = outcome
    renamed = [replace(done, student="=evil()/../x") for done in report.of("right00")]
    small = replace(report, grades=renamed, students=["=evil()/../x", "y"])
    assert to_csv(small).splitlines()[1].startswith("'=evil()")
    paths = write_report(small, tmp_path / "results.json")
    assert all(path.parent.parent == tmp_path for path in paths)


# -- One cell at a time --


@pytest.fixture(scope="module")
def template():
    with Template() as running:
        yield running


def open_cell(template, kind: str, source: str, number: int = 900) -> Cell:
    room = {"kind": kind, "number": number, "limits": vars(LIMITS), "hidden": []}
    return template.cell(room, f"{FIRST.name}.py", source, LIMITS.seconds)


def ask(template, kind: str, source: str) -> Verdict:
    """The public check's verdict on a file in a cell of its own."""
    sheet = Sheet(FIRST, seed=0)
    (question,) = sheet.questions
    with open_cell(template, kind, source) as one:
        sheet.judge(0, one.collect(question, patience=2.0))
    return sheet.verdict()


@pytest.mark.parametrize("kind", (NAMESPACES, OTHER_USER, SAME_USER))
def test_every_kind_of_cell_checks_and_ends(kind, template):
    if kind != SAME_USER and os.getuid() != 0:
        pytest.skip("only root can make this kind everywhere")
    if kind == OTHER_USER and "root" in Path(sys.base_prefix).parts:
        pytest.skip("Python itself lies where no other user may look")
    assert ask(template, kind, SOLUTION).has_passed
    daemon = HOSTILE["daemon"].replace("SLEEPER", SLEEPER).replace("FOLDERS0", "/tmp")
    with contextlib.suppress(CellEnded):
        ask(template, kind, f"import os\n\n\ndef attack():\n{daemon}{BODY}")
    test_nothing_is_left_running(None)


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


def test_closing_the_connection_ends_a_cell(template):
    source = f"import os\n\n\ndef attack():\n{HOSTILE['sleep']}{BODY}"
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
