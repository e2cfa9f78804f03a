"""What a check found, as data: made by the engine, printed for students, written down for teachers.

Torch-free. Megatron has no counterpart.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from minimegatron.core.json_text import parse_json
from minimegatron.exercises.room import plain_text

PASSED = "passed"
WRONG = "wrong"
"""The check compared, and it was not right."""
UNWRITTEN = "unwritten"
"""The stub as it is."""
RAISED = "raised"
"""An exception in the student's code."""
HANG = "hang"
TIMEOUT = "timeout"
DIED = "died"
"""A rank's process ended by itself."""
SYNTAX = "syntax"
MISSING = "missing"
"""A function of the stub is no longer there, or the whole file."""
FORGED = "forged"
"""The file changes what checks it."""
DEFECT = "defect"
"""The check itself failed: not the student's fault."""

MOST_PRINTED, MOST_LINES = 160, 10
"""Of what a rank has printed: characters of a line, and lines of the beginning and of the end."""

ROOM_KINDS = (WRONG, UNWRITTEN, RAISED, FORGED, DEFECT)
"""What a student's room may say of itself. It cannot say that all is right."""


@dataclass(frozen=True)
class Verdict:
    """The outcome for one student's file."""

    kind: str
    text: str = ""
    """For the student."""
    case: str = ""
    """The configuration that it failed in."""
    part: str = ""
    """The piece of the exercise that it failed in."""
    rank: int | None = None
    parts: tuple[str, ...] = ()
    """The pieces of the exercise, in their order."""
    passed_parts: tuple[str, ...] = ()
    num_passed: int = 0
    num_cases: int = 0
    achieved: tuple[Mapping[str, Any], ...] = ()
    """Of each case that has passed, with its name under "case"."""
    printed: Mapping[str, str] = field(default_factory=dict)
    """Rank -> what the student's code printed, shortened."""
    replay: str = ""
    """The page that replays the student's run."""
    seconds: float = 0.0

    @property
    def has_passed(self) -> bool:
        """Whether all is right."""
        return self.kind == PASSED

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Verdict":
        """The inverse. Raises ValueError for anything else."""
        try:
            data = parse_json(text, "a verdict")
            lists = {key: tuple(data.get(key, ())) for key in ("achieved", "parts", "passed_parts")}
            return cls(**data | lists)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a verdict: {error}") from error


HEADLINES = {
    PASSED: "All public checks passed",
    WRONG: "Not right yet",
    UNWRITTEN: "Not written yet",
    RAISED: "Your code raised an exception",
    HANG: "Your ranks hang",
    TIMEOUT: "It takes too long",
    DIED: "A rank's process ended",
    SYNTAX: "Python cannot read your file",
    MISSING: "Something is missing",
    FORGED: "Your file changes what checks it",
    DEFECT: "The check itself failed; this is not your fault",
}


def render(verdict: Verdict, name: str) -> str:
    """The verdict for a terminal."""
    mark = "ok" if verdict.has_passed else "no"
    lines = [f"[{mark}] {name}: {HEADLINES[verdict.kind]}"]
    lines += _part_lines(verdict)
    if verdict.case:
        lines.append(f"     in the case: {plain_text.line(verdict.case)}")
    if verdict.text:
        lines += ["", *plain_text.text(verdict.text).splitlines()]
    if verdict.has_passed:
        lines += ["", *_achieved_lines(verdict)]
    elif verdict.num_passed:
        lines += ["", f"{verdict.num_passed} of {verdict.num_cases} cases passed before this one."]
    for rank, text in verdict.printed.items():
        lines += ["", f"Rank {rank} printed:", *_printed_lines(text)]
    if verdict.replay:
        lines += ["", f"Your own run, to replay in a browser: {verdict.replay}"]
    return "\n".join(lines) + "\n"


def _part_lines(verdict: Verdict) -> list[str]:
    """How far each part is; nothing for an exercise of one part, or a file that was not run."""
    if len(verdict.parts) < 2 or not verdict.num_cases:
        return []
    states = dict.fromkeys(verdict.parts, "not judged")
    states |= dict.fromkeys(verdict.passed_parts, "right")
    if verdict.part:
        states[verdict.part] = "not right"
    marks = {"right": "[ok]", "not right": "[no]", "not judged": "[  ]"}
    return [f"     {marks[state]} {part}: {state}" for part, state in states.items()]


def _printed_lines(text: str) -> list[str]:
    """What a rank has printed: the beginning and the end of it."""
    lines = text.splitlines()
    if (left_out := len(lines) - 2 * MOST_LINES) > 0:
        lines[MOST_LINES:-MOST_LINES] = [f"... {left_out} lines left out ..."]
    return [_printed_line(line) for line in lines]


def _printed_line(line: str) -> str:
    words = plain_text.line(line)
    return f"  | {words}" if len(words) <= MOST_PRINTED else f"  | {words[:MOST_PRINTED]} ..."


def _achieved_lines(verdict: Verdict) -> list[str]:
    lines = [f"{verdict.num_cases} configurations checked. What your code achieved:"]
    for achieved in verdict.achieved:
        words = [f"{key} {value}" for key, value in achieved.items() if key != "case"]
        lines.append(f"  {achieved['case']}: {', '.join(words) or 'right'}")
    return lines
