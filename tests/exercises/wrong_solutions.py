"""Known mistakes, as patches of the reference solutions.

In `wrong/` is one file per exercise, with a table per mistake: `why` it is one, what the verdict
`says` of it, and how it differs from the exercise's `solution.py`:

    change   texts of the reference, each with another in its place
    body     function -> other statements, where hardly any of the reference's would be left
    imports  what those need
    hangs    whether its ranks wait for each other for ever
    full     whether `make test` leaves the mistake to `make test-full`. Of the others it makes the
             first two of each exercise on ranks, and all of those without ranks (`test_catalog`)

A mistake whose name begins with `does_nothing_` does nothing clever: it returns its input or a
constant, is what one process would do, ignores an argument, hides nothing, frees nothing. Such a
file must fail.

Functions of the reference that the mistake does without stay in the file, unused.
"""

import ast
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimegatron.exercises.exercise import Exercise

FOLDER = Path(__file__).parent / "wrong"
ONE_OF_MANY = re.compile(
    r"(?<![\w.,/=\[-])(?<!- )1 (ranks|stages|microbatches|tokens|layers|forwards|backwards|gradients|"
    r"rows|elements|items|numbers|chunks|boxes|tensors|messages|entries|parameters|words)\b"
)
"""A count of one that is written as of many, in anything a check says."""


@dataclass(frozen=True)
class WrongSolution:
    """One mistake."""

    exercise: Exercise
    name: str
    patch: Mapping[str, Any]

    @property
    def says(self) -> str:
        """What the student must be told, with single spaces."""
        return " ".join(self.patch["says"].split())

    @property
    def is_for_full(self) -> bool:
        """Whether `make test` leaves it out."""
        return self.patch.get("full", False)

    @property
    def does_nothing(self) -> bool:
        """Whether it does nothing clever: the input, a constant, the first line that comes to mind."""
        return self.name.startswith("does_nothing_")

    @property
    def hangs(self) -> bool:
        """Whether its ranks wait for each other for ever."""
        return self.patch.get("hangs", False)

    @property
    def text(self) -> str:
        """The file. Raises ValueError where the patch does not fit the reference."""
        return patched((self.exercise.folder / "solution.py").read_text(), self.patch)

    def write(self, folder: Path) -> Path:
        """Writes the file; returns where it is."""
        path = folder / f"{self.name}.py"
        path.write_text(self.text)
        return path


def wrong_solutions(exercise: Exercise) -> list[WrongSolution]:
    """Those of one exercise."""
    tables = tomllib.loads((FOLDER / f"{exercise.name}.toml").read_text())
    return [WrongSolution(exercise, name, patch) for name, patch in tables.items()]


def patched(reference: str, patch: Mapping[str, Any]) -> str:
    """The text with the mistake in it."""
    unknown = patch.keys() - {"why", "says", "change", "body", "imports", "hangs", "full"}
    if unknown:
        raise ValueError(f"a patch has no {', '.join(sorted(unknown))}")
    text = reference
    for change in patch.get("change", []):
        old, new = change["old"], change["new"]
        if (found := reference.count(old)) != 1:
            raise ValueError(f"stands {found} times in the reference, not once:\n{old}")
        if (found := text.count(old)) != 1:
            raise ValueError(f"stands {found} times in what the changes before it left:\n{old}")
        text = text.replace(old, new)
    for name, body in patch.get("body", {}).items():
        text = _with_body(text, name, body)
    if "imports" in patch:
        lines = text.splitlines()
        after_docstring = ast.parse(text).body[0].end_lineno
        lines[after_docstring:after_docstring] = ["", patch["imports"]]
        text = "\n".join(lines) + "\n"
    return text


def _with_body(text: str, name: str, body: str) -> str:
    """The text, with other statements in the function."""
    found = [node for node in ast.parse(text).body if getattr(node, "name", None) == name]
    if len(found) != 1:
        raise ValueError(f"the reference has {len(found)} functions {name}, not one")
    statements = found[0].body[1:] if ast.get_docstring(found[0]) else found[0].body
    lines = text.splitlines()
    lines[statements[0].lineno - 1 : found[0].end_lineno] = body.splitlines()
    return "\n".join(lines) + "\n"
