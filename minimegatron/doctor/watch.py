"""Notices that no rank of this machine moves, and asks what each is doing.

Torch-free. Megatron has no counterpart.

A hang is: every rank has begun, not all have ended, and for `hang_timeout` seconds none of those left
has begun or ended a traced call. A slow rank looks just the same, so the time-out must be longer than
the longest single call; the diagnosis then says whether somebody computes. On a machine that is too
busy, a rank gets longer while one of its threads is ready to run and gets too little of a processor.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from minimegatron.doctor.diagnosis import diagnose
from minimegatron.doctor.findings import Diagnosis
from minimegatron.doctor.flight_recorder import with_device_calls
from minimegatron.doctor.inquiry import Inquiry
from minimegatron.doctor.processes import (
    Sample,
    main_stack,
    read_stacks,
    sample,
    without_own_threads,
)
from minimegatron.doctor.records import RAISED, RETURNED, STARTING, RankRecord
from minimegatron.doctor.shared_record import read_progress, read_record

STARVED_FACTOR = 4
"""How many times the time-out a rank may take that gets less than half of a processor."""


def record_path(folder: Path, rank: int) -> Path:
    """Where a rank's record is."""
    return folder / f"{rank}.record"


def stack_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its stacks when asked."""
    return folder / f"{rank}.stack"


class Watch:
    """Looks at the records of `ranks` now and then; `is_hung` after each look.

    Time counts only while this process itself runs: after all have been stopped and go on (Ctrl-Z,
    a laptop that slept), nobody is accused.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Sequence[int],
        hang_timeout: float,
        read_clock: Callable[[], float] = time.monotonic,
    ):
        self.folder, self.ranks, self.hang_timeout = folder, list(ranks), hang_timeout
        self.interval = min(max(hang_timeout / 20, 0.02), 1.0)
        self._read_clock = read_clock
        self._last_look = read_clock()
        self._seen: dict[int, int] = {}
        self._over: set[int] = set()
        self.quiet = 0.0
        """For how many seconds nobody has moved; 0 before all have begun."""
        self.is_starting = True
        """Whether a rank had not begun yet at the last look."""
        self._samples: dict[int, list[tuple[float, Sample]]] = {rank: [] for rank in self.ranks}

    def look(self) -> None:
        """Reads every rank's counter and its process's state."""
        now = self._read_clock()
        passed = min(now - self._last_look, 2 * self.interval)
        self._last_look = now
        moved = self.is_starting = False
        for rank in self.ranks:
            progress = read_progress(record_path(self.folder, rank))
            if progress is None or progress[0] == STARTING:
                self.is_starting = True
                continue
            state, num_events, _, pid = progress
            if state in (RETURNED, RAISED):
                self._over.add(rank)
            else:  # a live rank begins again, with the next cell
                self._over.discard(rank)
            if self._seen.get(rank) != num_events:
                self._seen[rank] = num_events
                self._samples[rank].clear()
                moved = True
            if (taken := sample(pid)) is not None:
                self._samples[rank].append((now, taken))
                if taken.letter in "ZX":
                    self._over.add(rank)
        self.quiet = 0.0 if moved or self.is_starting else self.quiet + passed

    def is_hung(self) -> bool:
        """Whether nobody has moved for the time-out, and somebody still should."""
        return self.patient_quiet() >= self.hang_timeout and not self.are_all_over()

    def patient_quiet(self) -> float:
        """`quiet`, but less than the time-out while a rank may only lack a processor."""
        if self.quiet >= STARVED_FACTOR * self.hang_timeout:
            return self.quiet
        starved = any(self._is_starved(r) for r in self.ranks if r not in self._over)
        return min(self.quiet, self.hang_timeout / 2) if starved else self.quiet

    def _is_starved(self, rank: int) -> bool:
        samples = self._samples[rank]
        if not samples:
            return False
        ready = sum(taken.is_ready for _, taken in samples)
        used = samples[-1][1].cpu_seconds - samples[0][1].cpu_seconds
        return ready * 2 > len(samples) and used < self.hang_timeout / 2

    def are_all_over(self) -> bool:
        """Whether every rank has ended, one way or another."""
        return self._over.issuperset(self.ranks)

    def records(self) -> list[RankRecord | None]:
        """Every rank's record, with the state of its process."""
        return [self._complete(read_record(record_path(self.folder, r))) for r in self.ranks]

    def _complete(self, record: RankRecord | None) -> RankRecord | None:
        return record and replace(record, process=self._process(self._samples[record.rank]))

    @staticmethod
    def _process(samples: list[tuple[float, Sample]]) -> str | None:
        """What the process has done since its rank moved last."""
        if not samples:
            return None
        (began, first), (until, last) = samples[0], samples[-1]
        if last.letter in "TtZX":
            return "gone" if last.letter in "ZX" else "stopped"
        ready = sum(taken.letter == "R" for _, taken in samples)
        used = last.cpu_seconds - first.cpu_seconds
        is_computing = ready * 2 > len(samples) or used * 2 > until - began > 0
        return "computing" if is_computing else "sleeping"

    def ask(self) -> list[RankRecord]:
        """Every rank's record, its Python stack, what its GPU waits for. Takes up to four seconds."""
        records = self._present()
        pids = {r.rank: r.pid for r in records if r.process not in ("stopped", "gone")}
        inquiry = Inquiry(self.folder, pids)
        stacks = {r: without_own_threads(text) for r, text in inquiry.stacks().items()}
        silent = {rank: pid for rank, pid in pids.items() if not stacks.get(rank)}
        stacks |= read_stacks(silent, {rank: stack_path(self.folder, rank) for rank in silent})
        records = [replace(r, stack=main_stack(stacks.get(r.rank, ""))) for r in records]
        answers = inquiry.answers()
        return [with_device_calls(r, answers.get(r.rank, b"")) for r in records]

    def diagnose(self) -> Diagnosis:
        """Why nobody moves. Takes up to four seconds, for the ranks' answers."""
        return diagnose(self.ask())

    def diagnose_records(self) -> Diagnosis:
        """The same without asking the ranks, at once."""
        return diagnose(self._present())

    def _present(self) -> list[RankRecord]:
        return [record for record in self.records() if record is not None]
