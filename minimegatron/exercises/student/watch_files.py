"""`minimegatron exercises watch`: checks again whenever a file changes, until all has passed.

One process of `runner` lives the whole time, so that only the first check waits for torch.
Torch-free. Megatron has no counterpart.
"""

import contextlib
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from minimegatron.exercises.check.runner import Runner
from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.room.verdict import DEFECT, Verdict, render
from minimegatron.exercises.student import pages
from minimegatron.exercises.student.student_folder import StudentFolder, digest

try:
    import termios
    import tty
except ImportError:  # no such terminal on this system: keys then need Enter
    termios = None

LOOK_SECONDS = 0.2
ANSWER_SECONDS = 120.0
"""Far more than any check takes: the check has its own, shorter limits."""
KEYS = "h hint   r run again   n next   l list   q quit"
CLEAR = "\033[2J\033[3J\033[H"


def watch(folder: StudentFolder, read_key: Callable[[float], str] | None = None) -> int:
    """Runs until everything has passed or the student quits; returns the exit code."""
    with _keys() as keys, Runner() as runner:
        return _Watching(folder, runner, read_key or keys).run()


class _Watching:
    def __init__(self, folder: StudentFolder, runner: Runner, read_key: Callable[[float], str]):
        self.folder, self.runner, self.read_key = folder, runner, read_key
        self.seen: dict[str, str] = {}
        """File -> its digest when it was last checked."""

    def run(self) -> int:
        exercise = self._first()
        while exercise is not None:
            if self._has_changed(exercise):
                passed = self._check(exercise)
                if passed:
                    following = self.folder.next()
                    if following is None:
                        break
                    self._say(f"\nn: on to {following.name}   {KEYS}")
            key = self.read_key(LOOK_SECONDS)
            if key == "q":
                return 0
            exercise = self._obey(key, exercise)
        self._say(pages.ending(self.folder))
        return 0

    def _first(self) -> Exercise | None:
        """The one the student is at, unless it is finished; then the next."""
        following = self.folder.next()
        if self.folder.current:
            current = self.folder.choose(None)
            if not self.folder.is_finished(current):
                return self._open(current)
        return None if following is None else self._open(following)

    def _open(self, exercise: Exercise) -> Exercise:
        if not self.folder.file(exercise).exists():
            self.folder.start(exercise)
            self._say(CLEAR if sys.stdout.isatty() else "")
            self._say(pages.start_words(self.folder, exercise))
            # The stub is known to be unwritten; the first check comes with the first change.
            self.seen[exercise.name] = digest(self.folder.file(exercise))
            self._say(f"\nwatching {self.folder.file(exercise)}   {KEYS}")
        return exercise

    def _has_changed(self, exercise: Exercise) -> bool:
        now = digest(self.folder.file(exercise))
        return bool(now) and self.seen.get(exercise.name) != now

    def _check(self, exercise: Exercise) -> bool:
        path = self.folder.file(exercise)
        self.seen[exercise.name] = checked = digest(path)
        self._say(CLEAR if sys.stdout.isatty() else "")
        if self.folder.is_finished(exercise):
            self._say(f"{exercise.name} has passed as it is; it is not run again.")
            return True
        self._say(f"checking {exercise.name} ...")
        found = self._ask(exercise, path)
        self.folder.note(exercise, found, checked)
        self._say(render(found, exercise.name))
        self._say(pages.after_check(self.folder, exercise, found))
        if not found.has_passed:
            self._say(f"\nwatching {path}   {KEYS}")
        return found.has_passed

    def _ask(self, exercise: Exercise, path: Path) -> Verdict:
        try:
            return self.runner.ask(
                exercise,
                path,
                ANSWER_SECONDS,
                replay=str(self.folder.replay(exercise)),
            )
        except (TimeoutError, RuntimeError) as error:
            self.runner.__exit__()
            self.runner.__enter__()
            return Verdict(DEFECT, str(error))

    def _obey(self, key: str, exercise: Exercise) -> Exercise | None:
        if key == "h":
            number, text = self.folder.hint(exercise)
            self._say(f"\nHint {number}\n\n{text}")
        elif key == "r":
            self.seen.pop(exercise.name, None)
        elif key == "l":
            self._say(pages.overview(self.folder))
        elif key == "n":
            following = self.folder.next()
            return None if following is None else self._open(following)
        return exercise

    def _say(self, text: str) -> None:
        print(text, flush=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for a key for some seconds; "" if none came."""
    if termios is None or not sys.stdin.isatty():
        yield _read_plain
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        yield _read_plain
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _read_plain(seconds: float) -> str:
    if sys.stdin.closed or not select.select([sys.stdin], [], [], seconds)[0]:
        return ""
    text = sys.stdin.read(1)
    if not text:  # the end of the input: nobody will press a key
        time.sleep(seconds)
    return text.lower()
