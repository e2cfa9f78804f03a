"""Grades submissions: every file in a cell of its own, with data that nobody has seen.

Torch-free. Megatron has no counterpart.

Each file is checked three times, with

* the public seed, 0: what the student saw;
* the hidden seed: other data and other configurations. Only who passes this gets the points;
* the hidden seed again, where the file is loaded but the stub's functions are asked. That must not
  pass: a file that makes the check pass without doing the exercise does so here too.

A cell is told what to ask the student's functions, and says what they answered: plain data, through a
connection that ranks do not have. Seed, cases and expected values stay with a judge, a process outside
of all cells (`judge`). What is printed and exit codes count for nothing, and no answer is no
point.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from minimegatron.exercises.check.engine import Sheet
from minimegatron.exercises.check.judge import Judge
from minimegatron.exercises.check.runner import ROOT
from minimegatron.exercises.exercise import Exercise, exercises
from minimegatron.exercises.grading.cell import NAMESPACES, OTHER_USER, SAME_USER, Limits, Order
from minimegatron.exercises.grading.cells import NUM_ROOMS, Cell, CellEnded, Template
from minimegatron.exercises.grading.remarks_apart import remarks_apart
from minimegatron.exercises.grading.submissions import Submission
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.verdict import Verdict

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
    def ran_out_of_time(self) -> bool:
        """Whether it might have ended otherwise on a machine without other work."""
        late = ("was not over after", "cannot be reached", "could not be judged")
        return self.kind == verdict.TIMEOUT or any(
            words in incident for words in late for incident in self.incidents
        )

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
    seed = settings.seed or drawn_seed()
    jobs = settings.jobs or max(1, (os.cpu_count() or 1) // 2)
    with Template() as template, ThreadPoolExecutor(jobs) as pool:
        kind = strongest_kind(template, settings)
        pairs = [(submission, one) for submission in submissions for one in wanted]
        with contextlib.closing(_Grader(template, kind, seed, settings, tell)) as grader:
            try:
                graded = partial(grader.graded, is_alone=jobs == 1)
                grades = list(pool.map(lambda pair: graded(*pair), pairs))
            except KeyboardInterrupt:
                # The files at hand are graded to their end; whoever interrupts that too ends them.
                pool.shutdown(cancel_futures=True)
                raise
            # Whoever ran out of time beside others gets a second chance, alone.
            for place, pair in enumerate(pairs):
                if jobs > 1 and grades[place].ran_out_of_time:
                    grades[place] = grader.graded(*pair, is_alone=True)
    return Report(
        grades,
        [submission.student for submission in submissions],
        [exercise.name for exercise in wanted],
        seed,
        kind,
        {one.student: list(one.problems) for one in submissions if one.problems},
    )


def drawn_seed() -> int:
    """A hidden seed that nobody knows."""
    return 1 + secrets.randbelow(2**31 - 1)


def strongest_kind(template: Template, settings: Settings) -> str:
    """Tries the kind asked for, or each that keeps hostile code in. Raises ValueError if none works."""
    reasons = []
    for kind in [settings.kind] if settings.kind else [NAMESPACES, OTHER_USER]:
        if kind == OTHER_USER and os.getuid() != 0:
            reasons.append(f"{kind}: the grader is not root")
            continue
        try:
            if kind == OTHER_USER:
                template.claim_users()
            if problem := _try(template, kind, settings):
                reasons.append(f"{kind}: {problem}")
            else:
                return kind
        except (CellEnded, ValueError) as problem:
            reasons.append(f"{kind}: {problem}")
    raise ValueError(
        "students' code cannot be kept in here ("
        + "; ".join(reasons)
        + "). Run the grader as root, or "
        "where user namespaces are allowed; or, if you trust what was submitted, with "
        f"--isolation '{SAME_USER}'"
    )


def _try(template: Template, kind: str, settings: Settings) -> str:
    """Why a check that passes wherever anything can does not pass in such a cell; "" if it does."""
    exercise = exercises()[0]
    source = (exercise.folder / "solution.py").read_text(encoding="utf-8")
    sheet = Sheet(exercise, seed=0)
    # A number of its own: this room may still be ending when the first others begin.
    room = _room(kind, NUM_ROOMS - 1, settings)
    with template.cell(room, f"{exercise.name}.py", source, 60) as cell:
        for number, question in enumerate(sheet.questions):
            sheet.judge(number, cell.collect(question, patience=5.0))
    found = sheet.verdict()
    return "" if found.has_passed else found.text


def _room(kind: str, number: int, settings: Settings) -> dict[str, Any]:
    return asdict(
        Order(kind, number, settings.limits, settings.hidden + _kept_back(), _solutions())
    )


@cache
def _solutions() -> tuple[str, ...]:
    """The reference solutions, and what Python has compiled of them."""
    patterns = ("solution.py", "__pycache__/solution.*.pyc")
    return tuple(
        str(path)
        for one in exercises()
        for pattern in patterns
        for path in one.folder.glob(pattern)
    )


@cache
def _kept_back() -> tuple[str, ...]:
    """Of a clone: where other solutions lie, and former versions of the files."""
    return tuple(
        str(Path(ROOT) / name) for name in ("tests", ".git") if (Path(ROOT) / name).is_dir()
    )


class _Grader:
    def __init__(
        self,
        template: Template,
        kind: str,
        seed: int,
        settings: Settings,
        tell: Callable[[Grade], None] = lambda grade: None,
    ):
        self.template, self.kind, self.seed, self.settings = template, kind, seed, settings
        self._numbers = iter(range(1 << 62))
        self._mine = threading.local()
        self._judges: list[Judge] = []
        self._cells: set[Cell] = set()
        self._tell, self._telling, self._is_over = tell, threading.Lock(), False

    def close(self) -> None:
        """Ends whatever still runs; nobody hears of that."""
        with self._telling:
            self._is_over = True
        for cell in list(self._cells):
            cell.end()
        for judge in self._judges:
            judge.__exit__()

    def graded(self, submission: Submission, exercise: Exercise, is_alone: bool) -> Grade:
        """The grade, told as soon as it is known, unless the file is to be graded once more, alone.

        A failure of the grader itself is told in the student's row, and ends nothing.
        """
        try:
            done = self.grade(submission, exercise)
        except Exception as error:
            done = _failed(submission, exercise, error)
        if is_alone or not done.ran_out_of_time:
            # Nobody may be listening any more; the reports are to be written all the same.
            with self._telling, contextlib.suppress(OSError, ValueError):
                if not self._is_over:
                    self._tell(done)
        return done

    def grade(self, submission: Submission, exercise: Exercise) -> Grade:
        """Checks one file, in a cell of its own."""
        student, source = submission.student, submission.sources.get(exercise.name)
        if source is None:
            return Grade(student, exercise.name)
        verdicts, ended = self._run(exercise, source)
        public, hidden = _state(verdicts, 0), _state(verdicts, 1)
        failed = next((one for one in verdicts[:2] if not one.has_passed), None)
        message = "" if failed is None else verdict.render(failed, exercise.name)
        kind, incidents = "" if failed is None else failed.kind, ()
        if len(verdicts) == 3 and verdicts[2].has_passed:
            hidden, kind = FAILED, NOT_THE_STUDENTS
            incidents += ("the check passes with the stub once this file is loaded: look at it",)
            message = "The check passes without the functions that you were asked to write."
        elif hidden == PASSED and len(verdicts) < 3:
            # The control run gave no answer. Another student's file may have slowed it down.
            hidden = NOT_RUN
        if ended:
            incidents += (f"the cell ended early: {ended}",)
            message = message or f"No answer: {ended}."
        return Grade(
            student,
            exercise.name,
            public,
            hidden,
            points=int(public == hidden == PASSED),
            message=message,
            remarks=remarks_apart(exercise, source),
            achieved=verdicts[1].achieved if hidden == PASSED else (),
            seconds=sum(one.seconds for one in verdicts),
            kind=kind,
            incidents=incidents,
            public_seconds=sum(one.seconds for one in verdicts[:1]),
        )

    def _run(self, exercise: Exercise, source: str) -> tuple[list[Verdict], str]:
        """The verdicts of the three checks, as far as they came; why the cell ended early, if so."""
        verdicts: list[Verdict] = []
        runs = ((0, False), (self.seed, False), (self.seed, True))
        file, seconds = f"{exercise.name}.py", self.settings.limits.seconds
        try:
            for seed, control in runs:
                # A new cell each time: what the file changes in one, the next does not see.
                room = _room(self.kind, next(self._numbers) % (NUM_ROOMS - 1), self.settings)
                with self.template.cell(room, file, source, seconds) as cell:
                    self._cells.add(cell)
                    try:
                        verdicts.append(self._check(cell, exercise, seed, control))
                    finally:
                        self._cells.discard(cell)
                if not verdicts[-1].has_passed:
                    break
        except CellEnded as ended:
            return verdicts, str(ended)
        return verdicts, ""

    def _check(self, cell: Cell, exercise: Exercise, seed: int, control: bool) -> Verdict:
        """One run: the judge asks, the cell answers. Raises CellEnded."""
        began, judge = time.monotonic(), self._judge()
        try:
            for number, question in enumerate(judge.open(exercise, seed)):
                if not judge.judge(number, cell.collect(question, self.settings.patience, control)):
                    break
            found = judge.verdict()
        except (TimeoutError, RuntimeError, ValueError) as error:
            # Its answers may still come: the next student gets another judge.
            judge.__exit__()
            del self._mine.judge
            raise CellEnded(f"what it answered could not be judged: {error}") from None
        return replace(found, seconds=time.monotonic() - began)

    def _judge(self) -> Judge:
        """This thread's own."""
        if not hasattr(self._mine, "judge"):
            self._mine.judge = Judge().__enter__()
            self._judges.append(self._mine.judge)
        return self._mine.judge


def _failed(submission: Submission, exercise: Exercise, error: Exception) -> Grade:
    return Grade(
        submission.student,
        exercise.name,
        NOT_RUN,
        NOT_RUN,
        message="This could not be graded; that is not your fault. Ask your teacher.",
        kind=verdict.DEFECT,
        incidents=(f"the grader failed: {type(error).__name__}: {error}",),
    )


def _state(verdicts: Sequence[Verdict], number: int) -> str:
    if number < len(verdicts):
        return PASSED if verdicts[number].has_passed else FAILED
    # Where all was well so far, the next check was begun, and no answer is a failure.
    was_begun = number == len(verdicts) and all(one.has_passed for one in verdicts)
    return FAILED if was_begun else NOT_RUN
