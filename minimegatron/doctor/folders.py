"""Folders that processes share, gone when nobody uses them, however their users end.

Torch-free. Megatron has no counterpart.

Three things remove a folder, and each works where the one before it cannot:

1. its maker, by `remove_folder` or at the end of a `with shared_folder(...)`;
2. a *keeper*: a small shell that waits until its maker has ended, also by SIGKILL;
3. the next `make_folder`, if maker and keeper were killed. Both hold a lock on the folder (`flock`)
   while they live, so a folder that can be locked is one that nobody uses.
"""

import atexit
import contextlib
import errno
import fcntl
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"[:4]
"""Part of a folder's name: locks need not work between machines that share a file system."""
OURS = re.compile(rf"minimegatron-\w+-{HOST}-\w+")
IN_MEMORY = Path("/dev/shm")
KEEP = 'trap "" INT TERM HUP; read -r _ || rm -rf -- "$1"'
"""The keeper's program. Its input ends when its maker does; a line before that: nothing is left."""
MOST_SOCKET_BYTES = 100
"""A socket's path may have 104 bytes (macOS) or 108 (Linux)."""
SOCKET_NAME_BYTES = len("/listener-12345678")


@dataclass
class _HeldFolder:
    """A folder that this process has made."""

    lock: int
    pid: int
    has_keeper: bool
    keeper: subprocess.Popen | None
    """None where none was wanted, or none could be started."""


_held: dict[Path, _HeldFolder] = {}
_may_start_keepers = True


def make_folder(
    prefix: str, *, has_keeper: bool = True, place: Path | None = None, num_bytes: int = 0
) -> Path:
    """A new folder, `{prefix}{host}-{random}`, with `prefix` like "minimegatron-ranks-".

    In `place`; for None in memory, where there is such a place and nobody asks for another by TMPDIR:
    a rank that writes to its record must not wait for a disk. Where memory has no room for
    `num_bytes`, as in many a container, on disk. Without a keeper, who uses the folder longest must
    remove it, and hold its lock (`lock_of`) until then. Raises OSError if no place has room.
    """
    place = _place(num_bytes) if place is None else place
    _sweep(place)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{HOST}-", dir=place))
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another process has taken it for a forgotten one, see below
            continue
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_SH)
        # Between its making and its lock another process may have taken it for a forgotten one.
        if folder.exists():
            break
        os.close(lock)
    keeper = _start_keeper(folder, lock) if has_keeper and _may_start_keepers else None
    _held[folder] = _HeldFolder(lock, os.getpid(), has_keeper, keeper)
    return folder


def _places() -> list[Path]:
    """Where a folder may lie, the best place first."""
    try:
        usual = Path(tempfile.gettempdir())
    except FileNotFoundError:  # Python has found none that it can write to
        return [IN_MEMORY]
    return [IN_MEMORY, usual] if usual == Path("/tmp") else [usual, IN_MEMORY, Path("/tmp")]


def _place(num_bytes: int, most_letters: int = 4096) -> Path:
    places = _places()
    for place in places:
        if len(os.fsencode(place)) <= most_letters and has_room(place, num_bytes):
            return place
    limit = "" if most_letters == 4096 else f" and a path of at most {most_letters} letters"
    raise OSError(
        errno.ENOSPC,
        f"no folder for temporary files has room for {num_bytes} bytes{limit} (tried: "
        f"{', '.join(map(str, places))}); set TMPDIR to one that has",
    )


def has_room(folder: Path, num_bytes: int) -> bool:
    """Whether so much can be written there. Asked by writing: a limit may be of several kinds."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return file.write(bytes(num_bytes)) == num_bytes
    except OSError:
        return False


def lock_of(folder: Path) -> int:
    """The descriptor that holds the lock of a folder made here, to hand to another process."""
    return _held[folder].lock


def remove_folder(folder: Path) -> None:
    """Removes it with all that is in it, if it is still there."""
    shutil.rmtree(folder, ignore_errors=True)
    held = _held.pop(folder, None)
    if held is None or held.pid != os.getpid():
        return
    os.close(held.lock)
    if held.keeper is not None:
        with contextlib.suppress(BrokenPipeError):  # a keeper that somebody killed
            if not folder.exists():
                held.keeper.stdin.write(b"\n")
            held.keeper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            held.keeper.wait(timeout=10)


@contextlib.contextmanager
def shared_folder(prefix: str) -> Iterator[Path]:
    """A folder as `make_folder` makes it, for the length of a `with` block."""
    folder = make_folder(prefix)
    try:
        yield folder
    finally:
        remove_folder(folder)


def start_no_keepers() -> None:
    """For a process whose every temporary file is removed by another that outlives it."""
    global _may_start_keepers
    _may_start_keepers = False


def keep_sockets() -> None:
    """Puts the sockets of `multiprocessing` into such a folder, if it has none of its own yet.

    Its fork server listens at a file that would stay after a SIGKILL. Raises OSError where every
    place has too long a path for a socket.
    """
    config = multiprocessing.current_process()._config
    if config.get("tempdir") is not None:
        return
    prefix = "minimegatron-fork-"
    folder_name_bytes = len(f"/{prefix}{HOST}-12345678")
    most_letters = MOST_SOCKET_BYTES - SOCKET_NAME_BYTES - folder_name_bytes
    config["tempdir"] = str(make_folder(prefix, place=_place(0, most_letters)))


def _remove_all() -> None:
    for folder, held in list(_held.items()):
        # A child that was forked from the maker has its list, but not its duties.
        if held.pid == os.getpid() and held.has_keeper:
            remove_folder(folder)


atexit.register(_remove_all)


def _start_keeper(folder: Path, lock: int) -> subprocess.Popen | None:
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", KEEP, "keeper", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[lock],
            # Signals to the maker's process group are not for it: it ends after its maker.
            start_new_session=True,
            cwd="/",
        )
    except OSError:  # no shell, or no more processes allowed: the next run removes the folder
        return None


def _sweep(place: Path) -> None:
    """Removes the folders there that nobody uses any more."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(place):
            if OURS.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_forgotten(Path(entry.path))


def _remove_if_forgotten(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.getuid() in (0, os.fstat(lock).st_uid):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it is in use
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
