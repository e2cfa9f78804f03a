"""Grades submissions: every file in a cell of its own, with data that nobody has seen.

Called by: `minimegatron exercises grade`. Calls: `submissions`, `template` (as a process). Torch-free.
Megatron has no counterpart.

Each file is checked three times, with

* the public seed, 0: what the student saw;
* the hidden seed: other data and other configurations. Only who passes this gets the points;
* the hidden seed again, where the file is loaded but the stub's functions are checked. That must fail:
  a file that makes the check pass without doing the exercise does so here too.

A verdict reaches the grader from the cell's checker, a process that runs no student's code, through a
connection that ranks do not have. What is printed and exit codes count for nothing, and no answer is
no point.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from minimegatron.core.json_text import parse_json
from minimegatron.exercises import verdict
from minimegatron.exercises.catalog import exercises
from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.grading.cell import NAMESPACES, OTHER_USER, SAME_USER, Limits, Order
from minimegatron.exercises.grading.remarks import remarks_on
from minimegatron.exercises.grading.submissions import Submission
from minimegatron.exercises.runner import ROOT
from minimegatron.exercises.verdict import Verdict

PASSED, FAILED, NOT_RUN, NOT_SUBMITTED = "passed", "failed", "not run", "not submitted"
UNGRADED = (
    "whether the student can explain it",
    "how readable the code is",
    "whether it is the student's own work",
)
"""What no check here looks at; said in every report."""
NOT_THE_STUDENTS = "control"
"""The kind of a file whose functions are not what makes the check pass."""
HIDDEN_WORDS = verdict.HEADLINES | {
    NOT_THE_STUDENTS: "they pass without the functions that you were asked to write"
}
KEPT = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "TMPDIR")
"""Of the environment, what cells get."""
MOST_ANSWER = 1 << 20
PROGRAM = (
    "import sys; sys.path[:0] = [] if {root!r} in sys.path else [{root!r}]; "
    "from minimegatron.exercises.grading.template import serve; serve({file})"
)


@dataclass(frozen=True)
class Grade:
    """One student's one exercise."""

    student: str
    exercise: str
    public: str = NOT_SUBMITTED
    """Of the public checks: passed, failed, not run, or not submitted."""
    hidden: str = NOT_SUBMITTED
    points: int = 0
    message: str = ""
    """Of the first check that failed. What it says of a hidden one is for the teacher only."""
    remarks: tuple[str, ...] = ()
    """For the teacher: of the file."""
    achieved: tuple = ()
    seconds: float = 0.0
    kind: str = ""
    """What the first check that failed ended with, as `verdict` calls it; "" if it gave no answer."""
    incidents: tuple[str, ...] = ()
    """For the teacher: of the runs, hidden ones too."""
    public_seconds: float = 0.0

    @property
    def words(self) -> str:
        """What may be said to the student, and no more."""
        if self.public == NOT_SUBMITTED:
            return NOT_SUBMITTED
        return f"public checks {self.public}, hidden checks {self.hidden}"

    @property
    def told(self) -> str:
        """The message as the student may see it: of a hidden check, only the kind of failure."""
        if self.public != PASSED:
            return self.message
        if self.hidden == PASSED:
            return ""
        return f"Of the hidden checks: {HIDDEN_WORDS.get(self.kind, 'no answer')}."


@dataclass(frozen=True)
class Report:
    """All grades, and how they came about."""

    grades: list[Grade]
    students: list[str]
    exercises: list[str]
    seed: int
    isolation: str
    problems: dict[str, list[str]] = field(default_factory=dict)
    ungraded: tuple[str, ...] = UNGRADED

    def of(self, student: str) -> list[Grade]:
        """One student's grades, in the order of exercises."""
        return [grade for grade in self.grades if grade.student == student]

    def points(self, student: str) -> int:
        """The student's sum."""
        return sum(grade.points for grade in self.of(student))


@dataclass(frozen=True)
class Settings:
    """How to grade."""

    seed: int = 0
    """The hidden seed; 0 for one drawn at random."""
    kind: str = ""
    """The kind of cell; "" for the strongest this machine can make."""
    jobs: int = 0
    """Cells at a time; 0 for one per two processors."""
    patience: float = 3.0
    """How many times longer than in a student's own check anything may take."""
    limits: Limits = Limits()
    hidden: tuple[str, ...] = ()
    """Folders that cells must not see."""


def grade(
    submissions: Sequence[Submission],
    settings: Settings = Settings(),
    wanted: Sequence[Exercise] = (),
    tell: Callable[[Grade], None] = lambda grade: None,
) -> Report:
    """Grades the `wanted` exercises, or all that somebody submitted. `tell` hears of each grade.

    Raises ValueError if no cell of the kind asked for can be made here.
    """
    if not wanted:
        names = {name for submission in submissions for name in submission.sources}
        wanted = [exercise for exercise in exercises() if exercise.name in names]
    seed = settings.seed or 1 + secrets.randbelow(2**31 - 1)
    jobs = settings.jobs or max(1, (os.cpu_count() or 1) // 2)
    with Template() as template, ThreadPoolExecutor(jobs) as pool:
        kind = settings.kind or strongest_kind(template, settings)
        grader = _Grader(template, kind, seed, settings)
        work = [(submission, one) for submission in submissions for one in wanted]
        grades = []
        for done in pool.map(lambda pair: _contained(grader, *pair), work):
            # Nobody may be listening any more; the reports are to be written all the same.
            with contextlib.suppress(OSError, ValueError):
                tell(done)
            grades.append(done)
    return Report(
        grades,
        [submission.student for submission in submissions],
        [exercise.name for exercise in wanted],
        seed,
        kind,
        {one.student: list(one.problems) for one in submissions if one.problems},
    )


def _contained(grader: "_Grader", submission: Submission, exercise: Exercise) -> Grade:
    """The grade. A failure of the grader itself is told in the student's row, and ends nothing."""
    try:
        return grader.grade(submission, exercise)
    except Exception as error:
        words = f"the grader failed: {type(error).__name__}: {error}"
        return Grade(
            submission.student,
            exercise.name,
            NOT_RUN,
            NOT_RUN,
            message="This could not be graded; that is not your fault. Ask your teacher.",
            kind=verdict.DEFECT,
            incidents=(words,),
        )


def strongest_kind(template: "Template", settings: Settings) -> str:
    """Tries a cell of each kind that keeps hostile code in. Raises ValueError if none can be made."""
    reasons = []
    for kind in (NAMESPACES, OTHER_USER):
        if kind == OTHER_USER and os.getuid() != 0:
            reasons.append(f"{kind}: the grader is not root")
            continue
        answers = list(template.ask({"room": _room(kind, 0, settings), **_trial()}, 60))
        if len(answers) == 2 and answers[0].get("kind") == verdict.PASSED:
            return kind
        reasons.append(f"{kind}: {_reason(answers)}")
    raise ValueError(
        "students' code cannot be kept in here ("
        + "; ".join(reasons)
        + "). Run the grader as root, or "
        "where user namespaces are allowed; or, if you trust what was submitted, with "
        f"--isolation '{SAME_USER}'"
    )


def _trial() -> dict[str, Any]:
    """A check that passes wherever anything can."""
    exercise = exercises()[0]
    source = (exercise.folder / "solution.py").read_text()
    runs = [{"seed": 0, "patience": 5.0}]
    return {"exercise": exercise.module, "source": source, "runs": runs}


def _reason(answers: Sequence[dict[str, Any]]) -> str:
    for key in ("defect", "text", "ended"):
        for answer in answers:
            if answer.get(key):
                return str(answer[key])
    return "no answer"


def _room(kind: str, number: int, settings: Settings) -> dict[str, Any]:
    return asdict(Order(kind, number, settings.limits, settings.hidden))


class Template:
    """The process that cells are forked from, for the length of a `with` block."""

    def __enter__(self) -> "Template":
        ours, theirs = socket.socketpair()
        self._lock = threading.Lock()
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        if path := environment.get("PYTHONPATH"):
            environment["PYTHONPATH"] = os.pathsep.join(
                map(os.path.abspath, path.split(os.pathsep))
            )
        program = PROGRAM.format(root=ROOT, file=theirs.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.DEVNULL,
            cwd="/",
            env=environment | {"OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        if not ours.recv(1):
            raise RuntimeError("the process that cells are made from did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        self._process.wait(timeout=30)

    def ask(self, question: dict[str, Any], timeout: float = 30.0) -> Iterator[dict[str, Any]]:
        """What a new cell answers, until it has ended. Closing the connection ends the cell."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
            ours.sendall(json.dumps(question).encode() + b"\n")
            ours.settimeout(timeout)
            with ours.makefile("rb") as lines:
                while line := lines.readline(MOST_ANSWER):
                    yield parse_json(line, "the cell's answer")


class _Grader:
    def __init__(self, template: Template, kind: str, seed: int, settings: Settings):
        self.template, self.kind, self.seed, self.settings = template, kind, seed, settings
        self._numbers = iter(range(1 << 62))

    def grade(self, submission: Submission, exercise: Exercise) -> Grade:
        """Checks one file, in a cell of its own."""
        student, source = submission.student, submission.sources.get(exercise.name)
        if source is None:
            return Grade(student, exercise.name)
        verdicts, ended = self._run(exercise, source)
        public = _state(verdicts, 0)
        hidden = _state(verdicts, 1)
        failed = next((one for one in verdicts[:2] if not one.has_passed), None)
        message = "" if failed is None else verdict.render(failed, exercise.name)
        kind, incidents = "" if failed is None else failed.kind, ()
        if hidden == PASSED and (problem := _control_problem(verdicts)):
            hidden, kind = FAILED, NOT_THE_STUDENTS
            incidents += (problem,)
            message = "The check passes without the functions that you were asked to write."
        if ended != "done":
            incidents += (f"the cell ended early: {ended}",)
            message = message or f"No answer: {ended}."
            hidden = FAILED if hidden == PASSED else hidden
        return Grade(
            student,
            exercise.name,
            public,
            hidden,
            points=int(public == hidden == PASSED),
            message=message,
            remarks=remarks_on(exercise, source),
            achieved=verdicts[1].achieved if hidden == PASSED else (),
            seconds=sum(one.seconds for one in verdicts),
            kind=kind,
            incidents=incidents,
            public_seconds=sum(one.seconds for one in verdicts[:1]),
        )

    def _run(self, exercise: Exercise, source: str) -> tuple[list[Verdict], str]:
        """The verdicts of the three checks, as far as they came, and how the cell ended."""
        patience = self.settings.patience
        runs = [
            {"seed": 0, "patience": patience},
            {"seed": self.seed, "patience": patience},
            {"seed": self.seed, "patience": patience, "control": True},
        ]
        number = next(self._numbers) % 1000
        question = {
            "room": _room(self.kind, number, self.settings),
            "exercise": exercise.module,
            "source": source,
            "runs": runs,
        }
        verdicts, ended = [], "it ended without an answer"
        try:
            for answer in self.template.ask(question, self.settings.limits.seconds + 30):
                if "ended" in answer:
                    ended = answer["ended"]
                elif "defect" in answer:
                    verdicts.append(Verdict(verdict.DEFECT, answer["defect"]))
                else:
                    verdicts.append(Verdict.from_json(json.dumps(answer)))
        except (ValueError, OSError) as error:
            return [], f"it answered nonsense: {error}"
        return verdicts, ended


def _state(verdicts: Sequence[Verdict], number: int) -> str:
    if number < len(verdicts):
        return PASSED if verdicts[number].has_passed else FAILED
    # Where all was well so far, the next check was begun, and no answer is a failure.
    was_begun = number == len(verdicts) and all(one.has_passed for one in verdicts)
    return FAILED if was_begun else NOT_RUN


def _control_problem(verdicts: Sequence[Verdict]) -> str:
    """What is wrong with the run that must fail, if anything."""
    if len(verdicts) < 3:
        return "the control run gave no answer"
    if verdicts[2].kind != verdict.UNWRITTEN:
        return (
            f"the check says {verdicts[2].kind!r} to the stub once this file is loaded: look at it"
        )
    return ""
