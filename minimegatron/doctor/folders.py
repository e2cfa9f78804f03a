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
KEEP = 'trap "" INT TERM HUP; read -r _; rm -rf -- "$1"'
"""The keeper's program. Its input ends when its maker does."""
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


def make_folder(prefix: str, *, has_keeper: bool = True, place: Path | None = None) -> Path:
    """A new folder, `{prefix}{host}-{random}`, with `prefix` like "minimegatron-ranks-".

    In `place`; for None in memory, where there is such a place and nobody asks for another by TMPDIR:
    a rank that writes to its record must not wait for a disk. Without a keeper, who uses the folder
    longest must remove it, and hold its lock (`lock_of`) until then.
    """
    place = _place() if place is None else place
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


def _place() -> Path:
    in_memory, usual = Path("/dev/shm"), tempfile.gettempdir()
    return in_memory if usual == "/tmp" and os.access(in_memory, os.W_OK) else Path(usual)


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

    Its fork server listens at a file that would stay after a SIGKILL.
    """
    config = multiprocessing.current_process()._config
    if config.get("tempdir") is not None:
        return
    folder = make_folder("minimegatron-fork-")
    if len(os.fsencode(folder)) + SOCKET_NAME_BYTES > MOST_SOCKET_BYTES:
        remove_folder(folder)
    else:
        config["tempdir"] = str(folder)


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
