"""A closed room for one student's file: it runs there, and everything in it ends with it.

Megatron has no counterpart.

    template -> keeper (init of the room: counts memory, ends all) -> checker -> ranks (student's code)

Three kinds, from strong to weak:

* `NAMESPACES` (Linux): processes, files, network and shared memory of its own. Nobody else is
  visible, no file outside can be written, there is no network, and when the keeper ends the kernel
  ends the rest.
* `OTHER_USER` (the grader is root, but may not make namespaces): user `STRANGER + n` owns the room;
  the system's permissions protect the others. At the end all processes of that user are killed.
* `SAME_USER`: limits, and the end of every process that descends from the room. Against mistakes
  (loops, floods, hangs), not against intent: such code may do all that the teacher may. Only on
  demand.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minimegatron.doctor.folders import make_folder, remove_folder, start_no_keepers
from minimegatron.exercises.grading import isolation
from minimegatron.exercises.grading.isolation import STRANGER

NAMESPACES, OTHER_USER, SAME_USER = "namespaces", "other user", "same user"
LOOK_SECONDS = 0.05
CLEAR_SECONDS = 5.0


@dataclass(frozen=True)
class Limits:
    """What a room may use."""

    seconds: float = 40.0
    memory_bytes: int = 4 << 30
    """Of all its processes together, beyond what they have inherited."""
    num_processes: int = 64
    num_threads: int = 1024
    """Of all its processes together; eight ranks with all their groups have some hundreds."""
    address_bytes: int = 16 << 30
    """Of one process, used or not."""
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    """Of all its files together, which are in memory."""


@dataclass(frozen=True)
class Order:
    """Which room."""

    kind: str
    number: int = 0
    """Rooms that exist at the same time have different ones."""
    limits: Limits = Limits()
    hidden: tuple[str, ...] = ()
    """Folders that nobody inside may see."""
    emptied: tuple[str, ...] = ()
    """Files that nobody inside may read."""


def run_cell(
    connection: socket.socket, order: Order, check: Callable[[Path], Iterable[str]]
) -> None:
    """Runs `check(folder)` in a room; the lines it yields go to `connection`. Does not return.

    To be called in a process forked for this. Ends when `check` does, at a limit, or when the other
    end of `connection` is closed.
    """
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    if sys.platform == "linux":
        isolation.call("prctl", isolation.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if order.kind == NAMESPACES:
        isolation.enter_namespaces()
        if (keeper := os.fork()) != 0:
            # The room is the keeper's. This process stays outside, and only waits.
            connection.close()
            os.waitpid(keeper, 0)
            os._exit(0)
    room = {NAMESPACES: ClosedRoom, OTHER_USER: StrangersRoom, SAME_USER: CellRoom}[order.kind](
        order
    )
    work = room.prepare()
    if (checker := os.fork()) == 0:
        _check(connection, room, work, check)
    ended = _keep(connection, room, checker)
    room.clear()
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps({"ended": ended}).encode() + b"\n")
    os._exit(0)


def _check(
    connection: socket.socket, room: "CellRoom", work: Path, check: Callable[[Path], Iterable[str]]
) -> None:
    """The checker's process: gives up its privileges, then answers."""
    try:
        room.enter()
        os.chdir(work)
        tempfile.tempdir = str(work)
        start_no_keepers()
        nothing, answers = os.open(os.devnull, os.O_RDWR), connection.fileno()
        # Ranks are forked from here, and must not have the way to answer.
        os.register_at_fork(after_in_child=lambda: os.dup2(nothing, answers))
        for line in check(work):
            connection.sendall(line.encode() + b"\n")
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        connection.sendall(json.dumps({"defect": words}).encode() + b"\n")
    except BaseException:
        os._exit(1)
    os._exit(0)


def _keep(connection: socket.socket, room: "CellRoom", checker: int) -> str:
    """Waits until the checker is done, or a limit is reached, or nobody listens; says which."""
    limits, deadline = room.order.limits, time.monotonic() + room.order.limits.seconds
    own_namespace, listener = _namespace(os.getpid()), select.poll()
    listener.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))
    while time.monotonic() < deadline:
        if listener.poll(1000 * LOOK_SECONDS):
            return "nobody listens"
        if (status := dict(_reap()).get(checker)) is not None:
            return "done" if status == 0 else f"the check was killed ({_fate(status)})"
        pids = list(room.members())
        if len(pids) > limits.num_processes:
            return f"it had {len(pids)} processes; {limits.num_processes} are allowed"
        # There it may mount file systems in memory, of any size.
        if any(_namespace(pid) not in ("", own_namespace) for pid in pids):
            return "it made a user namespace of its own, which no exercise needs"
        if (used := room.memory(pids)) > limits.memory_bytes:
            return f"it used {used >> 20} MiB of memory; {limits.memory_bytes >> 20} are allowed"
    return f"it was not over after {limits.seconds:g} s"


def _reap() -> Iterator[tuple[int, int]]:
    """Every child that has ended, adopted ones too, and how."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _fate(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit code {os.waitstatus_to_exitcode(status)}"


# -- Rooms, the weakest first --


class CellRoom:
    """Limits only, for the teacher's own user."""

    def __init__(self, order: Order):
        self.order = order
        self.keeper = os.getpid()
        self.work: Path | None = None
        self._inherited = _held_bytes(self.keeper)

    def prepare(self) -> Path:
        """Makes the folder to work in."""
        # On the disk, not in memory; without a keeper, which would be a process of the room.
        place = Path(tempfile.gettempdir())
        self.work = make_folder("minimegatron-cell-", has_keeper=False, place=place)
        return self.work

    def enter(self) -> None:
        """In the checker, before anything of the student's runs."""
        limits = self.order.limits
        threads = limits.num_threads + self._others()
        isolation.limit(threads, limits.address_bytes, limits.file_bytes)

    def _others(self) -> int:
        """Threads that count for the same limit, and are not of the room."""
        return sum(_num_threads(pid) for pid in _all_pids() if _uid(pid) == os.getuid())

    def members(self) -> Iterator[int]:
        """The processes in the room: whatever descends from its keeper."""
        parents = {pid: _parent(pid) for pid in _all_pids()}
        found = {self.keeper}
        for _ in range(len(parents)):
            more = {pid for pid, parent in parents.items() if parent in found} - found
            if not more:
                break
            found |= more
        return iter(found - {self.keeper})

    def memory(self, pids: Iterable[int]) -> int:
        """Bytes of these processes, without what every fork of the template begins with."""
        pids = list(pids)
        held = sum(max(0, _held_bytes(pid) - self._inherited) for pid in pids)
        return held + _bytes_of_memory_files(pids)

    def clear(self) -> None:
        """Ends whatever is still there, and removes its files."""
        deadline = time.monotonic() + CLEAR_SECONDS
        while (pids := list(self.members())) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            list(_reap())
        remove_folder(self.work)


class StrangersRoom(CellRoom):
    """For a user who owns nothing else."""

    @property
    def uid(self) -> int:
        """The user's number."""
        return STRANGER + self.order.number

    def prepare(self) -> Path:
        """Makes the folder, and gives it to the stranger."""
        work = super().prepare()
        os.chown(work, self.uid, self.uid)
        return work

    def enter(self) -> None:
        """Becomes the stranger."""
        super().enter()
        isolation.become_stranger(self.uid)

    def _others(self) -> int:
        return 0

    def members(self) -> Iterator[int]:
        """Every process of the stranger's."""
        return (pid for pid in _all_pids() if _uid(pid) == self.uid)

    def clear(self) -> None:
        """Kills as the stranger, all at once: nothing can be forked between two looks."""
        deadline = time.monotonic() + CLEAR_SECONDS
        while any(self.members()) and time.monotonic() < deadline:
            if (pid := os.fork()) == 0:
                os.setresuid(self.uid, self.uid, self.uid)
                with contextlib.suppress(OSError):
                    os.kill(-1, signal.SIGKILL)
                os._exit(0)
            os.waitpid(pid, 0)
            list(_reap())
        remove_folder(self.work)


class ClosedRoom(StrangersRoom):
    """With processes, files and a network of its own; this process is its first, number 1."""

    def prepare(self) -> Path:
        """Closes the room around this process."""
        work = isolation.close_file_system(
            self.order.hidden, self.order.emptied, self.order.limits.disk_bytes
        )
        isolation.open_loopback()
        if os.getuid() == 0:
            os.chown(work, self.uid, self.uid)
        return work

    def members(self) -> Iterator[int]:
        """All that can be seen."""
        return (pid for pid in _all_pids() if pid != self.keeper)

    def clear(self) -> None:
        """Nothing: the kernel ends the room with its first process."""


# -- Looking at processes --


def _all_pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _parent(pid: int) -> int:
    return int(_status(pid).get("PPid", 0))


def _uid(pid: int) -> int:
    return int(_status(pid).get("Uid", "-1").split()[0])


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/user")
    except OSError:
        return ""


def _num_threads(pid: int) -> int:
    return int(_status(pid).get("Threads", 0))


def _held_bytes(pid: int) -> int:
    """Memory that no file backs, and what processes share: in `/proc/PID/status` in KiB."""
    status = _status(pid)
    return sum(int(status.get(name, "0").split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def _bytes_of_memory_files(pids: Iterable[int]) -> int:
    """What these processes keep in open files that lie in no folder: nobody's `RssShmem` has it all."""
    files = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path).startswith("/memfd:"):
                        found = os.stat(entry.path)
                        files[found.st_dev, found.st_ino] = 512 * found.st_blocks
    return sum(files.values())
