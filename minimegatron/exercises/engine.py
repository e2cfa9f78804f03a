"""Checks one student's file: starts its ranks, listens, and says what came of it.

Called by: `minimegatron exercises check` (as a process of its own), `check.main`, the grader, tests.
Calls: `launcher` (ranks and hang doctor), `rank_side` (in the ranks), `source` (before any process
starts). The student's code runs in the ranks only. Megatron has no counterpart.
"""

import argparse
import io
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minimegatron.doctor.folders import shared_folder
from minimegatron.exercises import verdict
from minimegatron.exercises.catalog import find
from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.pipes import Pipes
from minimegatron.exercises.rank_side import Job, check_on_rank, told_verdict
from minimegatron.exercises.source import check_source
from minimegatron.exercises.verdict import Verdict, render
from minimegatron.launcher import HangError, RankError, RankProcesses, RankTimeout
from minimegatron.tracing.trace_view import Trace

HANG_SECONDS = 2.5
"""Nobody begins or ends a call for so long: a hang. A check's own calls are far shorter."""
MOST_SECONDS = 6.0
"""For all cases of a check together; together with what starting takes, below 10 s."""


class StudentRanks(RankProcesses):
    """Ranks whose answers are taken for data only: unpickling them runs no code of theirs."""

    def read_report(self, data: bytes) -> Any:
        """The report, if it consists of plain values."""
        return _PlainUnpickler(io.BytesIO(data)).load()


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in (
            ("minimegatron.launcher", "_Returned"),
            ("minimegatron.launcher", "_Raised"),
        ):
            raise pickle.UnpicklingError(f"a rank sent {module}.{name}, which no check does")
        return super().find_class(module, name)


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
    student's file, but then checks the stub's functions: that must not pass.
    """
    began = time.monotonic()
    found = check_source(exercise, path)
    if found is None:
        job = Job(exercise.module, str(path.resolve()), seed, control=control)
        found = _launch(job, max(1, exercise.num_ranks), patience, replay)
    return replace(found, seconds=time.monotonic() - began)


def _launch(job: Job, num_ranks: int, patience: float, replay: Path | None) -> Verdict:
    if replay is None:
        return replace(ask_ranks(check_on_rank, num_ranks, job, patience, _passed), replay="")
    with shared_folder("minimegatron-check-") as folder:
        job = replace(job, folder=f"{folder}/recordings")
        found = ask_ranks(check_on_rank, num_ranks, job, patience, _passed)
        last = found.replay
        found = replace(found, replay="")
        if last:
            replay.parent.mkdir(parents=True, exist_ok=True)
            Trace.load(last).to_html(replay)
            found = replace(found, replay=str(replay))
    return found


def ask_ranks(
    function: Callable[[Any], Any],
    num_ranks: int,
    job: Any,
    patience: float,
    conclude: Callable[[list[Any]], Verdict],
) -> Verdict:
    """Calls `function(job)` on every rank; the verdict of one that raised Told, or `conclude`'s.

    `job.path` is the file that whoever reads the verdict looks at, `job.pipes` is filled in here.
    """
    with shared_folder("minimegatron-printed-") as folder:
        with Pipes(folder / "pipes", num_ranks) as pipes:
            job = replace(job, pipes=str(pipes.folder))
            found = _ask(function, num_ranks, job, patience, conclude)
        return replace(found, printed=pipes.texts())


def _ask(
    function: Callable[[Any], Any],
    num_ranks: int,
    job: Any,
    patience: float,
    conclude: Callable[[list[Any]], Verdict],
) -> Verdict:
    # A hang is told from slowness by who is ready to run, so it needs less patience.
    hang_timeout = HANG_SECONDS * min(patience, 1.5)
    options = {"backend": "gloo", "device": "cpu", "hang_timeout": hang_timeout}
    try:
        with StudentRanks(function, num_ranks, job, **options) as ranks:
            return conclude(ranks.wait(MOST_SECONDS * patience * _crowding()))
    except HangError as error:
        words = _hang_words(error, job.path)
        return Verdict(verdict.HANG, words, rank=min(error.ranks, default=None))
    except RankTimeout as error:
        return Verdict(verdict.TIMEOUT, _timeout_words(error, job.path))
    except RankError as error:
        return _failed(error)
    except pickle.UnpicklingError as error:
        return Verdict(verdict.FORGED, str(error))


def _passed(found: Sequence[dict[str, Any]]) -> Verdict:
    if any(len(one["achieved"]) != one["num_cases"] or not one["num_cases"] for one in found):
        return Verdict(verdict.FORGED, "a rank says that it is done, and has not run every case")
    achieved = tuple(found[0]["achieved"])
    recording = found[0]["recording"]
    num_cases = len(achieved)
    return Verdict(
        verdict.PASSED,
        num_passed=num_cases,
        num_cases=num_cases,
        achieved=achieved,
        replay=recording,
    )


def _failed(error: RankError) -> Verdict:
    """Of several ranks' verdicts, the earliest that says something."""
    for rank in error.ranks:
        if rank in error.exit_codes:
            return Verdict(verdict.DIED, _died_words(error, rank), rank=rank)
    told = [told_verdict(error.summaries.get(rank, "")) for rank in error.ranks]
    told = [one for one in told if one is not None]
    if not told:
        return Verdict(verdict.DEFECT, str(error))
    # A rank whose partner has left fails in its turn; what the partner said is the cause.
    causes = [one for one in told if not _is_consequence(one)]
    first = (causes or told)[0]
    if error.diagnosis is not None and first.kind != verdict.WRONG:
        return replace(first, text=f"{first.text}\n\n{error.diagnosis.text}")
    return first


def _is_consequence(told: Verdict) -> bool:
    lost = r"Connection (closed|reset)|Connection refused|Broken pipe|gloo.*(closed|reset)"
    return told.kind in (verdict.RAISED, verdict.DEFECT) and bool(re.search(lost, told.text))


def _crowding() -> float:
    """How many times slower this machine is for other work that it has: 1 for none, 4 at most."""
    load, _, _ = os.getloadavg()
    return min(4.0, max(1.0, load / (os.cpu_count() or 1)))


# -- Words --


def _died_words(error: RankError, rank: int) -> str:
    code = error.exit_codes[rank]
    fate = str(error).splitlines()[0]
    if code is not None and code >= 0:
        return f"{fate}. A rank may not leave a step (os._exit?): the others wait for it. Return."
    return f"{fate}."


def _hang_words(error: HangError, path: str) -> str:
    text = error.diagnosis.text
    lines = [str(error).splitlines()[0], "", text, *_where(error.diagnosis.stacks, path)]
    return "\n".join(lines)


def _timeout_words(error: RankTimeout, path: str) -> str:
    stacks = _stacks_in(str(error))
    first = str(error).splitlines()[0]
    lines = [f"{first}; right code takes about one. Is there a loop that does not end?"]
    return "\n".join([*lines, *_where(stacks, path)])


def _stacks_in(message: str) -> dict[int, str]:
    parts = re.split(r"--- Python stack of rank (\d+), innermost call first ---\n", message)
    return {int(rank): text for rank, text in zip(parts[1::2], parts[2::2], strict=True)}


def _where(stacks: dict[int, str], path: str) -> list[str]:
    """Which line of the student's file each rank is at."""
    lines = []
    pattern = re.compile(rf'File "{re.escape(path)}", line (\d+),? in (\S+)')
    for rank, stack in sorted(stacks.items()):
        if match := pattern.search(stack):
            number = int(match[1])
            text = Path(path).read_text().splitlines()[number - 1].strip()
            lines.append(f"  rank {rank} is at {Path(path).name}:{number}, in {match[2]}:  {text}")
    return ["", "In your file:", *lines] if lines else []


# -- As a program --


def exercise_of(path: Path) -> Exercise:
    """The exercise that a file belongs to, by its own name or its folder's."""
    for name in (path.stem, path.resolve().parent.name):
        if re.match(r"ex\d\d", name):
            return find(name[:4])
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
