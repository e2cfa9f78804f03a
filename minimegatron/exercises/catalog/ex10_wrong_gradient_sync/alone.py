"""Checks the predictions for three versions of the gradient sync: before any rank starts."""

import ast
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from minimegatron.core.pipeline_parallel.schedule_table import get_num_warmup_microbatches
from minimegatron.exercises.catalog.ex10_wrong_gradient_sync import stub
from minimegatron.exercises.check import Case, Result, Wrong

PREDICTIONS, CHOICE = "predictions", "RIGHT, in real steps"
"""The exercise's parts: `check` goes on with the second."""
VERSIONS = {"A": stub.version_a, "B": stub.version_b, "C": stub.version_c}
"""As they were handed out."""


def cases(seed: int) -> list[Case]:
    """Drawn sizes, edge cases among them; then whether a version is named at all."""
    draw = random.Random(seed)
    sizes = [(2, 3), (4, 8), (4, 2), (4, 1), (3, 3), (1, 4)]
    sizes += [(draw.randint(2, 6), draw.randint(1, 9)) for _ in range(4)]
    predictions = Case(f"{len(sizes)} pairs of p and M", part=PREDICTIONS, sizes=sizes)
    return [predictions, Case("your choice", part=CHOICE)]


def run(student: ModuleType, case: Case) -> Any:
    """The prediction for every version, size and stage; or the choice."""
    if case.part == CHOICE:
        return getattr(student, "RIGHT", "")
    predict = student.num_backwards_that_send
    counts = [
        [[predict(version, p, r, M) for r in range(p)] for version in VERSIONS]
        for p, M in case.sizes
    ]
    return {"counts": counts, "edited": edited_versions(student)}


def judge(case: Case, found: Any) -> Result:
    """Against what the versions do. Ranks find out whether the choice is right."""
    if case.part == CHOICE:
        if type(found) is not str or found not in VERSIONS:
            raise Wrong(f'RIGHT is {found!r}; set it to "A", "B" or "C", the version that is right')
        return Result({"RIGHT": found})
    for (p, M), of_size in zip(case.sizes, found["counts"], strict=True):
        for (name, version), counts in zip(VERSIONS.items(), of_size, strict=True):
            for r, count in enumerate(counts):
                expected = _count(version, p, r, M)
                if type(count) is not int:
                    raise Wrong(_not_a_count(name, p, r, M, count))
                if count != expected:
                    words = _words(name, p, r, M, count, expected)
                    raise Wrong(words + about_edited(name, found["edited"]))
    return Result({"predicted": f"{3 * len(case.sizes)} timelines, right on every stage"})


# -- Versions that a student has changed --


def edited_versions(student: ModuleType) -> list[str]:
    """The versions that do something else in the student's file than where they were handed out."""
    theirs, ours = (_bodies(module.__file__) for module in (student, stub))
    names = {letter: f"version_{letter.lower()}" for letter in VERSIONS}
    return [
        letter for letter, name in names.items() if theirs.get(name, "") not in ("", ours[name])
    ]


def _bodies(path: str) -> dict[str, str]:
    """The functions of a file by name, without what does not change what they do."""
    try:
        nodes = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return {}  # edited since it was loaded
    found = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            found[node.name] = "\n".join(map(ast.dump, body))
    return found


def about_edited(version: str, edited: list[str]) -> str:
    """A line for whoever tries out a version that does not count."""
    if version not in edited:
        return ""
    return (
        f"\nVersion {version} of your file is not the one that was handed out. The check runs the "
        "handed-out one."
    )


# -- What they do --


class _Counter:
    """Stands for a `GradSync`, and counts the backwards that run while it is let go."""

    def __init__(self) -> None:
        self.is_let_go, self.num_backwards = False, 0

    def enable(self) -> None:
        self.is_let_go = True

    def disable(self) -> None:
        self.is_let_go = False


def _count(version: Callable, p: int, r: int, M: int) -> int:
    counter = _Counter()
    for _ in version(get_num_warmup_microbatches(p, r, M), M, counter):
        counter.num_backwards += counter.is_let_go
    return counter.num_backwards


def _not_a_count(version: str, p: int, r: int, M: int, found: Any) -> str:
    what = f"{found!r}, a {type(found).__name__}"
    if found is None:
        what = "None (was `return` forgotten?)"
    return f'num_backwards_that_send("{version}", {p}, {r}, {M}) returned {what}; return an int'


def _words(version: str, p: int, r: int, M: int, found: int, expected: int) -> str:
    num_warmup = get_num_warmup_microbatches(p, r, M)
    return (
        f"version {version}, p={p}, M={M}, stage {r}: you predict {found}, but gradients are let "
        f"go during {expected} of its backwards\n"
        f"This stage has {_counted(num_warmup, 'warm-up microbatch', 'es')}, so its steady loop "
        f"runs {_counted(M - num_warmup, 'time')} and its cool-down loop "
        f"{_counted(num_warmup, 'time')}."
    )


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
