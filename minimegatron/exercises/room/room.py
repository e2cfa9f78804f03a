"""The student's room: the process in which a student's code runs, and all that is known there.

Megatron has no counterpart.

Nothing here says "right". The room has the cases' values, but no expected ones: it calls the
student's functions and hands on what they gave, as lines of plain data. Who judges them sits in another
process (`check.engine`). A room can only say what makes the check fail: an exception, a function
that is not written, a changed package.
"""

import bdb
import functools
import importlib
import importlib.abc
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from minimegatron.exercises.bench.cases import Case, Wrong
from minimegatron.exercises.bench.replacing import functions_of, withhold
from minimegatron.exercises.room import plain_text, stand_ins, verdict
from minimegatron.exercises.room.integrity import Seal
from minimegatron.exercises.room.missing_keys import missing_key_words
from minimegatron.exercises.room.plain_data import NotPlain, from_line, to_line
from minimegatron.exercises.room.reading import (
    CATALOG,
    catalog_words,
    returning_names,
    unwritten_names,
)
from minimegatron.launching.user_file import load_user_file

FRAMES_SHOWN, LATER_FRAMES = 6, 2
MOST_SUMMARY, MOST_SAID = 3000, 15_000
"""Characters of an exception's own words, and of all that is said about it."""
OWN_FOLDER = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Job:
    """What a room is asked to do."""

    module: str
    """The dotted path of the exercise's `check` or `alone`: its `run` is called."""
    path: str
    """The student's file."""
    cases: str
    """[[name, part, values], ...] as `to_line` writes it."""
    control: bool = False
    """Ask the stub's functions instead, after the student's file was loaded."""
    seconds: float = 0.0
    """After these a room without ranks writes where it is; 0 for never."""
    lines: str = ""
    """The folder where ranks write their lines."""
    pipes: str = ""
    """The folder of the pipes that take what is printed; "" to print as usual."""


class Breakpoint(Exception):
    """`breakpoint()` in the student's code."""


class Room:
    """One process's part of a check. `tell` takes each line; `between` runs after each case."""

    def __init__(
        self,
        job: Job,
        tell: Callable[[str], None],
        rank: int | None = None,
        between: Callable[[], None] = lambda: None,
        times: int = 1,
    ):
        self.job, self.path, self.rank = job, job.path, rank
        self._tell, self._between, self._times = tell, between, times
        # Whatever the student's file does to the module: what is said is said in these words.
        self._to_line = to_line
        self._number = 0
        self._is_asking = False
        """Whether the student's functions are called, and what they gave is used."""
        self._nothing: set[tuple[int, str]] = set()
        """(case, function) for each that has returned None and should not."""

    def work(self) -> BaseException | None:
        """Answers every case. Returns what ended it early, which was told."""
        try:
            self._answer()
        except BaseException as error:
            kind, text = self._words(error)
            part = error.part if isinstance(error, Wrong) else ""
            self._say(failed=kind, text=plain_text.cut(text, MOST_SAID), part=part)
            return error
        self._say(over=True)
        return None

    def note(self, word: Any) -> None:
        """Tells something about the case while it runs, for whoever must explain a hang."""
        self._say(note=word)

    def _answer(self) -> None:
        check = importlib.import_module(self.job.module)
        stub = Path(check.__file__).parent / "stub.py"
        wanted = unwritten_names(stub)
        withhold(getattr(check, "REPLACES", ()))
        sys.breakpointhook = _no_breakpoint
        sys.meta_path.insert(0, _NoSolutions(os.path.basename(self.path)))
        seal = Seal()
        student = self._student()
        stand_ins.loaded()
        _look_at_authors(student, self.path, wanted)
        for name in returning_names(stub):
            self._watch_return(student, name)
        for number, (name, part, values) in enumerate(from_line(self.job.cases)):
            self._number = number
            self._say(begun=True)
            case = Case(name, part=part, **values)
            given = [self._run(check, student, case) for _ in range(self._times)]
            if (changed := seal.broken()) is not None:
                raise Refused(verdict.FORGED, _changed_words(changed))
            if len({self._to_line(one) for one in given}) > 1:
                raise Wrong(_two_answers(*given[:2]))
            self._say(answer=given[0])
            self._between()

    def _run(self, check: ModuleType, student: ModuleType, case: Case) -> Any:
        self._is_asking = True
        given = check.run(student, case)
        self._is_asking = False
        return given

    def _watch_return(self, student: ModuleType, path: str) -> None:
        """From now on, where the function returns None, that is told: what goes wrong comes later."""
        outer, _, name = path.rpartition(".")
        holder = getattr(student, outer, None) if outer else student
        given = inspect.getattr_static(holder, name, None)
        function = given.__func__ if isinstance(given, staticmethod) else given
        if not callable(function):
            return

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            returned = function(*args, **kwargs)
            if returned is None and (self._number, path) not in self._nothing:
                self._nothing.add((self._number, path))
                self._say(nothing=path)
            return returned

        setattr(holder, name, watched if function is given else staticmethod(watched))

    def _student(self) -> ModuleType:
        path = Path(self.job.path)
        student = load_user_file(path, path.stem)
        if self.job.control:
            student = importlib.import_module(f"{self.job.module.rpartition('.')[0]}.stub")
            self.path = student.__file__
        return student

    def _say(self, **words: Any) -> None:
        self._tell(self._to_line({"case": self._number, **words}))

    # -- What an exception says --

    def _words(self, error: BaseException) -> tuple[str, str]:
        if isinstance(error, Wrong):
            return verdict.WRONG, str(error)
        if isinstance(error, Refused):
            return error.kind, str(error)
        where = student_frames(error, self.path)
        if isinstance(error, Breakpoint | bdb.BdbQuit):
            return verdict.RAISED, _breakpoint_words(where)
        if isinstance(error, NotPlain) and not where:
            return verdict.WRONG, f"{self._on()}{error}"
        if isinstance(error, NotImplementedError) and where and where[-1] == last_frame(error):
            return verdict.UNWRITTEN, f"{error}\n\n{_place(where[-1])}"
        if where:
            return verdict.RAISED, self._raised_words(error, where)
        if isinstance(error, SystemExit):
            return verdict.RAISED, f"{self._on()}sys.exit() was called; return instead"
        if self._is_asking and isinstance(error, Exception):
            return verdict.RAISED, self._later_words(error)
        return verdict.DEFECT, "".join(traceback.format_exception(error))

    def _raised_words(self, error: BaseException, where: list[traceback.FrameSummary]) -> str:
        summary = "".join(traceback.format_exception_only(error)).strip()
        summary = plain_text.cut(summary, MOST_SUMMARY)
        if isinstance(error, SystemExit):
            who = "a function" if self.rank is None else "a rank"
            summary = f"sys.exit({error.code!r}): {who} may not leave; return instead"
        lines = [f"{self._on()}{summary}"]
        if isinstance(error, KeyError) and (words := missing_key_words(error, self.path)):
            lines.append(words)
        lines += ["", "In your file, innermost call last:"]
        lines += [_place(frame) for frame in where[-FRAMES_SHOWN:]]
        inner = last_frame(error)
        if isinstance(error, ModuleNotFoundError):
            lines += ["", "Your file is checked alone: put your own helpers into it."]
        elif inner != where[-1] and inner.filename != stand_ins.__file__:
            lines.append(f"  from there, in {inner.filename}:{inner.lineno}, in {inner.name}")
        return "\n".join(lines)

    def _later_words(self, error: BaseException) -> str:
        """For what a student's function has returned, started or left behind, and failed later."""
        summary = "".join(traceback.format_exception_only(error)).strip()
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            # A file such as "<string>", of what a dataclass generates, has no folder.
            if list(Path(frame.filename).parents)[1:2] != [Path(__file__).parents[1]]
        ]
        ours = [frame for frame in frames if frame.filename.startswith(OWN_FOLDER)]
        return "\n".join(
            [
                f"{self._on()}{plain_text.cut(summary, MOST_SUMMARY)}",
                "",
                "It failed outside your file, with something that your code returned, started or left "
                "behind:",
                *(_place(frame) for frame in (ours or frames)[-LATER_FRAMES:]),
            ]
        )

    def _on(self) -> str:
        return "" if self.rank is None else f"rank {self.rank}: "


# -- What is looked at around the student's functions --


class Refused(Exception):
    """Ends a check with a verdict of the given kind."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class _NoSolutions(importlib.abc.MetaPathFinder):
    """Refuses to import a solution, whichever exercise's and by whatever way of importing."""

    def __init__(self, file: str):
        self._file = file

    def find_spec(self, name: str, *_: Any) -> None:
        """None: others find it. Raises Refused for a solution."""
        if name.startswith(f"{CATALOG}.") and name.endswith(".solution"):
            raise Refused(verdict.FORGED, catalog_words(name, self._file))


def _look_at_authors(student: ModuleType, path: str, names: Sequence[str]) -> None:
    """Raises Refused where what the student should have written is a function of the package."""
    for name in names:
        for function in functions_of(getattr(student, name, None)):
            file = function.__code__.co_filename
            if file != path and file.startswith(OWN_FOLDER):
                raise Refused(
                    verdict.FORGED,
                    f"{name} is {function.__module__}.{function.__qualname__}, a function of the "
                    f"package. Write it yourself, in {os.path.basename(path)}.",
                )


def _changed_words(name: str) -> str:
    return (
        f"After your code has run, {name} is not what it was before. Leave everything "
        "outside your own file as it is; the check needs it."
    )


def _no_breakpoint(*_: Any, **__: Any) -> None:
    raise Breakpoint


def _breakpoint_words(where: list[traceback.FrameSummary]) -> str:
    lines = [
        "a debugger was started, and nobody can type here: the check runs your code in other "
        "processes",
        "Take it out. What your code prints is shown below the verdict.",
    ]
    return "\n".join([*lines, "", *(_place(frame) for frame in where[-1:])])


def _two_answers(one: Any, other: Any) -> str:
    return (
        "asked the same thing twice, your code gave two answers: something in it depends on chance, "
        "on time, or on what it did before\n"
        f"  first:  {_around(one, other)}\n  second: {_around(other, one)}"
    )


def _around(value: Any, other: Any, before: int = 100, most: int = 300) -> str:
    """The value in words; of a long one, where it begins to differ from the other."""
    text, theirs = repr(value), repr(other)
    place = next((i for i, (a, b) in enumerate(zip(text, theirs, strict=False)) if a != b), 0)
    begin = max(0, place - before) if len(text) > most else 0
    shown = text[begin : begin + most]
    return "... " * (begin > 0) + shown + " ..." * (begin + most < len(text))


# -- Exceptions in the student's own lines --


def student_frames(error: BaseException, path: str) -> list[traceback.FrameSummary]:
    """The frames of the traceback that are lines of the student's file, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename == path]


def last_frame(error: BaseException) -> traceback.FrameSummary:
    """Where it was raised."""
    return traceback.extract_tb(error.__traceback__)[-1]


def _place(frame: traceback.FrameSummary) -> str:
    line = linecache.getline(frame.filename, frame.lineno).strip()
    return f"  {os.path.basename(frame.filename)}:{frame.lineno}, in {frame.name}:  {line}"
