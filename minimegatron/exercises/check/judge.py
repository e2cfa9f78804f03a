"""The judge's own process: it has seed, cases and expected values, and runs no student's code.

Megatron has no counterpart.
"""

import contextlib
import importlib
import json
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minimegatron.exercises.check.engine import Sheet
from minimegatron.exercises.check.runner import ROOT, LineProcess, take_pipes
from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.room.collected import Collected, Question
from minimegatron.exercises.room.verdict import Verdict

PROGRAM = (
    f"import sys; sys.path[:0] = [] if {ROOT!r} in sys.path else [{ROOT!r}]; "
    "from minimegatron.exercises.check.judge import serve; serve()"
)
SECONDS = 60.0
"""Far more than any judgement takes."""
MEMORY = 8 << 30
"""Bytes of addresses; torch alone takes some."""


class Judge(LineProcess):
    """The process. One sheet at a time: `open`, then `judge` for each question, then `verdict`."""

    def __init__(self, environment: dict | None = None):
        super().__init__([sys.executable, "-P", "-s", "-c", PROGRAM], environment)

    def open(self, exercise: Exercise, seed: int) -> list[Question]:
        """Begins a sheet; what the student's room is to be asked."""
        found = self._ask(do="open", exercise=exercise.module, seed=seed)
        return [Question(**one) for one in found]

    def judge(self, number: int, collected: Collected) -> bool:
        """Judges what came of question `number`; whether the next one makes sense."""
        return self._ask(do="judge", number=number, collected=collected.to_line())

    def verdict(self, replay: Path | None = None) -> Verdict:
        """All in all."""
        text = self._ask(do="verdict", replay=None if replay is None else str(replay))
        return Verdict.from_json(text)

    def _ask(self, **question: Any) -> Any:
        answer = json.loads(self.answer(question, SECONDS))
        if "error" in answer:
            raise RuntimeError(f"the check itself failed: {answer['error']}")
        return answer["answer"]


# -- The process --


def serve() -> None:
    """Answers until its input ends."""
    questions, answers = take_pipes()
    # macOS has no limit on memory.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    desk = _Desk()
    with questions, answers:
        for line in questions:
            try:
                answer = {"answer": desk.do(**json.loads(line))}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


class _Desk:
    """What the process holds between two questions."""

    sheet: Sheet

    def do(self, do: str, **arguments: Any) -> Any:
        """One of the three."""
        return {"open": self.open, "judge": self.judge, "verdict": self.verdict}[do](**arguments)

    def open(self, exercise: str, seed: int) -> list[dict[str, Any]]:
        """See `Judge.open`."""
        self.sheet = Sheet(importlib.import_module(exercise).EXERCISE, seed)
        return [asdict(question) for question in self.sheet.questions]

    def judge(self, number: int, collected: str) -> bool:
        """See `Judge.judge`."""
        return self.sheet.judge(number, Collected.from_line(collected))

    def verdict(self, replay: str | None) -> str:
        """See `Judge.verdict`."""
        return self.sheet.verdict(None if replay is None else Path(replay)).to_json()
