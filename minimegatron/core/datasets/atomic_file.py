"""A file that appears whole or not at all.

Megatron has no counterpart: it writes such files in place.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class CannotWrite(OSError):
    """A file that cannot be written: its name and why, in one sentence. Nothing of it is left."""

    def __str__(self) -> str:
        return f"cannot write {self.filename}: {self.strerror}"


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Within it, an OSError becomes one that names the file: that of a full disk does not."""
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        raise CannotWrite(error.errno, error.strerror or str(error), str(path)) from error


class AtomicFile:
    """Written under a temporary name beside `path`; `publish` gives it its name.

    `complete` puts the content on disk; until `publish` a reader sees what was there before.
    `discard` removes what is not published, and does nothing after `publish`. Missing folders are
    made, unless `makes_folder` is False. Raises CannotWrite, an OSError, as the system does (a full
    disk: ENOSPC).
    """

    def __init__(self, path: str | Path, makes_folder: bool = True):
        self.path = Path(path)
        # The process id keeps two writers of the same file apart; the last to publish wins.
        self._aside = self.path.with_name(f".{self.path.name}.{os.getpid()}.unfinished")
        with writing(self.path):
            if makes_folder:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._aside, "wb")  # noqa: SIM115 - closed by complete or discard

    def write(self, data: Any) -> None:
        """Appends bytes, or the memory of a contiguous array."""
        with writing(self.path):
            self._file.write(data)

    @property
    def file(self):
        """The open binary file, for writers that want one."""
        return self._file

    def complete(self) -> None:
        """Everything written is on disk, and nothing more will be."""
        with writing(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def publish(self) -> None:
        """Takes the place of whatever bears the name."""
        if not self._file.closed:
            self.complete()
        with writing(self.path):
            os.replace(self._aside, self.path)

    def discard(self) -> None:
        """Removes the file unless it was published."""
        # Closing flushes, which fails again on a full disk; the reason is under way already.
        with contextlib.suppress(OSError):
            self._file.close()
        self._aside.unlink(missing_ok=True)


def write_atomically(path: str | Path, data: bytes, makes_folder: bool = True) -> None:
    """`data` as the whole content of `path`. A device, such as /dev/stdout, is written to directly."""
    # Where it is a link, the file that it leads to.
    path = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        with writing(path), open(path, "wb") as device:
            device.write(data)
        return
    file = AtomicFile(path, makes_folder)
    try:
        file.write(data)
        file.publish()
    finally:
        file.discard()
