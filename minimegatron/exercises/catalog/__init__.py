"""All exercises, in order: one folder each. This file imports no torch, and no exercise's check."""

import importlib
import re
from functools import cache
from pathlib import Path

from minimegatron.exercises.exercise import TIERS, Exercise


@cache
def exercises() -> tuple[Exercise, ...]:
    """Every exercise that is there, in the order in which they are to be done."""
    found = []
    for folder in sorted(Path(__file__).parent.glob("ex[0-9][0-9]*_*")):
        if (folder / "__init__.py").is_file():
            found.append(importlib.import_module(f"{__name__}.{folder.name}").EXERCISE)
    return tuple(sorted(found, key=lambda one: (TIERS.index(one.tier), one.number)))


def find(text: str) -> Exercise:
    """The exercise whose name begins with `text`, or whose number it is: "ex06", "6", "06_one".

    Raises ValueError if there is none, or more than one.
    """
    word = text.strip().removesuffix(".py").lower()
    if match := re.match(r"(?:ex)?(\d+)(.*)", word):
        word = f"ex{int(match[1]):02}{match[2]}"
    fitting = [exercise for exercise in exercises() if exercise.number == word]
    fitting = fitting or [one for one in exercises() if one.name.startswith(word)]
    if not fitting:
        fitting = [exercise for exercise in exercises() if word and word in exercise.name]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(exercise.name for exercise in fitting or exercises()) or "none"
    what = f"{len(fitting)} exercises fit" if fitting else "there is no exercise"
    raise ValueError(f"{what} {text!r}; name one of: {names}")
