"""A student's folder: the files they write, and a small JSON file of how far they are.

Torch-free. Megatron has no counterpart.

    my-folder/
      .minimegatron.json             what was started, tried, hinted at and passed
      AGENTS.md                      asks a coding assistant for hints instead of solutions
      ex06_one_f_one_b.py            the student's files
      replays/ex06_one_f_one_b.html  their own runs
      labs/gradients-overwritten/    a copy of the package that is broken on purpose
"""

import datetime
import hashlib
import json
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from minimegatron.core.datasets.atomic_file import write_atomically
from minimegatron.core.json_text import parse_json
from minimegatron.exercises.exercise import Exercise, exercises, find
from minimegatron.exercises.labs.faults import FORMER_NAMES
from minimegatron.exercises.room.verdict import HANG, Verdict

STATE = ".minimegatron.json"
VERSION = 1
TUTOR = Path(__file__).parents[1] / "assets" / "AGENTS.md"


@dataclass
class ExerciseProgress:
    """How far a student is with one exercise."""

    started: str = ""
    attempts: int = 0
    hints: int = 0
    """Hints seen."""
    passed: str = ""
    """When it first passed; "" if it never has."""
    passed_file: str = ""
    """The digest of the file that passed last."""
    last_kind: str = ""
    """Of the last check's verdict."""
    last_words: str = ""
    """Of the last check, if it did not pass: the part, the case, and the first line."""


@dataclass
class StudentFolder:
    """The folder and its state. Read by `open`; every change is written at once."""

    path: Path
    current: str = ""
    """The exercise that commands without a name mean."""
    progress: dict[str, ExerciseProgress] = field(default_factory=dict)
    labs: dict[str, dict[str, str]] = field(default_factory=dict)
    """Lab -> "predicted" and, once it was run, "outcome"."""

    @classmethod
    def open(cls, path: Path | str = ".") -> "StudentFolder":
        """Reads the state; an empty one if there is none. Raises ValueError if it is damaged."""
        folder = cls(Path(path))
        file = folder.path / STATE
        if not file.is_file():
            return folder
        try:
            data = parse_json(file.read_bytes(), "its text")
            if data["version"] > VERSION:
                raise ValueError(f"version {data['version']} is newer than {VERSION}")
            folder.current = data["current"]
            folder.labs = {FORMER_NAMES.get(name, name): lab for name, lab in data["labs"].items()}
            folder.progress = {
                name: ExerciseProgress(**one) for name, one in data["progress"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} cannot be read ({error}); delete it to begin a new record, your own files "
                "stay as they are"
            ) from error
        return folder

    def save(self) -> None:
        """Writes the state, whole or not at all."""
        begun = {
            name: one for name, one in sorted(self.progress.items()) if one != ExerciseProgress()
        }
        progress = {name: asdict(one) for name, one in begun.items()}
        data = {"version": VERSION, "current": self.current, "progress": progress}
        text = json.dumps(data | {"labs": self.labs}, indent=1) + "\n"
        write_atomically(self.path / STATE, text.encode())

    def lab(self, name: str) -> Path:
        """Where a lab's copy is."""
        return self.path / "labs" / name

    # -- Exercises --

    def file(self, exercise: Exercise) -> Path:
        """The student's file."""
        return self.path / f"{exercise.name}.py"

    def replay(self, exercise: Exercise) -> Path:
        """The page that replays the student's run."""
        return self.path / "replays" / f"{exercise.name}.html"

    def of(self, exercise: Exercise) -> ExerciseProgress:
        """How far the student is with it."""
        return self.progress.setdefault(exercise.name, ExerciseProgress())

    def choose(self, name: str | None) -> Exercise:
        """The named exercise, or the one the student is at. Raises ValueError if there is none."""
        if name is not None:
            return find(name)
        if not self.current:
            raise ValueError(
                "no exercise is started here; `minimegatron exercises start` starts one"
            )
        return find(self.current)

    def next(self) -> Exercise | None:
        """The first that has not passed; None if all have."""
        open_ones = [one for one in exercises() if not self.of(one).passed]
        return open_ones[0] if open_ones else None

    def start(self, exercise: Exercise) -> Path:
        """Puts the stub here. Raises ValueError if the file is there already."""
        path = self.file(exercise)
        if path.exists():
            raise ValueError(
                f"{path.name} is already here; go on with it, or "
                f"`minimegatron exercises reset {exercise.number}`"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (exercise.folder / "stub.py").read_bytes())
        if not (self.path / "AGENTS.md").exists():
            write_atomically(self.path / "AGENTS.md", TUTOR.read_bytes())
        self.current = exercise.name
        self.of(exercise).started = _now()
        self.save()
        return path

    def reset(self, exercise: Exercise) -> tuple[Path, Path | None]:
        """Brings the stub back. Returns its path, and where the old file went."""
        path, kept = self.file(exercise), None
        if path.exists():
            number = 1
            while (kept := path.with_name(f"{path.stem}.{number}.old")).exists():
                number += 1
            path.rename(kept)
        self.progress.pop(exercise.name, None)
        return self.start(exercise), kept

    def note(self, exercise: Exercise, verdict: Verdict, checked: str) -> None:
        """Writes down what a check found. `checked`: the digest of the file at its beginning."""
        progress = self.of(exercise)
        progress.attempts += 1
        progress.last_kind = verdict.kind
        progress.last_words = "" if verdict.has_passed else failure_words(verdict)
        if verdict.has_passed:
            progress.passed = progress.passed or _now()
            progress.passed_file = checked
        self.current = exercise.name
        self.save()

    def is_finished(self, exercise: Exercise) -> bool:
        """Whether the file, as it is now, has passed."""
        passed = self.of(exercise).passed_file
        return bool(passed) and passed == digest(self.file(exercise))

    # -- Hints --

    def hint(self, exercise: Exercise) -> tuple[int, str]:
        """The next hint, or the last again; its number and text.

        Before the last one, which gives code away, comes one about the last check that failed.
        """
        texts = self.hints(exercise)
        progress = self.of(exercise)
        progress.hints = min(progress.hints + 1, len(texts))
        self.save()
        return progress.hints, texts[progress.hints - 1]

    def hints(self, exercise: Exercise) -> list[str]:
        """All hints, as this student gets them."""
        texts, words = hints(exercise), self.of(exercise).last_words
        if words:
            texts.insert(-1, _hint_on(exercise, words))
        return texts

    # -- Handing in --

    def submit(self, output: Path) -> list[str]:
        """Packs every exercise's file, and the state. Returns the names; ValueError if none is here."""
        paths = [self.file(one) for one in exercises() if self.file(one).is_file()]
        if not paths:
            raise ValueError(f"there is no exercise in {self.path.resolve()}; start one first")
        with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in [*paths, self.path / STATE]:
                if path.is_file():
                    archive.write(path, path.name)
        return [path.name for path in paths]


def hints(exercise: Exercise) -> list[str]:
    """The sections of `hints.md` that begin with `## Hint`, one per hint."""
    return [text for head, text in _sections(exercise) if head.startswith("Hint ")]


def _hint_on(exercise: Exercise, words: str) -> str:
    """About a check that failed with these words: a section `## When "..."` of `hints.md` that fits."""
    lines = ["Your last check said:", "", *(f"    {line}" for line in words.splitlines()), ""]
    for head, text in _sections(exercise):
        if head.startswith('When "') and head[6:].rstrip('"') in words:
            return "\n".join([*lines, text])
    lines.append(
        "Take the smallest case that shows it, and write down on paper what each rank does, line by "
        "line, until you come to what the check said. What should stand there instead, and which line "
        "of your file decides it?"
    )
    return "\n".join(lines)


def _sections(exercise: Exercise) -> list[tuple[str, str]]:
    """Heads and texts of `hints.md`."""
    parts = (exercise.folder / "hints.md").read_text(encoding="utf-8").split("\n## ")
    found = [part.removeprefix("## ").partition("\n") for part in parts]
    return [(head.strip(), text.strip()) for head, _, text in found]


def failure_words(verdict: Verdict) -> str:
    """The part, the case and the first line of what a check said."""
    lines = [
        f"{word}: {text}" for word, text in (("part", verdict.part), ("case", verdict.case)) if text
    ]
    paragraphs = verdict.text.split("\n\n")
    # Of a hang the first line says how long it took, and the second paragraph why.
    chosen = paragraphs[1:2] if verdict.kind == HANG else paragraphs[0].splitlines()[:1]
    return "\n".join([*lines, *chosen])[:1000]


def digest(path: Path) -> str:
    """Tells whether a file has changed; "" if it is not there."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
