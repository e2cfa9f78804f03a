"""How long a student waits: `python -m tests.exercises.check_times`.

Every check with the reference solution, as a command; checks of files whose ranks hang; and `watch`,
from the moment at which a file is saved. Beside them an empty Python's time and that of a bare
`import torch`: each figure is the best of three runs, in turn.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from minimegatron.exercises.exercise import exercises, find
from tests.exercises.wrong_solutions import WrongSolution, wrong_solutions

HANGS = (("ex04", "all_stages_receive_first"), ("ex06", "no_cool_down"))
SAVED = ("ex05", "ex06", "ex12")
PURE_SECONDS, RANKS_SECONDS, WATCH_SECONDS = 2.0, 10.0, 1.0
TIMES = 3


def main() -> None:
    """Prints the table; ends with 1 if anything takes longer than it may."""
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors, ", end="")
    print(f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}")
    late = [row(*one) for one in rows()]
    if any(late):
        raise SystemExit(f"{sum(late)} of them take longer than they may")


def rows() -> Iterator[tuple[str, Callable[[], float], float]]:
    """What is measured: its name, how, and how long it may take (0: as long as it likes)."""
    yield "python -c pass", lambda: seconds_of("-c", "pass"), 0.0
    yield "python -c 'import torch'", lambda: seconds_of("-c", "import torch"), 0.0
    for exercise in exercises():
        is_pure = not (exercise.folder / "check.py").is_file()
        kind, limit = ("no ranks", PURE_SECONDS) if is_pure else ("ranks", RANKS_SECONDS)
        solution = exercise.folder / "solution.py"
        yield f"check {exercise.number} ({kind})", partial(check, exercise, solution, 0), limit
    for number, name in HANGS:
        exercise = find(number)
        (wrong,) = (one for one in wrong_solutions(exercise) if one.name == name)
        yield f"check {number}, a hang", partial(check_wrong, wrong), RANKS_SECONDS
    for number in SAVED:
        yield f"watch {number}, pure part saved", partial(watch, number), WATCH_SECONDS


def row(name: str, measure: Callable[[], float], limit: float) -> bool:
    """Prints one; whether it takes longer than it may."""
    found = min(measure() for _ in range(TIMES))
    words = f"   (at most {limit:g})" if limit else ""
    print(f"{found:6.2f} s  {name}{words}", flush=True)
    return bool(limit) and found > limit


def seconds_of(*arguments: str, code: int = 0, folder: str | None = None) -> float:
    """How long Python runs."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode != code:
        raise SystemExit(f"exit code {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")
    return time.monotonic() - began


def check_wrong(wrong: WrongSolution) -> float:
    """The same for a mistake."""
    with tempfile.TemporaryDirectory() as folder:
        return check(wrong.exercise, wrong.write(Path(folder)), 1)


def check(exercise, source: Path, code: int) -> float:
    """How long `check` takes, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(source, Path(folder) / f"{exercise.name}.py")
        words = ("-m", "minimegatron", "exercises", "check", exercise.number)
        return seconds_of(*words, code=code, folder=folder)


def watch(number: str) -> float:
    """How long after a save the verdict on the pure part is there: the stub's docstring, changed."""
    exercise = find(number)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{exercise.name}.py"
        stub = (exercise.folder / "stub.py").read_text(encoding="utf-8")
        seconds_of("-m", "minimegatron", "exercises", "start", number, folder=folder)
        command = [sys.executable, "-m", "minimegatron", "exercises", "watch"]
        with subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as running:
            wait_for("watching", running)
            began = time.monotonic()
            path.write_text(stub + "# changed\n", encoding="utf-8")
            wait_for("[no]", running)
            found = time.monotonic() - began
            running.kill()
        return found


def wait_for(words: str, running: subprocess.Popen) -> None:
    """Reads until the words are there."""
    for line in running.stdout:
        if words in line:
            return
    raise SystemExit(f"watch ended before it said {words!r}")


if __name__ == "__main__":
    main()
