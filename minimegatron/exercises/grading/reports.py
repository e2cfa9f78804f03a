"""Grades as files: CSV, JSON, JUnit's XML, and Gradescope's results.json.

Torch-free. Megatron has no counterpart.

CSV and JSON are the teacher's. JUnit and Gradescope are shown to students too: of hidden checks they
say only the kind of failure, and not how long they took.
"""

import contextlib
import csv
import errno
import hashlib
import io
import json
import math
import os
import re
import secrets
import stat
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.grading.collection import FILE, LINK, kind_of, reason
from minimegatron.exercises.grading.grade import (
    FAILED,
    NOT_RUN,
    NOT_SUBMITTED,
    PASSED,
    Grade,
    Report,
    Settings,
)
from minimegatron.exercises.grading.submissions import Submission
from minimegatron.exercises.room import plain_text

GRADESCOPE = "results.json"
MOST_FOLDER = 60
"""Characters of a folder's name."""
MOST_UNREAD = 20
"""Names of files that were not read, in the terminal."""
RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.I)
"""What Windows allows for no file."""


def stopped_report(
    done: Sequence[Grade],
    submissions: Sequence[Submission],
    wanted: Sequence[Exercise],
    settings: Settings,
) -> Report:
    """Of a class that was graded in part: of every other file, that it was not run."""
    grades = {(one.student, one.exercise): one for one in done}
    for one in submissions:
        for name in [exercise.name for exercise in wanted]:
            words = "Grading was stopped before this file was graded."
            rest = Grade(one.student, name)
            if name in one.sources:
                rest = replace(
                    rest, public=NOT_RUN, hidden=NOT_RUN, message=words, incidents=(words,)
                )
            grades.setdefault((one.student, name), rest)
    return Report(
        list(grades.values()),
        [one.student for one in submissions],
        [exercise.name for exercise in wanted],
        settings.seed,
        settings.kind or "not known, as grading was stopped",
        {one.student: list(one.problems) for one in submissions if one.problems},
    )


class NotWritten(OSError):
    """Some files could not be written where they belong; the message names each, a line for one."""

    def __init__(self, words: Sequence[str], written: Sequence[Path]):
        super().__init__("\n".join(words))
        self.written = list(written)
        """The others."""


def write_report(report: Report, path: Path, form: str = "") -> list[Path]:
    """Writes it in the form asked for, or the one that the name tells; returns the files.

    Gradescope's form holds one submission; with several, each gets a folder beside `path`. Whatever
    the locale, files are UTF-8. What cannot be written is written into a temporary file, and after
    all others NotWritten says where.
    """
    form = form or form_of(path)
    if form == "gradescope":
        texts = [to_gradescope(report, student) for student in report.students]
    else:
        texts = [WRITERS[form](report)]
    written, words = [], []
    for place, text in zip(_places(report.students, path, form), texts, strict=True):
        data = text.encode("utf-8", "backslashreplace")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _check_place(place, path)
            _replace(place, data)
            written.append(place)
        except OSError as error:
            words.append(f"{place} cannot be written: {reason(error)}; {_keep(place, data)}")
    if words:
        raise NotWritten(words, written)
    return written


def try_report(students: Sequence[str], path: Path, form: str = "") -> None:
    """Raises ValueError if the report could not be written now. Leaves nothing behind."""
    for place in _places(students, path, form or form_of(path)):
        try:
            _check_place(place, path)
            folder = next(one for one in place.parents if one.exists())
            with _new_file(folder):
                pass
        except OSError as error:
            raise ValueError(f"{place} cannot be written: {reason(error)}") from error


def _places(students: Sequence[str], path: Path, form: str) -> list[Path]:
    """The files of a report: one, or one for each student."""
    if form != "gradescope" or len(students) == 1:
        return [path]
    folders = student_folders(students)
    return [path.parent / folders[student] / path.name for student in students]


def _check_place(place: Path, path: Path) -> None:
    """Raises OSError if something is in the way.

    Where the teacher names a link (`/dev/stdout` is one), it is neither followed nor replaced. In a
    folder that may be a student's, a link is a file like any other, and is replaced.
    """
    if place != path and place.parent.is_symlink():
        raise OSError(errno.ELOOP, f"{place.parent} is a link; give FILE a folder of its own")
    try:
        kind = kind_of(place.lstat().st_mode)
    except FileNotFoundError:
        return
    if kind == LINK and place == path:
        raise OSError(errno.ELOOP, "it is a link; name the file itself")
    if kind not in (FILE, LINK):
        raise OSError(errno.EEXIST, f"it is {kind}")


def _replace(place: Path, data: bytes) -> None:
    """Puts a new file in the place of an old one, at once; what may read it stays as it was."""
    with _new_file(place.parent) as (new, file):
        if place.exists() and not place.is_symlink():
            os.fchmod(file, stat.S_IMODE(place.stat().st_mode) & 0o666)
        with open(file, "wb", closefd=False) as stream:
            stream.write(data)
        os.replace(new, place)


@contextlib.contextmanager
def _new_file(folder: Path) -> Iterator[tuple[Path, int]]:
    """A file for the length of a `with` block, unless it is moved elsewhere: its path and number."""
    new = folder / f".{secrets.token_hex(8)}.new"
    # Not by `tempfile`: others may read a report, if the user's files are so.
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield new, file
    finally:
        os.close(file)
        new.unlink(missing_ok=True)


def _keep(place: Path, data: bytes) -> str:
    """Writes what has no place into a temporary file; says where."""
    try:
        file, name = tempfile.mkstemp(f"-{place.name[-MOST_FOLDER:]}", "minimegatron-")
        with open(file, "wb") as stream:
            stream.write(data)
    except OSError as error:
        return f"nor can a temporary file: {reason(error)}"
    return f"it is in {name}"


def student_folders(students: Sequence[str]) -> dict[str, str]:
    """A folder's name for each student: different ones, on every file system.

    Some tell neither `Ada` from `ada` nor one spelling of an accent from the other. A name that had to
    be changed carries a number made from the whole name, so it is the same one every time.

    >>> student_folders(["a b", "a_b"])
    {'a_b': 'a_b', 'a b': 'a_b-c8687a08'}
    """
    folders: dict[str, str] = {}
    taken: set[str] = set()
    # Names that can stay as they are come first, so that no changed one takes their place.
    for student in sorted(students, key=lambda one: _folder_name(one) != one):
        name = wanted = _folder_name(student)
        digest = hashlib.sha256(student.encode("utf-8", "backslashreplace")).hexdigest()
        length = 8
        while name != student and length == 8 or _on_disk(name) in taken:
            name, length = f"{wanted}-{digest[:length]}", length + 8
        taken.add(_on_disk(name))
        folders[student] = name
    return folders


def _folder_name(student: str) -> str:
    """Letters, numbers and few signs."""
    name = re.sub(r"[^\w.-]", "_", student)[:MOST_FOLDER].strip(".-") or "student"
    return f"_{name}" if RESERVED.fullmatch(name) else name


def _on_disk(name: str) -> str:
    """The same for all names that some file system takes for one."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def form_of(path: Path) -> str:
    """csv, json, junit or gradescope. Raises ValueError for any other name."""
    if path.name == GRADESCOPE:
        return "gradescope"
    forms = {".csv": "csv", ".json": "json", ".xml": "junit"}
    if path.suffix not in forms:
        raise ValueError(
            f"{path}: end the name in .csv, .json or .xml (JUnit), or call it {GRADESCOPE} (Gradescope)"
        )
    return forms[path.suffix]


def to_csv(report: Report) -> str:
    """A row per student: the sum, the points of each exercise, and remarks."""
    rows = io.StringIO()
    table = csv.writer(rows, lineterminator="\n")
    header = ["student", "points", *report.exercises, "remarks"]
    table.writerow([plain_text.cell(one) for one in header])
    for student in report.students:
        grades = report.of(student)
        remarks = [
            f"{one.exercise}: {plain_text.line(remark)}"
            for one in grades
            for remark in (*one.remarks, *one.incidents)
        ]
        remarks += map(plain_text.line, report.problems.get(student, []))
        points = ["" if one.public == NOT_SUBMITTED else one.points for one in grades]
        cells = [student, report.points(student), *points, "; ".join(remarks)]
        table.writerow([plain_text.cell(one) for one in cells])
    return rows.getvalue()


def to_json(report: Report) -> str:
    """Everything."""
    # However many students there are, none is left out; only what is within a grade is cut.
    data = vars(report) | {
        "grades": [plain_text.data(vars(one)) for one in report.grades],
        "students": [plain_text.line(one) for one in report.students],
        "exercises": [plain_text.line(one) for one in report.exercises],
        "problems": {
            plain_text.line(student): plain_text.data(told)
            for student, told in report.problems.items()
        },
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def to_junit(report: Report) -> str:
    """A test suite per student, a test case per exercise."""
    root = ElementTree.Element("testsuites", name="minimegatron exercises")
    for student in report.students:
        grades, name = report.of(student), plain_text.line(student)
        suite = ElementTree.SubElement(root, "testsuite", name=name)
        for grade in grades:
            exercise = plain_text.line(grade.exercise)
            attributes = {"classname": name, "time": f"{grade.public_seconds:.3f}"}
            case = ElementTree.SubElement(suite, "testcase", name=exercise, **attributes)
            if grade.public == NOT_SUBMITTED:
                ElementTree.SubElement(case, "skipped", message=NOT_SUBMITTED)
            elif not grade.points:
                failure = ElementTree.SubElement(case, "failure", message=grade.words)
                failure.text = plain_text.text(grade.told)
            if grade.remarks:
                words = "\n".join(map(plain_text.line, grade.remarks))
                ElementTree.SubElement(case, "system-out").text = words
        skipped = sum(grade.public == NOT_SUBMITTED for grade in grades)
        failed = sum(not grade.points for grade in grades) - skipped
        counts = {"tests": len(grades), "failures": failed, "skipped": skipped}
        for key, count in counts.items():
            suite.set(key, str(count))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"


def to_gradescope(report: Report, student: str) -> str:
    """One submission as Gradescope reads it. Remarks are not in it: students see this."""
    tests = [_gradescope_test(grade) for grade in report.of(student)]
    output = "Not graded here: " + "; ".join(report.ungraded) + "."
    problems = map(plain_text.line, report.problems.get(student, []))
    data: dict[str, Any] = {
        "score": report.points(student),
        "output": "\n".join([output, *problems]),
        "tests": tests,
        "stdout_visibility": "hidden",
    }
    return json.dumps(data, indent=1) + "\n"


def _gradescope_test(grade: Grade) -> dict[str, Any]:
    return {
        "name": plain_text.line(grade.exercise),
        "score": grade.points,
        "max_score": 1,
        "status": "passed" if grade.points else FAILED,
        "output": "\n\n".join(filter(None, [grade.words, plain_text.text(grade.told)])),
        "output_format": "text",
        "visibility": "after_published",
    }


WRITERS: dict[str, Callable[[Report], str]] = {"csv": to_csv, "json": to_json, "junit": to_junit}


def summary(report: Report, unread: Sequence[str] = ()) -> str:
    """A few lines for the terminal. `unread`: names of what nobody looked at."""
    handed_in = [grade for grade in report.grades if grade.public != NOT_SUBMITTED]
    passed = sum(grade.points for grade in handed_in)
    only_public = sum(grade.public == PASSED and not grade.points for grade in handed_in)
    lines = [
        f"{len(report.students)} submissions, {len(handed_in)} files: {passed} passed the public and "
        f"the hidden checks, {only_public} the public ones only, "
        f"{len(handed_in) - passed - only_public} neither",
        f"hidden seed {report.seed}; each file ran in a cell of kind {report.isolation!r}",
        "not graded: " + "; ".join(report.ungraded),
    ]
    lines += _leaderboards(report)
    remarked = sum(bool(grade.remarks or grade.incidents) for grade in handed_in)
    if remarked:
        lines.append(f"{remarked} files have remarks: see the CSV or JSON")
    if report.problems:
        lines.append(
            f"{len(report.problems)} submissions could not be read as they are: see the CSV or JSON"
        )
    if unread:
        more = len(unread) - MOST_UNREAD
        names = ", ".join(map(plain_text.line, unread[:MOST_UNREAD]))
        lines.append(f"not read: {names}" + (f" and {more} more" if more > 0 else ""))
    return plain_text.text("\n".join(lines), plain_text.MOST_TEXT * 10)


def _leaderboards(report: Report) -> list[str]:
    """For exercises scored by the length of a step: the shortest first. In the terminal only."""
    lines = []
    for exercise in report.exercises:
        scores = []
        for done in report.grades:
            time = _makespans(done) if done.exercise == exercise else None
            if time is not None:
                scores.append((time, plain_text.line(done.student)))
        if scores:
            lines.append(f"{exercise}, by the sum of the steps' lengths:")
            lines += [
                f"  {n:2} {time:8g}  {who}" for n, (time, who) in enumerate(sorted(scores), 1)
            ]
    return lines


def _makespans(grade: Grade) -> float | None:
    """The sum over the cases; None if there are none, or they are no numbers."""
    try:
        times = [float(one["makespan"].split()[0]) for one in grade.achieved if "makespan" in one]
    except (TypeError, ValueError, AttributeError, IndexError, KeyError):
        return None
    total = sum(times)
    return total if times and math.isfinite(total) else None
