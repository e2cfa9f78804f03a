"""A process beside the ranks of one machine under torchrun: finds a hang, says why, ends the job.

Torch-free, so that it starts at once and is small; a process of its own, so that it lives when any
rank is stopped or stuck. Megatron has no counterpart.

It ends when the ranks of its machine have, and takes their files along; also when they were killed
before all of them had begun.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from minimegatron.doctor.advice import headline, render_stacks
from minimegatron.doctor.diagnosis import diagnose
from minimegatron.doctor.findings import NOBODY
from minimegatron.doctor.folders import remove_folder
from minimegatron.doctor.machines import END, REPORT, Branch, Head
from minimegatron.doctor.processes import sample
from minimegatron.doctor.records import RETURNED
from minimegatron.doctor.watch import Watch

HANG_EXIT_CODE = 75
"""With which ranks end after a hang: "temporary failure", the one that invites to try again."""

LINGER_SECONDS = 1.0
"""How long ranks may take to end by themselves before they are killed."""

LOST_SECONDS = 30.0
"""How long to wait for ranks or machines that have not come, when those that were here have ended."""

RULE = "=" * 100


def ending_path(folder: Path, rank: int) -> Path:
    """The pipe on which a rank is told to end."""
    return folder / f"{rank}.end"


def port_path(folder: Path) -> Path:
    """Where the head says on which port it listens."""
    return folder / "port"


def main(argv: Sequence[str] | None = None) -> int:
    """Watches until all ranks are over, or hang; then ends them. Returns an exit code."""
    parser = argparse.ArgumentParser(prog="minimegatron hang doctor")
    parser.add_argument("folder", type=Path)
    parser.add_argument("hang_timeout", type=float)
    parser.add_argument("ranks", type=int, nargs="+")
    parser.add_argument("--starter", type=int, required=True, help="the process that started this")
    parser.add_argument("--head-of", type=int, default=0, help="number of other machines")
    parser.add_argument("--branch-of", nargs=2, metavar=("ADDRESS", "PORT"))
    args = parser.parse_args(argv)
    # The token comes by standard input: a command line can be read by everybody on the machine.
    token = sys.stdin.readline().strip()
    # Ctrl-C is for the ranks; this process ends when they have.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch = Watch(args.folder, args.ranks, args.hang_timeout)
    lost = _Lost(watch, args.starter)
    try:
        if args.branch_of:
            address, port = args.branch_of
            return _run_branch(watch, Branch(address, int(port), token), lost)
        return _run_head(watch, Head(args.head_of, token), lost)
    finally:
        remove_folder(args.folder)


class _Lost:
    """Notices that nobody will come any more: the job was killed while it started."""

    def __init__(self, watch: Watch, starter: int):
        self._watch, self._starter = watch, starter
        self._since: float | None = None

    def is_certain(self, all_machines_came: bool = True) -> bool:
        """Whether those who were here have ended long ago, and others have not begun."""
        nobody_left = self._watch.is_starting and not _is_alive(self._starter)
        alone = self._watch.are_all_over() and not all_machines_came
        if not nobody_left and not alone:
            self._since = None
            return False
        if self._since is None:
            self._since = time.monotonic()
        return time.monotonic() - self._since > LOST_SECONDS


def _run_head(watch: Watch, head: Head, lost: _Lost) -> int:
    new = port_path(watch.folder).with_suffix(".new")
    new.write_text(str(head.port))
    os.rename(new, port_path(watch.folder))
    quiet_enough = watch.hang_timeout
    while True:
        time.sleep(watch.interval)
        watch.look()
        head.look()
        if lost.is_certain(head.have_all_come()):
            return 0
        # Where all ranks of this machine have ended, others may still hang.
        mine = float("inf") if watch.are_all_over() else watch.patient_quiet()
        quiet = min(mine, head.quiet())
        if quiet == float("inf"):
            return 0
        if quiet < watch.hang_timeout:
            quiet_enough = watch.hang_timeout
        if quiet < quiet_enough:
            continue
        if _report(watch, head):
            head.tell_end()
            _end_ranks(watch)
            return HANG_EXIT_CODE
        quiet_enough = quiet + watch.hang_timeout


def _report(watch: Watch, head: Head) -> bool:
    """Prints the diagnosis; True if it is a hang, False if no rank waits for another."""
    found = diagnose([*watch.ask(), *head.ask()])
    is_hang = found.kind != NOBODY
    end = f"The job ends here; its ranks exit with code {HANG_EXIT_CODE}."
    parts = (headline(found), found.text, render_stacks(found.stacks))
    text = "\n\n".join([*parts, end if is_hang else "So the job goes on."])
    with contextlib.suppress(OSError):
        # All of it at once, so that other processes' lines do not mix with it; below what may stand
        # on the last line, such as a progress bar.
        os.write(2, f"\n{RULE}\n{text}\n{RULE}\n".encode())
    return is_hang


def _run_branch(watch: Watch, branch: Branch, lost: _Lost) -> int:
    while True:
        time.sleep(watch.interval)
        watch.look()
        if watch.are_all_over() or lost.is_certain():
            return 0
        for wish in branch.look(watch.patient_quiet()):
            if wish == REPORT:
                branch.report(watch.ask())
            elif wish == END:
                _end_ranks(watch)
                return HANG_EXIT_CODE


def _end_ranks(watch: Watch) -> None:
    """Tells the ranks to end, with the exit code of a hang; kills those that cannot hear it."""
    pids = {r.rank: r.pid for r in watch.records() if r is not None and r.state != RETURNED}
    for rank in pids:
        with contextlib.suppress(OSError):
            pipe = os.open(ending_path(watch.folder, rank), os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"\0")
            os.close(pipe)
    deadline = time.monotonic() + LINGER_SECONDS
    while time.monotonic() < deadline and any(map(_is_alive, pids.values())):
        time.sleep(0.05)
    for pid in filter(_is_alive, pids.values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    state = sample(pid)
    return state is None or state.letter not in "ZX"


if __name__ == "__main__":
    sys.exit(main())
