"""Grades as files: CSV, JSON, JUnit's XML, and Gradescope's results.json.

Called by: `minimegatron exercises grade`. Calls: `grade` for the data. Torch-free. Megatron has no
counterpart.
"""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from minimegatron.exercises.grading.grade import FAILED, NOT_SUBMITTED, Grade, Report

GRADESCOPE = "results.json"


def write_report(report: Report, path: Path, form: str = "") -> list[Path]:
    """Writes it in the form asked for, or the one that the name tells; returns the files.

    Gradescope's form holds one submission; with several, each gets a folder beside `path`.
    """
    form = form or form_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if form != "gradescope":
        path.write_text(WRITERS[form](report))
        return [path]
    if len(report.students) == 1:
        path.write_text(to_gradescope(report, report.students[0]))
        return [path]
    paths = []
    for student in report.students:
        paths.append(path.parent / re.sub(r"[^\w.-]", "_", student) / path.name)
        paths[-1].parent.mkdir(exist_ok=True)
        paths[-1].write_text(to_gradescope(report, student))
    return paths


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
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["student", "points", *report.exercises, "remarks"])
    for student in report.students:
        grades = report.of(student)
        remarks = [f"{one.exercise}: {remark}" for one in grades for remark in one.remarks]
        remarks += report.problems.get(student, [])
        points = ["" if one.public == NOT_SUBMITTED else one.points for one in grades]
        cells = [student, report.points(student), *points, "; ".join(remarks)]
        # A spreadsheet would run a cell that begins like a formula.
        table.writerow([f"'{x}" if str(x)[:1] in tuple("=+-@") else x for x in cells])
    return text.getvalue()


def to_json(report: Report) -> str:
    """Everything."""
    return json.dumps(report.to_dict(), indent=1) + "\n"


def to_junit(report: Report) -> str:
    """A test suite per student, a test case per exercise."""
    root = ElementTree.Element("testsuites", name="minimegatron exercises")
    for student in report.students:
        grades = report.of(student)
        suite = ElementTree.SubElement(root, "testsuite", name=_clean(student))
        for grade in grades:
            attributes = {"classname": _clean(student), "time": f"{grade.seconds:.3f}"}
            case = ElementTree.SubElement(suite, "testcase", name=grade.exercise, **attributes)
            if grade.public == NOT_SUBMITTED:
                ElementTree.SubElement(case, "skipped", message=NOT_SUBMITTED)
            elif not grade.points:
                failure = ElementTree.SubElement(case, "failure", message=grade.words)
                failure.text = _clean(grade.message)
            if grade.remarks:
                ElementTree.SubElement(case, "system-out").text = _clean("\n".join(grade.remarks))
        skipped = sum(grade.public == NOT_SUBMITTED for grade in grades)
        failed = sum(not grade.points for grade in grades) - skipped
        counts = {"tests": len(grades), "failures": failed, "skipped": skipped}
        for name, count in counts.items():
            suite.set(name, str(count))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def to_gradescope(report: Report, student: str) -> str:
    """One submission as Gradescope reads it. Remarks are not in it: students see this."""
    tests = [_gradescope_test(grade) for grade in report.of(student)]
    output = "Not graded here: " + "; ".join(report.ungraded) + "."
    problems = report.problems.get(student, [])
    data: dict[str, Any] = {
        "score": report.points(student),
        "output": "\n".join([output, *problems]),
        "tests": tests,
        "stdout_visibility": "hidden",
    }
    return json.dumps(data, indent=1) + "\n"


def _gradescope_test(grade: Grade) -> dict[str, Any]:
    return {
        "name": grade.exercise,
        "score": grade.points,
        "max_score": 1,
        "status": "passed" if grade.points else FAILED,
        "output": "\n\n".join(filter(None, [grade.words, grade.message])),
        "output_format": "text",
        "visibility": "after_published",
    }


def _clean(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


WRITERS: dict[str, Callable[[Report], str]] = {"csv": to_csv, "json": to_json, "junit": to_junit}


def summary(report: Report) -> str:
    """A few lines for the terminal."""
    handed_in = [grade for grade in report.grades if grade.public != NOT_SUBMITTED]
    passed = sum(grade.points for grade in handed_in)
    only_public = sum(grade.public == "passed" and not grade.points for grade in handed_in)
    lines = [
        f"{len(report.students)} submissions, {len(handed_in)} files: {passed} passed the public and "
        f"the hidden checks, {only_public} the public ones only, "
        f"{len(handed_in) - passed - only_public} neither",
        f"hidden seed {report.seed}; each file ran in a cell of kind {report.isolation!r}",
        "not graded: " + "; ".join(report.ungraded),
    ]
    lines += _leaderboards(report)
    remarked = sum(bool(grade.remarks) for grade in handed_in)
    if remarked:
        lines.append(f"{remarked} files have remarks: see the CSV or JSON")
    return "\n".join(lines)


def _leaderboards(report: Report) -> list[str]:
    """For exercises scored by the length of a step: the shortest first. In the terminal only."""
    lines = []
    for exercise in report.exercises:
        scores = []
        for done in report.grades:
            times = [one["makespan"] for one in done.achieved if "makespan" in one]
            if done.exercise == exercise and times:
                scores.append((sum(float(time.split()[0]) for time in times), done.student))
        if scores:
            lines.append(f"{exercise}, by the sum of the steps' lengths:")
            lines += [
                f"  {n:2} {time:8g}  {who}" for n, (time, who) in enumerate(sorted(scores), 1)
            ]
    return lines
