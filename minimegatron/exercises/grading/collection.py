"""What one student handed in, as it is found: the files that may be graded, and what is in the way.

Torch-free. Megatron has no counterpart.

Nothing here is unpacked to disk, and of all files only those named after an exercise are read.
"""

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from minimegatron.exercises.grading.file_names import (
    exercise_number,
    is_hidden,
    path_parts,
    without_archive_suffix,
    without_unread_suffix,
)

MOST_BYTES = 1 << 20
"""Of one student's file."""
MOST_FILES = 20_000
"""In one folder or archive."""
MOST_TAKEN = 100
MOST_TAKEN_BYTES = 4 << 20
"""Files that are named after an exercise, of one folder or archive, and their bytes together."""
MOST_PROBLEMS = 20
"""That are told of one student."""

FILE, FOLDER, LINK = "a plain file", "a folder", "a link"
DEVICE = "a device, a pipe or a socket"


@dataclass(frozen=True)
class Found:
    """A file named after an exercise."""

    name: str
    """Its path in what the student handed in."""
    data: bytes
    version: tuple[int, int] = (0, 0)
    """As `ExportedName` has it: the later one counts."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Folders, and the file's name."""
        return path_parts(self.name)


@dataclass
class Collection:
    """Files and problems; `take` looks at one file after the other."""

    files: list[Found] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unopened: list[str] = field(default_factory=list)
    """Archives that were not opened: of a kind that is not read, or within another archive."""

    def take(
        self,
        name: str,
        kind: str,
        num_bytes: int,
        read: Callable[[], bytes],
        version: tuple[int, int] = (0, 0),
    ) -> None:
        """Reads the file if it may be graded; whatever is wrong with it becomes a problem."""
        parts = path_parts(name)
        if not parts or is_hidden(parts):
            return
        if kind == FILE and (without_archive_suffix(parts[-1]) or without_unread_suffix(parts[-1])):
            self.unopened.append(name)
        if exercise_number(parts[-1]) is None:
            return
        if len(self.files) >= MOST_TAKEN or self._num_bytes() > MOST_TAKEN_BYTES:
            problem = (
                f"more than {MOST_TAKEN} files or {MOST_TAKEN_BYTES} bytes are named after an "
                "exercise; no more are read"
            )
            if problem not in self.problems:
                self.problem(problem)
        elif kind != FILE:
            self.problem(f"{short(name)} is {kind}, not {FILE}; it is not read")
        elif num_bytes > MOST_BYTES:
            self.problem(f"{short(name)} has {num_bytes} bytes; {MOST_BYTES} are allowed")
        else:
            try:
                self.files.append(Found(name, read(), version))
            except Exception as error:
                self.problem(f"{short(name)} cannot be read: {reason(error)}")

    def _num_bytes(self) -> int:
        return sum(len(one.data) for one in self.files)

    def problem(self, words: str) -> None:
        """Notes what the teacher should know."""
        self.problems.append(words)

    def add(self, other: "Collection", prefix: str = "") -> None:
        """Takes over what was found elsewhere, for instance in an archive called `prefix`."""
        before, about = (f"{prefix}/", f"{short(prefix)}: ") if prefix else ("", "")
        self.files += [Found(before + x.name, x.data, x.version) for x in other.files]
        self.problems += [about + words for words in other.problems]
        self.unopened += [before + name for name in other.unopened]


def short(name: str) -> str:
    """A path for a sentence: of a very long one, the end."""
    return name if len(name) <= 120 else f"...{name[-100:]}"


def reason(error: BaseException) -> str:
    """Why, in words that name no folder of the teacher's."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnicodeError):
        return "a name in it is not UTF-8"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def open_plain(path: Path) -> int:
    """The number of an open file. Raises OSError for links, pipes and all else; never waits."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, f"not {FILE}")
    return file


def read_plain(path: Path) -> bytes:
    """What the file holds. Raises OSError, and ValueError if it has grown too large."""
    with open(open_plain(path), "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    return data


def kind_of(mode: int) -> str:
    """FILE, FOLDER, LINK or DEVICE."""
    kinds = {stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER, stat.S_IFLNK: LINK}
    return kinds.get(stat.S_IFMT(mode), DEVICE)
