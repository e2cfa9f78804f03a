"""Checks one student's file: asks its room, judges the answers, and says what came of it.

Called by: `minimegatron exercises check` (as a process of its own), `check.main`, the grader, tests.
Calls: `source` (before any process starts), `collect` (the rooms), each exercise's `alone` and `check`.
Imports torch only for an exercise that needs it. Megatron has no counterpart.

    room (student's code):   cases' values -> run -> answers          plain data, exact types
    here:                    seed -> cases;  case and answers -> judge -> verdict
"""

import argparse
import importlib
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from minimegatron.exercises import verdict
from minimegatron.exercises.cases import Case, Result, Wrong
from minimegatron.exercises.catalog import find
from minimegatron.exercises.collect import ALONE, CHECK, Collected, Question, collect
from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.plain_data import from_line
from minimegatron.exercises.source import check_source
from minimegatron.exercises.verdict import Verdict, render


def check_file(
    exercise: Exercise,
    path: Path,
    seed: int = 0,
    *,
    patience: float = 1.0,
    replay: Path | None = None,
    control: bool = False,
) -> Verdict:
    """Runs the exercise's check on the student's file.

    `patience` multiplies the time allowed, for a machine that has other work. With `replay`, the
    last run that passed is written there as a page, if the check recorded one. `control` loads the
    student's file, but then asks the stub's functions: that must not pass.
    """
    began = time.monotonic()
    found = check_source(exercise, path)
    if found is None:
        sheet = Sheet(exercise, seed)
        for question in sheet.questions:
            if not sheet.judge(question, collect(question, path, patience, control)):
                break
        found = sheet.verdict(replay)
    return replace(found, seconds=time.monotonic() - began)


@dataclass
class Sheet:
    """What one file is asked, with one seed, and what has come of it so far.

    Asking is somebody else's: the same sheet serves a student's own machine and the grader, which
    asks in a closed room.
    """

    exercise: Exercise
    seed: int
    _failed: Verdict | None = None
    _achieved: list[dict[str, str]] = field(default_factory=list)
    _printed: dict[str, str] = field(default_factory=dict)
    _recording: Any = None

    @cached_property
    def questions(self) -> list[Question]:
        """The pure parts first: they need neither ranks nor torch."""
        return [
            Question.of(module.__name__, self._num_ranks(module), self._cases[module.__name__])
            for module in self._modules
        ]

    @cached_property
    def _modules(self) -> list[ModuleType]:
        names = [name for name in (ALONE, CHECK) if (self.exercise.folder / f"{name}.py").is_file()]
        return [importlib.import_module(f"{self.exercise.module}.{name}") for name in names]

    @cached_property
    def _cases(self) -> dict[str, list[Case]]:
        return {module.__name__: module.cases(self.seed) for module in self._modules}

    def _num_ranks(self, module: ModuleType) -> int:
        return 0 if module.__name__.endswith(f".{ALONE}") else max(1, self.exercise.num_ranks)

    # -- Judging --

    def judge(self, question: Question, collected: Collected) -> bool:
        """Judges what a room said; whether all of it is right."""
        module = importlib.import_module(question.module)
        cases = self._cases[question.module]
        self._printed |= {key: text for key, text in collected.printed.items()}
        said = [_Said(lines) for lines in collected.lines]
        for number, case in enumerate(cases):
            if not all(number in one.answers for one in said) or not said:
                found = self._ended(module, collected, said, number, case)
                self._failed = replace(found, case=str(case), part=found.part or case.part)
                return False
            answers = [one.answers[number] for one in said]
            try:
                result = module.judge(case, answers[0] if question.is_alone else answers)
            except Wrong as wrong:
                part = wrong.part or case.part
                self._failed = Verdict(verdict.WRONG, str(wrong), str(case), part)
                return False
            self._pass(case, result)
        if collected.ending:
            # All was answered, and then a rank did not come to its end.
            self._failed = Verdict(collected.ending, collected.text, rank=collected.rank)
            return False
        return True

    def _pass(self, case: Case, result: Result | None) -> None:
        result = result or Result()
        words = {key: str(value) for key, value in result.achieved.items()}
        self._achieved.append({"case": str(case)} | words)
        if result.recording is not None:
            self._recording = result.recording

    def _parts(self) -> list[str]:
        """The exercise's pieces, in the order in which they are judged."""
        found: list[str] = []
        for module in self._modules:
            of_cases = [case.part for case in self._cases[module.__name__] if case.part]
            found += getattr(module, "PARTS", of_cases)
        return list(dict.fromkeys(found))

    def _passed_parts(self) -> list[str]:
        """Those that are right: all before the one that failed."""
        parts = self._parts()
        if self._failed is None:
            return parts
        if self._failed.part in parts:
            return parts[: parts.index(self._failed.part)]
        # It failed before any of its module's parts could be told from the others.
        cases = [case for cases in self._cases.values() for case in cases]
        before = {case.part for case in cases[: len(self._achieved)]}
        return [part for part in parts if part in before]

    def _ended(
        self,
        module: ModuleType,
        collected: Collected,
        said: list["_Said"],
        number: int,
        case: Case,
    ) -> Verdict:
        """Why there is no answer to a case."""
        failures = [(rank, one.failure) for rank, one in enumerate(said) if one.failure]
        failures.sort(key=lambda pair: (_is_consequence(pair[1]), pair[0] != collected.rank))
        if failures and collected.ending in ("", verdict.RAISED):
            rank, failure = failures[0]
            text = failure["text"]
            if collected.text and failure["failed"] != verdict.WRONG:
                text = f"{text}\n\n{collected.text}"
            return Verdict(failure["failed"], text, rank=rank)
        if collected.ending == verdict.HANG and hasattr(module, "judge_hang"):
            # What was done until then, against the plan: the cause, where the hang is a symptom.
            try:
                module.judge_hang(case, [one.notes.get(number, []) for one in said])
            except Wrong as wrong:
                text = f"{wrong}\n\nThen the ranks hang. {collected.text}"
                return Verdict(verdict.WRONG, text, part=wrong.part, rank=collected.rank)
        if collected.ending:
            return Verdict(collected.ending, collected.text, rank=collected.rank)
        return Verdict(verdict.DIED, "your code ended the process before it had answered (os._exit?)")

    # -- The outcome --

    def verdict(self, replay: Path | None = None) -> Verdict:
        """All in all. With `replay`, the last recording is written there if all is right."""
        cases = [case for cases in self._cases.values() for case in cases]
        found = self._failed
        if found is None and len(self._achieved) != len(cases):
            found = Verdict(verdict.DEFECT, "the check ended early, and nothing says why")
        if found is None:
            found = Verdict(verdict.PASSED, replay=self._replay(replay))
        return replace(
            found,
            num_passed=len(self._achieved),
            num_cases=len(cases),
            achieved=tuple(self._achieved),
            parts=tuple(self._parts()),
            passed_parts=tuple(self._passed_parts()),
            printed=self._printed,
        )

    def _replay(self, path: Path | None) -> str:
        if path is None or self._recording is None:
            return ""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._recording.to_html(path)
        return str(path)


class _Said:
    """One rank's lines, read with care: they come from a student's room."""

    def __init__(self, lines: Sequence[str]):
        self.answers: dict[int, Any] = {}
        self.notes: dict[int, list[Any]] = {}
        self.failure: dict[str, str] | None = None
        for line in lines:
            self._read(line)

    def _read(self, line: str) -> None:
        try:
            data = from_line(line)
        except ValueError:
            return
        number = data.get("case") if type(data) is dict else None
        if type(number) is not int:
            return
        if "answer" in data:
            self.answers.setdefault(number, data["answer"])
        elif "note" in data:
            self.notes.setdefault(number, []).append(data["note"])
        elif "failed" in data and self.failure is None:
            kind, text = data["failed"], data.get("text")
            if kind in verdict.ROOM_KINDS and type(text) is str:
                self.failure = {"failed": kind, "text": text}


def _is_consequence(failure: dict[str, str]) -> bool:
    """Whether a rank failed because another was gone: what that one said is the cause."""
    lost = r"Connection (closed|reset)|Connection refused|Broken pipe|gloo.*(closed|reset)"
    is_told = failure["failed"] in (verdict.RAISED, verdict.DEFECT)
    return is_told and bool(re.search(lost, failure["text"]))


# -- As a program --


def exercise_of(path: Path) -> Exercise:
    """The exercise that a file belongs to, by its own name or its folder's."""
    for name in (path.stem, path.resolve().parent.name):
        if match := re.match(r"ex\d\d[a-z]?(?=_|$)", name):
            return find(match[0])
    raise ValueError(
        f"{path}: neither its name nor its folder's begins with an exercise's, as ex06"
    )


def check_with_command(path: Path, seed: int = 0) -> int:
    """Checks a file and prints the verdict; returns the exit code."""
    exercise = exercise_of(path)
    found = check_file(exercise, path, seed, replay=replay_path(exercise, path.parent))
    print(render(found, exercise.name))
    return 0 if found.has_passed else 1


def replay_path(exercise: Exercise, folder: Path) -> Path:
    """Where the replay of a run lies in a student's folder."""
    return folder / "replays" / f"{exercise.name}.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Checks one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    exercise = exercise_of(args.file)
    found = check_file(exercise, args.file, args.seed)
    print(render(found, exercise.name))
    print(f"{found.seconds:.2f} s")
    return 0 if found.has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
