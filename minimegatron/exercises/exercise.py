"""What an exercise is, where its files are, and which exercises there are.

Torch-free: listing exercises starts no torch. Megatron has no counterpart.
"""

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CATALOG = "minimegatron.exercises.catalog"
TIERS = ("warm-up", "core", "stretch")


@dataclass(frozen=True)
class Exercise:
    """One piece of the chain to write. Its texts and programs lie in `folder`."""

    name: str
    """`ex06_one_f_one_b`: its folder's name, and the name of the student's file."""
    title: str
    tier: str
    """One of `TIERS`."""
    minutes: int
    """How long it takes, about."""
    num_ranks: int
    """Processes that the check runs on; 0 if the answer needs none."""
    mirrors: str
    """The dotted path of ours that the student writes again, as `minimegatron.core...`; "" if none."""
    summary: str
    """One sentence: what to write."""
    real: tuple[str, ...] = ()
    """Dotted paths of ours that are shown beside the student's functions, once these are right."""
    question: str = ""
    """What to look for there."""
    older_names: tuple[tuple[str, str], ...] = ()
    """(what the stub names today, what an earlier stub had in its place): a file may have either."""
    older_imports: tuple[str, ...] = ()
    """Modules that an earlier stub imported: nothing is remarked on a file that has them."""
    package: str = CATALOG
    """The package that holds its folder: the catalogue, or one of a teacher's own."""

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise ValueError(f"{self.name}: tier {self.tier!r} is not one of {', '.join(TIERS)}")

    @property
    def number(self) -> str:
        """`ex06`; `ex01b` for what came between two others later.

        >>> Exercise("ex06_one_f_one_b", "1F1B", "core", 40, 4, "", "").number
        'ex06'
        """
        return self.name.partition("_")[0]

    @property
    def module(self) -> str:
        """The dotted path of its folder."""
        return f"{self.package}.{self.name}"

    @property
    def folder(self) -> Path:
        """Where stub, solution, check, hints and page are."""
        package = importlib.util.find_spec(self.package)
        return Path(package.submodule_search_locations[0]) / self.name


@cache
def exercises() -> tuple[Exercise, ...]:
    """Every exercise that is there, in the order in which they are to be done."""
    found = []
    for folder in sorted((Path(__file__).parent / "catalog").glob("ex[0-9][0-9]*_*")):
        if (folder / "__init__.py").is_file():
            found.append(importlib.import_module(f"{CATALOG}.{folder.name}").EXERCISE)
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
    if fitting:
        names = ", ".join(exercise.name for exercise in fitting)
        raise ValueError(f"{len(fitting)} exercises fit {text!r}; name one of: {names}")
    raise ValueError(
        f"there is no exercise {text!r}; `minimegatron exercises list` shows all {len(exercises())}"
    )
