"""System calls behind a cell: namespaces, mounts, privileges. Linux only; called through libc.

Torch-free. Megatron has no counterpart.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
CAPABILITY_VERSION = 0x20080522

STRANGER = 61_000
"""The user that students' code runs as, when the grader is root: nobody's, by intention."""


def call(name: str, *arguments: object) -> None:
    """Calls a function of libc. Raises OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def enter_namespaces() -> None:
    """Own processes, mounts, network and shared memory from now on (processes: from the next fork)."""
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        call("unshare", flags)
        return
    call("unshare", flags | CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def close_file_system(hidden: Iterable[str], emptied: Iterable[str], num_bytes: int) -> Path:
    """Everything read-only; `hidden`, home and temporary folders empty, small and of memory only.

    Returns a new folder to work in. What Python needs stays visible wherever it lies, but the files
    `emptied` have nothing in them.
    """
    needed = _needed_folders()
    folders = _hidden_folders(hidden, needed)
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, len(attributes))
    if libc.syscall(*arguments) != 0:
        raise OSError(ctypes.get_errno(), "the file system cannot be made read-only")
    _hide(folders, needed, num_bytes)
    for file in emptied:
        _mount(os.devnull, file, None, MS_BIND)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    work = Path("/dev/shm/work")
    work.mkdir()
    return work


def _hidden_folders(hidden: Iterable[str], needed: Iterable[Path]) -> list[Path]:
    """Where other students' files, the teacher's and everybody's temporary ones lie."""
    usual = ["/tmp", "/var/tmp", "/dev/shm", "/dev/pts", "/run", "/home", "/root"]
    names = [*usual, tempfile.gettempdir(), os.path.expanduser("~"), *hidden]
    found = {Path(name).resolve() for name in names if os.path.isdir(name)}
    found -= {Path("/"), Path("/usr"), *needed}
    return [path for path in sorted(found) if not _is_gone(path, found, needed)]


def _is_gone(path: Path, hidden: Iterable[Path], needed: Iterable[Path]) -> bool:
    """Whether a hidden folder around it hides it too; no needed one between them stays visible."""
    around = [other for other in hidden if other in path.parents]
    return any(
        not any(one.is_relative_to(other) and path.is_relative_to(one) for one in needed)
        for other in around
    )


def _needed_folders() -> list[Path]:
    """What Python and its packages are loaded from."""
    names = [sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(None, sys.path)]
    found = {Path(name).resolve() for name in names if os.path.isdir(name)} - {Path("/")}
    return [path for path in sorted(found) if not any(other in path.parents for other in found)]


def _hide(folders: list[Path], needed: Iterable[Path], num_bytes: int) -> None:
    """Each folder empty, but for the needed ones in it; together they may hold `num_bytes`."""
    # The needed folders as they are now: soon they are hidden with what lies around them.
    opened = [(path, os.open(path, os.O_PATH)) for path in needed]
    for folder, place in zip(folders, _empty_folders(folders, num_bytes), strict=True):
        _mount(f"/proc/self/fd/{place}", folder, None, MS_BIND)
        os.close(place)
        for path, file in opened:
            if path.is_relative_to(folder):
                path.mkdir(parents=True)
                _mount(f"/proc/self/fd/{file}", path, None, MS_BIND | MS_REC)
    for _, file in opened:
        os.close(file)


def _empty_folders(folders: list[Path], num_bytes: int) -> list[int]:
    """As many, opened, in one file system in memory."""
    options = f"size={num_bytes},nr_inodes=4096,mode=1777"
    _mount("tmpfs", folders[0], "tmpfs", MS_NOSUID | MS_NODEV, options)
    places = []
    for number in range(len(folders)):
        place = folders[0] / f"place-{number}"
        place.mkdir()
        place.chmod(0o1777)
        places.append(os.open(place, os.O_PATH))
    return places


def _mount(
    source: str, target: str | Path, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    data = None if options is None else options.encode()
    call("mount", *texts, ctypes.c_ulong(flags), data)


def open_loopback() -> None:
    """Ranks talk over 127.0.0.1, which is closed in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def become_stranger(uid: int) -> None:
    """Gives up every privilege for good; as root, becomes user `uid` too."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if sys.platform == "linux":
        header = struct.pack("Ii", CAPABILITY_VERSION, 0)
        with contextlib.suppress(OSError):
            call("capset", header, bytes(24))
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def limit(num_processes: int, num_bytes: int, file_bytes: int) -> None:
    """Limits of this process and all that it starts."""
    for name, most in (
        ("RLIMIT_NPROC", num_processes),
        ("RLIMIT_AS", num_bytes),
        ("RLIMIT_FSIZE", file_bytes),
        ("RLIMIT_NOFILE", 1024),
        ("RLIMIT_CORE", 0),
    ):
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))
