"""Ranks without torchrun: calls one function in n processes and returns what each returned.

Megatron has no such module; `torch.multiprocessing.spawn` is the closest, but it starts each
interpreter afresh (seconds per rank here, against milliseconds for a fork of a process that has
imported torch already), and when ranks hang it waits for ever.

What it promises: a rank that raises, dies or hangs is named, with its traceback, its signal or its
Python stack, and no process is left behind, even when the caller is killed. With `hang_timeout`, the
hang doctor watches too, and says who waits for whom, and why.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.backend import in_place_of
from minimegatron.core.datasets.utils import DataError
from minimegatron.core.device_choice import choose_backend, set_device
from minimegatron.core.network import keep_to_loopback, loopback_address
from minimegatron.core.output import keep_printing, take_numbers
from minimegatron.doctor.advice import headline, render_stacks
from minimegatron.doctor.findings import MISMATCH, NOBODY, STUCK, UNKNOWN, Diagnosis
from minimegatron.doctor.flight_recorder import turn_on_recorder
from minimegatron.doctor.folders import keep_sockets, make_folder, remove_folder
from minimegatron.doctor.inquiry import offer_answers
from minimegatron.doctor.observer import start_recording
from minimegatron.doctor.processes import (
    STACK_SIGNAL,
    offer_stacks,
    read_last_words,
    read_stacks,
)
from minimegatron.doctor.records import RAISED, RETURNED, RUNNING
from minimegatron.doctor.shared_record import ROOM_PER_RANK, RecordWriter
from minimegatron.doctor.situation import HIDDEN, OVER, WAITING
from minimegatron.doctor.watch import Watch, record_path, stack_path
from minimegatron.launching.packing import PackedCall, main_left_out, pack

PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "minimegatron.launching.launcher"]
"""Imported once, by the process that ranks are forked from. None of them touches CUDA, which would
not survive the fork. `torch._dynamo` is what a first optimizer step would import, for a second."""

GRACE_SECONDS = 0.2
"""How long after a first failure other ranks may report theirs, so that causes can be told apart
from consequences: when a rank dies, its peers fail too, with a lost connection."""

CAUSE_SECONDS = 3.0
"""The same where all that is known are consequences: ranks that say another one has given up."""


NOTEBOOK_HANG_SECONDS = 10.0
"""In a notebook, `hang_timeout` where the caller gives none. Nobody else watches there."""

MAY_GO_ON = (STUCK, NOBODY, UNKNOWN)
"""What the doctor says of ranks that may only be slow."""


class RankError(RuntimeError):
    """One or more ranks raised or died. `ranks` lists them, the likely cause first."""

    diagnosis: Diagnosis | None = None
    """What the hang doctor says, if it was asked and knows."""
    summaries: Mapping[int, str] = MappingProxyType({})
    """Rank -> the exception it raised, in a line."""
    exit_codes: Mapping[int, int | None] = MappingProxyType({})
    """Rank -> how its process ended before it returned; negative for a signal."""

    def __init__(self, message: str, ranks: list[int]):
        super().__init__(message)
        self.ranks = ranks


class RankTimeout(RankError, TimeoutError):
    """Some ranks did not return in time. `ranks` lists them; the message shows their stacks."""


class HangError(RankError):
    """No rank has moved for `hang_timeout` seconds. `diagnosis` says why, `ranks` who is at fault."""

    def __init__(self, diagnosis: Diagnosis):
        parts = (headline(diagnosis), diagnosis.text, render_stacks(diagnosis.stacks))
        message = "\n\n".join(parts)
        super().__init__(message, list(diagnosis.ranks))
        self.diagnosis = diagnosis

    def __reduce__(self) -> tuple:
        return HangError, (self.diagnosis,)


def launch(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    timeout: float | None = None,
    hang_timeout: float | None = None,
    backend: str | None = None,
    device: str = "auto",
) -> list[Any]:
    """Calls `fn(*args)` in `nprocs` ranks at once; returns their return values, rank 0's first.

    In each rank `torch.distributed` is initialised (and taken down afterwards), torch uses one
    thread, and RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are set as torchrun sets them.
    `fn`, its arguments and its return values travel pickled, tensors by value. Functions at the top
    level of a module always can; with cloudpickle installed, those of a notebook's cell, closures and
    lambdas can too. `timeout` is in seconds, None for no limit. `backend` None
    and `device` "auto" mean NCCL on GPUs where every rank can have one, else gloo. In gloo's place
    stands `minimegatron.backend`, which has gloo inside.

    With `hang_timeout`, in seconds, every rank keeps a record of its calls, and when no rank has
    begun or ended a call for so long, the launch ends with a diagnosis (`minimegatron.doctor`). It
    must be longer than any single call: a slow rank and a stuck one look the same from outside.
    In a notebook, None means 10 s, and then the launch ends only if every rank waits in a call, and
    no debugger is attached; ranks that compute may take as long as they like.

    Raises RankError if a rank raises or dies, RankTimeout if one is not done in time, HangError if
    none moves, ValueError if `nprocs` is below 1 or `fn` cannot be sent.
    """
    options = {"backend": backend, "device": device, "hang_timeout": hang_timeout}
    if hang_timeout is None and is_in_notebook():
        options |= {"hang_timeout": NOTEBOOK_HANG_SECONDS, "only_if_all_wait": True}
    with RankProcesses(fn, nprocs, *args, **options) as ranks:
        return ranks.wait(timeout)


class RankProcesses:
    """The processes behind one `launch`: started by `with`, and stopped by its end.

    `folder` is for files that ranks share with the caller: made if None, removed at the end, also if
    the caller is killed. A caller that gives a folder may watch the ranks there. With
    `only_if_all_wait`, it is not a hang while one of the ranks may go on.
    """

    start_method = "forkserver"
    """"fork" will do where this process was itself forked for the purpose, as the grader's are."""

    def __init__(
        self,
        fn: Callable[..., Any],
        nprocs: int,
        *args: Any,
        backend: str | None = None,
        device: str = "auto",
        hang_timeout: float | None = None,
        only_if_all_wait: bool = False,
        folder: Path | None = None,
    ):
        if nprocs < 1:
            raise ValueError(f"nprocs is {nprocs}; give 1 rank or more")
        if hang_timeout is not None and hang_timeout <= 0:
            raise ValueError(f"hang_timeout is {hang_timeout}; give more than 0, or None")
        self.nprocs = nprocs
        self._job = pack(fn, args)
        self._backend, self._device, self._hang_timeout = backend, device, hang_timeout
        self._only_if_all_wait = only_if_all_wait
        self._folder, self._is_given_folder = folder, folder is not None
        self._watch: Watch | None = None
        self._values: dict[int, Any] = {}
        self._raised: dict[int, _Raised] = {}
        self._died: dict[int, int] = {}

    def __enter__(self) -> "RankProcesses":
        context = multiprocessing.get_context(self.start_method)
        context.set_forkserver_preload(PRELOADED)
        take_numbers()
        if self.start_method == "forkserver":
            keep_sockets()
        # This process, not rank 0, serves the store: it picks a free port without a race, and it
        # outlives every rank.
        self._address = loopback_address()
        self._store = dist.TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        self.processes, self._channels = [], []
        try:
            if self._folder is None:
                self._folder = self._make_folder()
            if self._hang_timeout is not None:
                self._watch = Watch(self._folder, range(self.nprocs), self._hang_timeout)
            for rank in range(self.nprocs):
                seat = self._seat(rank)
                ours, theirs = context.Pipe()
                # Noted before the start: when Ctrl-C comes within it, `stop` closes the channel, and
                # a rank that nobody else knows of ends itself.
                self._channels.append(ours)
                process = context.Process(
                    target=_rank_main, args=(seat, self._job, theirs), name=f"rank {rank}"
                )
                with main_left_out():
                    process.start()
                theirs.close()
                self.processes.append(process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _make_folder(self) -> Path:
        """With room for the ranks' records, if they keep any; else nobody watches, and that is said."""
        if self._hang_timeout is not None:
            try:
                return make_folder("minimegatron-ranks-", num_bytes=self.nprocs * ROOM_PER_RANK)
            except OSError as error:
                self._hang_timeout = None
                words = (
                    f"minimegatron: the hang doctor does not watch these ranks: {error.strerror}"
                )
                print(words, file=sys.stderr, flush=True)
        return make_folder("minimegatron-ranks-")

    def _seat(self, rank: int) -> "_Seat":
        return _Seat(
            rank=rank,
            nprocs=self.nprocs,
            store_address=self._address,
            store_port=self._store.port,
            backend=self._backend,
            device=self._device,
            folder=str(self._folder),
            is_recorded=self._watch is not None,
            is_watched=self._watch is not None or self._is_given_folder,
            environment=dict(os.environ),
        )

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Collects every rank's return value; raises as `launch` does."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while pending := self.unfinished():
            heard = self._listen(pending, deadline)
            if self._raised or self._died:
                self._hear_out(deadline)
                raise self._failure()
            if not heard:
                raise self._timeout(pending, timeout)
        # Only now may ranks leave: one that closed its connections earlier could fail its peers.
        for channel in self._channels:
            _tell(channel, "leave")
        for process in self.processes:
            process.join(timeout=30)
        return [self._values[rank] for rank in range(self.nprocs)]

    def _hear_out(self, deadline: float | None) -> None:
        """Nothing more can succeed: hears who else failed within the grace.

        The other ranks may be waiting for the one that failed. That is not a hang, so the hang
        doctor is not asked.
        """
        began, latest = time.monotonic(), deadline or float("inf")
        heard = True
        while heard and self.unfinished():
            knows_cause = self._died or not all(r.is_consequence for r in self._raised.values())
            grace = GRACE_SECONDS if knows_cause else CAUSE_SECONDS
            heard = self._hear(self.unfinished(), min(latest, began + grace))

    def check(self) -> None:
        """Raises RankError if a rank has raised or died by now."""
        if self.unfinished():
            self._hear(self.unfinished(), time.monotonic())
        if self._raised or self._died:
            raise self._failure()

    def unfinished(self) -> list[int]:
        """The ranks that have neither returned, nor raised, nor died."""
        done = self._values.keys() | self._raised.keys() | self._died.keys()
        return [rank for rank in range(self.nprocs) if rank not in done]

    def _listen(self, ranks: list[int], deadline: float | None) -> bool:
        """Notes the next reports and deaths among `ranks`; False if `deadline` came first.

        Raises HangError if the hang doctor finds, meanwhile, that nobody moves.
        """
        while self._watch is not None:
            soon = time.monotonic() + self._watch.interval
            if deadline is not None and soon >= deadline:
                break
            if self._hear(ranks, soon):
                return True
            self._watch.look()
            if self._watch.is_hung():
                found = self._watch.diagnose()
                if not self._only_if_all_wait or _can_nobody_go_on(found):
                    raise HangError(found)
                self._watch.quiet = 0.0
        return self._hear(ranks, deadline)

    def _hear(self, ranks: list[int], deadline: float | None) -> bool:
        by_source = {self._channels[rank]: rank for rank in ranks}
        by_source |= {self.processes[rank].sentinel: rank for rank in ranks}
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = connection.wait(list(by_source), left)
        for rank in sorted({by_source[source] for source in ready}):
            self._note(rank)
        return bool(ready)

    def _note(self, rank: int) -> None:
        # A report that was sent just before a death still counts, so look for it first.
        report = None
        with contextlib.suppress(EOFError, ConnectionError):
            if self._channels[rank].poll():
                report = self.read_report(self._channels[rank].recv_bytes())
        if report is None:
            self.processes[rank].join(timeout=10)
            self._died[rank] = self.processes[rank].exitcode
        elif isinstance(report, _Raised):
            self._raised[rank] = report
        else:
            self._values[rank] = report.value

    def read_report(self, data: bytes) -> "_Returned | _Raised":
        """What a rank sent. Whoever does not trust the ranks' code unpickles with more care."""
        return pickle.loads(data)

    def _failure(self) -> RankError:
        # A death without a report is a cause; of the exceptions, the earliest is the likeliest.
        died = sorted(self._died)
        raised = sorted(
            self._raised, key=lambda r: (self._raised[r].is_consequence, self._raised[r].at)
        )
        ranks = died + raised
        lines = []
        for rank in died:
            lines.append(f"rank {rank} of {self.nprocs} {_fate(self._died[rank])}")
            lines += filter(None, [read_last_words(stack_path(self._folder, rank))])
        shown = raised if not died else []
        for rank in shown[:1]:
            lines.append(f"rank {rank} of {self.nprocs} raised {self._raised[rank].summary}")
            lines += filter(None, [self._raised[rank].traceback.rstrip()])
        later = [f"rank {rank}: {self._raised[rank].summary}" for rank in raised[len(shown[:1]) :]]
        lines += [f"afterwards, {line}" for line in later]
        if self.unfinished():
            lines.append(f"stopped while running: {_list_ranks(self.unfinished())}")
        # Tensors that do not fit together make some collectives fail and others hang.
        found = None if self._watch is None else self._watch.diagnose_records()
        if found is not None and found.kind == MISMATCH:
            lines += ["", found.text]
        else:
            found = None
        error = RankError("\n".join(lines), ranks)
        error.diagnosis = found
        error.summaries = {rank: self._raised[rank].summary for rank in raised}
        error.exit_codes = dict(self._died)
        return error

    def _timeout(self, ranks: list[int], timeout: float) -> RankTimeout:
        lines = [f"{_list_ranks(ranks)} of {self.nprocs} did not return within {timeout:g} s"]
        for rank, stack in self.python_stacks(ranks).items():
            lines.append(f"--- Python stack of rank {rank}, innermost call first ---")
            lines.append(stack or "(none: the process had not begun)")
        error = RankTimeout("\n".join(lines), ranks)
        error.diagnosis = None if self._watch is None else self._watch.diagnose_records()
        return error

    def python_stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """What each of `ranks` is doing now: its Python stacks, innermost call first.

        Works in a rank stuck inside a C++ wait too; it goes on as before. Empty for a rank whose
        process has not come so far yet.
        """
        pids = {rank: self.processes[rank].pid for rank in ranks}
        return read_stacks(pids, {rank: stack_path(self._folder, rank) for rank in pids})

    def stop(self) -> None:
        """Ends every rank that is still there, and the processes it started. May be repeated."""
        for process in self.processes:
            # A rank that was only just forked does not lead a process group yet.
            if process.is_alive():
                _signal(os.kill, process.pid, signal.SIGKILL)
            _signal(os.killpg, process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join(timeout=10)
        for channel in self._channels:
            channel.close()
        if self._folder is not None:
            remove_folder(self._folder)


# -- In the rank --


@dataclass(frozen=True)
class _Seat:
    """What one rank needs to know to take its place."""

    rank: int
    nprocs: int
    store_address: str
    store_port: int
    backend: str | None
    device: str
    folder: str
    is_recorded: bool
    is_watched: bool
    """By this launch, or by who gave it a folder."""
    environment: dict[str, str]


@dataclass(frozen=True)
class _Returned:
    value: Any


@dataclass(frozen=True)
class _Raised:
    summary: str
    traceback: str
    at: float
    is_consequence: bool = False
    """Another rank was lost, or has given up: that one's report is the one to read."""


def _rank_main(seat: _Seat, job: PackedCall, channel: connection.Connection) -> None:
    os.setpgrp()
    # What came with the fork is never garbage. To look through it would also copy its memory.
    gc.freeze()
    folder, has_reported = Path(seat.folder), threading.Event()
    arguments = (folder, channel, has_reported)
    threading.Thread(target=_die_with_parent, args=arguments, daemon=True).start()
    os.environ.clear()
    os.environ.update(seat.environment)
    torch.set_num_threads(1)
    keep_printing()
    with contextlib.ExitStack() as offered:
        stack_file = offered.enter_context(offer_stacks(stack_path(folder, seat.rank)))
        faulthandler.enable(stack_file)  # a bad access to memory tells where it was
        offered.callback(faulthandler.disable)
        if seat.is_watched:
            turn_on_recorder(os.environ)
            offered.enter_context(offer_answers(folder, seat.rank))
        report = _report(seat, job)
        has_reported.set()
        if not _may_leave(report, channel):
            _end_with_all_it_started(folder)
        faulthandler.unregister(STACK_SIGNAL)
    if dist.is_initialized():
        dist.destroy_process_group()


def _report(seat: _Seat, job: PackedCall) -> bytes:
    """Runs the job; its result or its exception, pickled with what can be pickled."""
    record: RecordWriter | None = None
    try:
        if seat.is_recorded:
            path = record_path(Path(seat.folder), seat.rank)
            record = start_recording(path, seat.rank, seat.nprocs)
        _initialize(seat)
        fn, args = job.unpack()
        _note(record, RUNNING)
        value = fn(*args)
        _note(record, RETURNED)
        return job.pack_result(_Returned(value))
    except BaseException as error:
        _note(record, RAISED)
        # The first frame is this function; the reader wants theirs.
        error.__traceback__ = error.__traceback__.tb_next or error.__traceback__
        summary = traceback.format_exception_only(error)[-1].strip()
        is_consequence = isinstance(error, ConnectionError) or isinstance(
            error.__cause__, ConnectionError
        )
        # Where data are refused, no line of code is at fault.
        story = "" if isinstance(error, DataError) else traceback.format_exc()
        return pickle.dumps(_Raised(summary, story, time.monotonic(), is_consequence))


def _note(record: RecordWriter | None, state: str) -> None:
    if record is not None:
        record.set_state(state)


def _initialize(seat: _Seat) -> None:
    ranks = {"RANK": seat.rank, "LOCAL_RANK": seat.rank}
    sizes = {"WORLD_SIZE": seat.nprocs, "LOCAL_WORLD_SIZE": seat.nprocs}
    os.environ.update({name: str(value) for name, value in (ranks | sizes).items()})
    keep_to_loopback(os.environ)
    set_device(seat.device, seat.rank, seat.nprocs)
    store = dist.TCPStore(seat.store_address, seat.store_port, is_master=False)
    backend = seat.backend or choose_backend(seat.nprocs)
    dist.init_process_group(
        in_place_of(backend), store=store, rank=seat.rank, world_size=seat.nprocs
    )


def _may_leave(report: bytes, channel: connection.Connection) -> bool:
    """Hands in the report, and waits for the word to leave. False if nobody is there any more."""
    try:
        channel.send_bytes(report)
        channel.recv_bytes()
    except (EOFError, ConnectionError):
        return False
    return True


def _die_with_parent(
    folder: Path, channel: connection.Connection, has_reported: threading.Event
) -> None:
    """Ends this rank and all it started when the process that called `launch` is gone.

    Likewise when that process has closed the channel although no report has come through it.
    """
    sentinel = multiprocessing.parent_process().sentinel
    if connection.wait([sentinel, channel]) == [channel] and has_reported.is_set():
        connection.wait([sentinel])
    _end_with_all_it_started(folder)


def _end_with_all_it_started(folder: Path) -> None:
    """For the rank, when nobody is left to do it. Only to exit would leave its processes alive."""
    remove_folder(folder)
    os.killpg(os.getpgrp(), signal.SIGKILL)


# -- In a notebook --


def is_in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    if "IPython" not in sys.modules:
        return False
    return getattr(sys.modules["IPython"].get_ipython(), "kernel", None) is not None


def _can_nobody_go_on(found: Diagnosis) -> bool:
    """Whether every rank that has not ended waits in a call, and for one that will not come."""
    kinds = {seen.kind for seen in found.situations.values()}
    is_sure = found.kind not in MAY_GO_ON and kinds <= {*WAITING, HIDDEN, OVER}
    return is_sure and not _is_debugged()


def _is_debugged() -> bool:
    """Whether a debugger may have stopped this process, or a rank, for somebody to look."""
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12's place for debuggers
    has_tool = monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    debugpy = sys.modules.get("debugpy")
    is_connected = debugpy is not None and debugpy.is_client_connected()
    return sys.gettrace() is not None or has_tool or is_connected


# -- Small helpers --


def _fate(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"ended with exit code {exitcode} before it returned"
    name = signal.Signals(-exitcode).name
    hint = " (the kernel does so when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _list_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _tell(channel: connection.Connection, word: str) -> None:
    with contextlib.suppress(OSError):
        channel.send_bytes(word.encode())


def _signal(send: Callable[[int, int], None], pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, number)
