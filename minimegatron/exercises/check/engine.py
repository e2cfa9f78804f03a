"""Checks one student's file: asks its room, judges the answers, and says what came of it.

Imports torch only for an exercise that needs it. Megatron has no counterpart.

    room (student's code):   cases' values -> run -> answers          plain data, exact types
    here:                    seed -> cases;  case and answers -> judge -> verdict
"""

import argparse
import importlib
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from minimegatron.exercises.bench.cases import Case, Result, Wrong
from minimegatron.exercises.exercise import Exercise, find
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.collect import collect
from minimegatron.exercises.room.collected import ALONE, CHECK, Collected, Question
from minimegatron.exercises.room.plain_data import from_line, kind_of
from minimegatron.exercises.room.reading import check_source
from minimegatron.exercises.room.verdict import Verdict, render

AGAIN_SECONDS = 4.0
"""If a wrong answer is there by then, the question is asked again: does it get the same one?"""
REFERENCE_PATIENCE = 4.0
MOST_NAME = 100
MOST_SAID = 50_000
"""Characters of a failure; a room itself cuts earlier."""
ODD = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    RuntimeError,
    ArithmeticError,
)
"""What a judge raises on answers of another kind than it asked for, or for a mistake of its own."""
OWN_MISTAKE = (TypeError, ValueError, AttributeError)
"""Such an error is the judge's own if the answers are of the kind that the reference's are."""
FORGOTTEN = "`return` forgotten"


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
        for number, question in enumerate(sheet.questions):
            if not sheet.judge(number, collect(question, path, patience, control)):
                break
        found = sheet.verdict(replay)
        is_early = time.monotonic() - began < AGAIN_SECONDS
        if found.kind == verdict.WRONG and not question.is_alone and is_early:
            found = _asked_again(found, Sheet(exercise, seed), number, path, patience)
    return replace(found, seconds=time.monotonic() - began)


def _asked_again(
    found: Verdict, sheet: "Sheet", number: int, path: Path, patience: float
) -> Verdict:
    """The verdict, and whether the same question is answered otherwise a second time."""
    sheet.judge(number, collect(sheet.questions[number], path, patience))
    second = sheet.failure
    if second is not None and _without_ranks(second) == _without_ranks(found):
        return found
    words = "right" if second is None else second.text.splitlines()[0]
    text = (
        f"{found.text}\n\nAsked the same thing a second time, your code gave another answer: {words}\n"
        "Something in it depends on chance, on time, or on which rank comes first."
    )
    return replace(found, text=text)


def _without_ranks(found: Verdict) -> tuple[str, str]:
    """What was said, whichever rank was the first to say it.

    What a rank has said of itself holds numbers of its own: rows, places, other ranks.
    """
    own = r"()\d+(\.\d+)?" if found.rank is not None else r"\b(rank|stage) \d+\b"
    return found.kind, re.sub(own, r"\1", found.text)


@dataclass
class Sheet:
    """What one file is asked, with one seed, and what has come of it so far.

    Asking is somebody else's: the same sheet serves a student's own machine and the grader, which
    asks in a closed room. Only the reference is asked here, where the judge fails.
    """

    exercise: Exercise
    seed: int
    _failed: Verdict | None = None
    _achieved: list[dict[str, str]] = field(default_factory=list)
    _told: list[str] = field(default_factory=list)
    _printed: dict[str, str] = field(default_factory=dict)
    _recording: Any = None

    @cached_property
    def questions(self) -> list[Question]:
        """The pure parts first: they need neither ranks nor torch."""
        return [
            Question.of(module.__name__, self._num_ranks(module), cases)
            for module, cases in self._asked
        ]

    @cached_property
    def _asked(self) -> list[tuple[ModuleType, list[Case]]]:
        """What goes into one room. A case that hangs has ranks of its own: they end with it."""
        asked = []
        for name in (ALONE, CHECK):
            if not (self.exercise.folder / f"{name}.py").is_file():
                continue
            module = importlib.import_module(f"{self.exercise.module}.{name}")
            cases = module.cases(self.seed)
            asked += [(module, together)] if (together := [c for c in cases if not c.hangs]) else []
            asked += [(module, [case]) for case in cases if case.hangs]
        return asked

    @property
    def _all_cases(self) -> list[Case]:
        return [case for _, cases in self._asked for case in cases]

    def _num_ranks(self, module: ModuleType) -> int:
        return 0 if module.__name__.endswith(f".{ALONE}") else max(1, self.exercise.num_ranks)

    @property
    def failure(self) -> Verdict | None:
        """What was wrong so far."""
        return self._failed

    # -- Judging --

    def judge(self, number: int, collected: Collected) -> bool:
        """Judges what a room said to question `number`; whether all of it is right."""
        module, cases = self._asked[number]
        self._printed |= collected.printed
        said = [_Said(lines) for lines in collected.lines]
        if cases[0].hangs and collected.ending == verdict.HANG:
            self._achieved.append({"case": str(cases[0]), "hangs": "as it should"})
            self._told.append(f"{cases[0]}: your ranks hang, as they should.\n{collected.text}")
            return True
        for place, case in enumerate(cases):
            try:
                if not said or not all(place in one.answers for one in said):
                    self._failed = self._ended(module, collected, said, place, case)
                else:
                    answers = [one.answers[place] for one in said]
                    is_alone = self.questions[number].is_alone
                    self._pass(case, module.judge(case, answers[0] if is_alone else answers))
                    continue
            except Wrong as wrong:
                self._failed = Verdict(verdict.WRONG, str(wrong), part=wrong.part)
            except ODD as error:
                self._failed = self._of_odd(error, number, place, answers)
            self._failed = _with_nothing(self._failed, said, place)
            if self._failed.kind not in (verdict.SYNTAX, verdict.MISSING):
                part = self._failed.part or case.part
                self._failed = replace(self._failed, case=str(case), part=part)
            return False
        if collected.ending:
            # All was answered, and then a rank did not come to its end.
            self._failed = Verdict(collected.ending, collected.text, rank=collected.rank)
        return not collected.ending

    def _of_odd(self, error: Exception, number: int, place: int, answers: list[Any]) -> Verdict:
        """Whose fault an odd error is: the same judge is given what the reference answers."""
        try:
            path = self.exercise.folder / "solution.py"
            collected = collect(self.questions[number], path, REFERENCE_PATIENCE)
            right = [_Said(lines).answers[place] for lines in collected.lines]
        except (OSError, ValueError, KeyError):
            return Verdict(verdict.WRONG, _odd_words(error))  # there is nothing to compare with
        module, cases = self._asked[number]
        is_own = isinstance(error, OWN_MISTAKE) and kind_of(answers) == kind_of(right)
        if not is_own:
            try:
                module.judge(cases[place], right[0] if self.questions[number].is_alone else right)
            except Exception:
                is_own = True
        if not is_own:
            return Verdict(verdict.WRONG, _odd_words(error))
        return Verdict(verdict.DEFECT, "".join(traceback.format_exception(error)))

    def _pass(self, case: Case, result: Result | None) -> None:
        result = result or Result()
        words = {key: str(value) for key, value in result.achieved.items()}
        self._achieved.append({"case": str(case)} | words)
        if result.recording is not None:
            self._recording = result.recording

    def _parts(self) -> list[str]:
        """The exercise's pieces, in the order in which they are judged."""
        found: list[str] = []
        for module, cases in self._asked:
            found += getattr(module, "PARTS", [case.part for case in cases if case.part])
        return list(dict.fromkeys(found))

    def _passed_parts(self) -> list[str]:
        """Those that are right: all before the one that failed."""
        parts = self._parts()
        if self._failed is None:
            return parts
        if self._failed.part in parts:
            return parts[: parts.index(self._failed.part)]
        # It failed before any of its module's parts could be told from the others.
        before = {case.part for case in self._all_cases[: len(self._achieved)]}
        return [part for part in parts if part in before]

    def _ended(
        self,
        module: ModuleType,
        collected: Collected,
        said: list["_Said"],
        place: int,
        case: Case,
    ) -> Verdict:
        """Why there is no answer to a case. May raise Wrong."""
        failures = [(rank, one.failure) for rank, one in enumerate(said) if one.failure]
        failures.sort(key=lambda pair: (_is_consequence(pair[1]), pair[0] != collected.rank))
        if failures and collected.ending in ("", verdict.RAISED):
            rank, failure = failures[0]
            text = failure["text"]
            if collected.text and failure["failed"] != verdict.WRONG:
                text = f"{text}\n\n{collected.text}"
            return Verdict(failure["failed"], text, part=failure["part"], rank=rank)
        if collected.ending == verdict.HANG and hasattr(module, "judge_hang"):
            # What was done until then, against the plan: the cause, where the hang is a symptom.
            try:
                module.judge_hang(case, [one.notes.get(place, []) for one in said])
            except Wrong as wrong:
                text = f"{wrong}\n\n(So your ranks wait for each other for ever.)"
                return Verdict(verdict.WRONG, text, part=wrong.part, rank=collected.rank)
        if collected.ending:
            return Verdict(collected.ending, collected.text, rank=collected.rank)
        return Verdict(
            verdict.DIED, "your code ended the process before it had answered (os._exit?)"
        )

    # -- The outcome --

    def verdict(self, replay: Path | None = None) -> Verdict:
        """All in all. With `replay`, the last recording is written there if all is right."""
        found, num_cases = self._failed, len(self._all_cases)
        if found is None and len(self._achieved) != num_cases:
            found = Verdict(verdict.DEFECT, "the check ended early, and nothing says why")
        if found is None:
            text = "\n\n".join(self._told)
            found = Verdict(verdict.PASSED, text, replay=self._replay(replay))
        return replace(
            found,
            num_passed=len(self._achieved),
            num_cases=num_cases,
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
        self.nothing: dict[int, str] = {}
        """Case -> the first function that has returned None and should not."""
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
        elif type(data.get("nothing")) is str:
            self.nothing.setdefault(number, data["nothing"][:MOST_NAME])
        elif "note" in data:
            self.notes.setdefault(number, []).append(data["note"])
        elif "failed" in data and self.failure is None:
            kind, text, part = data["failed"], data.get("text"), data.get("part", "")
            if kind in verdict.ROOM_KINDS and type(text) is type(part) is str:
                self.failure = {"failed": kind, "text": text[:MOST_SAID], "part": part}


def _odd_words(error: Exception) -> str:
    return (
        "what your code returned is not of the kind that is expected, so it cannot be compared "
        f"({type(error).__name__}: {error})\nThe docstrings of the stub say what each function returns."
    )


def _with_nothing(found: Verdict, said: Sequence[_Said], place: int) -> Verdict:
    """The verdict; before it, which function has returned None, unless it says so itself."""
    names = [one.nothing[place] for one in said if place in one.nothing]
    if not names or FORGOTTEN in found.text or found.kind in (verdict.DEFECT, verdict.FORGED):
        return found
    text = f"{names[0]} returned None: was {FORGOTTEN}?\n\nWhat came of it: {found.text}"
    return replace(found, text=text)


def _is_consequence(failure: dict[str, str]) -> bool:
    """Whether a rank failed because another was gone: what that one said is the cause."""
    lost = r"Connection (closed|reset)|Connection refused|Broken pipe|gloo.*(closed|reset)"
    lost += r"|of the group has (ended|gone|given up)"  # over shared memory
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
