"""Finds the students' files in a folder of submissions, and reads them.

Called by: `grade`. Torch-free. Megatron has no counterpart.

Each folder or .zip file in it is one student's; a folder that holds exercises itself is one
submission. Nothing is unpacked to disk, links are not followed, and of all files only those named
after an exercise are read.
"""

import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from minimegatron.exercises.catalog import exercises

MOST_BYTES = 1 << 20
MOST_FILES = 2000
FILE = re.compile(r"ex\d\d(_\w+)?\.py")


@dataclass(frozen=True)
class Submission:
    """One student's files: exercise -> source."""

    student: str
    sources: dict[str, str]
    problems: tuple[str, ...] = field(default=())
    """What could not be read."""


def find_submissions(folder: Path) -> list[Submission]:
    """Every student's. Raises ValueError if there is none."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder; give one that holds a folder or zip per student"
        )
    if any(FILE.fullmatch(path.name) for path in folder.iterdir()):
        return [_read(folder.resolve().name, _files_in(folder))]
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name.startswith("."):
            continue
        if path.is_dir():
            found.append(_read(path.name, _files_in(path)))
        elif path.suffix == ".zip":
            found.append(_read_zip(path))
    if not found:
        raise ValueError(f"{folder} holds neither folders nor zip files of students")
    return found


def _files_in(folder: Path) -> Iterator[tuple[PurePosixPath, int, object]]:
    """Name, size and a function that reads, of each plain file."""
    for number, path in enumerate(sorted(folder.rglob("*"))):
        if number >= MOST_FILES:
            return
        if path.is_file() and not path.is_symlink():
            name = PurePosixPath(path.relative_to(folder).as_posix())
            yield name, path.stat().st_size, path.read_bytes


def _read_zip(path: Path) -> Submission:
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(path.stem, _files_in_zip(archive))
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
        return Submission(path.stem, {}, (f"{path.name} cannot be opened: {error}",))


def _files_in_zip(archive: zipfile.ZipFile) -> Iterator[tuple[PurePosixPath, int, object]]:
    for info in archive.infolist()[:MOST_FILES]:
        yield PurePosixPath(info.filename), info.file_size, _Reader(archive, info)


class _Reader:
    """Reads one file of an archive, but no more than its stated size."""

    def __init__(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo):
        self.archive, self.info = archive, info

    def __call__(self) -> bytes:
        with self.archive.open(self.info) as file:
            return file.read(MOST_BYTES + 1)


def _read(student: str, files: Iterable[tuple[PurePosixPath, int, object]]) -> Submission:
    by_number = {one.number: one.name for one in exercises()}
    sources: dict[str, tuple[int, str]] = {}
    problems = []
    for name, size, read in files:
        if not FILE.fullmatch(name.name) or name.name[:4] not in by_number:
            continue
        if size > MOST_BYTES:
            problems.append(f"{name} has {size} bytes; {MOST_BYTES} are allowed")
            continue
        exercise, depth = by_number[name.name[:4]], len(name.parts)
        if exercise in sources and sources[exercise][0] <= depth:
            problems.append(f"{name} is a second file for {exercise}; the first is graded")
            continue
        try:
            sources[exercise] = depth, read().decode()
        except (UnicodeDecodeError, OSError, zipfile.BadZipFile, RuntimeError) as error:
            problems.append(f"{name} cannot be read: {error}")
    return Submission(student, {key: text for key, (_, text) in sources.items()}, tuple(problems))
