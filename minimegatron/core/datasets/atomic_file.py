"""A file that appears whole or not at all.

Megatron has no counterpart: it writes such files in place.
"""

import contextlib
import os
from pathlib import Path
from typing import Any


class AtomicFile:
    """Written under a temporary name beside `path`; `publish` gives it its name.

    `complete` puts the content on disk; until `publish` a reader sees what was there before.
    `discard` removes what is not published, and does nothing after `publish`. Missing folders are
    made. Raises OSError as the system does (a full disk: ENOSPC).
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The process id keeps two writers of the same file apart; the last to publish wins.
        self._aside = self.path.with_name(f".{self.path.name}.{os.getpid()}.unfinished")
        self._file = open(self._aside, "wb")  # noqa: SIM115 - closed by complete or discard

    def write(self, data: Any) -> None:
        """Appends bytes, or the memory of a contiguous array."""
        self._file.write(data)

    @property
    def file(self):
        """The open binary file, for writers that want one."""
        return self._file

    def complete(self) -> None:
        """Everything written is on disk, and nothing more will be."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def publish(self) -> None:
        """Takes the place of whatever bears the name."""
        if not self._file.closed:
            self.complete()
        os.replace(self._aside, self.path)

    def discard(self) -> None:
        """Removes the file unless it was published."""
        # Closing flushes, which fails again on a full disk; the reason is under way already.
        with contextlib.suppress(OSError):
            self._file.close()
        self._aside.unlink(missing_ok=True)


def write_atomically(path: str | Path, data: bytes) -> None:
    """`data` as the whole content of `path`."""
    file = AtomicFile(path)
    try:
        file.write(data)
        file.publish()
    finally:
        file.discard()
