"""What a student's room is asked, and what it says: plain data, since both travel.

Torch-free. Megatron has no counterpart.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from minimegatron.exercises.bench.cases import Case
from minimegatron.exercises.room.plain_data import from_line, to_line

ALONE, CHECK = "alone", "check"
"""The modules of an exercise that ask something: without torch, and on ranks."""


@dataclass(frozen=True)
class Question:
    """What one room is asked: plain data, since it travels."""

    module: str
    """The dotted path of the exercise's `alone` or `check`."""
    num_ranks: int
    cases: str
    """[[name, part, values], ...], as `to_line` writes it."""
    hangs: bool = False
    """Right when the ranks wait for each other for ever."""

    @classmethod
    def of(cls, module: str, num_ranks: int, cases: Sequence[Case]) -> "Question":
        """The question that asks these cases."""
        plain = [[case.name, case.part, case.values] for case in cases]
        return cls(module, num_ranks, to_line(plain), cases[0].hangs)

    @property
    def is_alone(self) -> bool:
        """Whether it needs no ranks, and no torch."""
        return self.module.rpartition(".")[2] == ALONE


@dataclass(frozen=True)
class Collected:
    """All that a room has said, and how it ended: plain data."""

    lines: list[list[str]]
    """Of each rank."""
    ending: str = ""
    """A verdict's kind: `HANG`, `TIMEOUT`, `DIED`, `DEFECT`; "" where all ranks came to their end."""
    text: str = ""
    rank: int | None = None
    printed: Mapping[str, str] = field(default_factory=dict)

    def to_line(self) -> str:
        """One line, for another process."""
        return to_line(asdict(self))

    @classmethod
    def from_line(cls, line: str | bytes) -> "Collected":
        """The inverse. Raises ValueError for anything else."""
        data = from_line(line)
        try:
            found = cls(**data)
        except TypeError as error:
            raise ValueError(f"not what a room collects: {error}") from None
        is_right = isinstance(found.lines, list) and all(
            isinstance(lines, list) and all(isinstance(line, str) for line in lines)
            for lines in found.lines
        )
        if not (is_right and isinstance(found.text, str) and isinstance(found.printed, dict)):
            raise ValueError("not what a room collects: fields of other types")
        return found


def crowding() -> float:
    """How many times slower this machine is for other work that it has: 1 for none, 4 at most."""
    load, _, _ = os.getloadavg()
    return min(4.0, max(1.0, load / (os.cpu_count() or 1)))


def students_lines(stacks: Mapping[int, str], path: str) -> list[str]:
    """Which line of the student's file each rank is at, from its Python stack."""
    found = []
    pattern = re.compile(rf'File "{re.escape(path)}", line (\d+),? in (\S+)')
    source = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    for rank, stack in sorted(stacks.items()):
        if (match := pattern.search(stack)) and int(match[1]) <= len(source):
            number, who = int(match[1]), f"rank {rank} is" if len(stacks) > 1 else "it is"
            text = source[number - 1].strip()
            found.append(f"  {who} at {Path(path).name}:{number}, in {match[2]}:  {text}")
    return ["", "In your file:", *found] if found else []
