"""`live_ranks(4)`: starts ranks that run cells and keep their variables, and watches over them.

Megatron has no counterpart.
"""

import atexit
import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minimegatron.doctor.findings import Diagnosis
from minimegatron.doctor.folders import make_folder, remove_folder
from minimegatron.doctor.shared_record import ROOM_PER_RANK
from minimegatron.doctor.watch import Watch
from minimegatron.launching import launcher

try:
    import ipyparallel
    from IPython import get_ipython

    from minimegatron.notebook.engines import (
        connection_file,
        is_written,
        move_to_device,
        on_the_host,
        serve_controller,
        serve_rank,
        take_cell_number,
    )
    from minimegatron.notebook.magics import CellError, RankMagics, places, show, show_errors
except ImportError as error:
    raise ImportError(
        f"live ranks need ipyparallel ({error}); pip install 'minimegatron[notebooks]'"
    ) from error

STARTS = 3
"""How often the ranks are started, if their controller ends: see `engines.serve_controller`."""
START_SECONDS = 300
"""Under heavy load, 120 s were not enough. A process that has ended is noticed at once."""
ANSWER_SECONDS = 10.0
"""How long the controller may take to answer the notebook; then it is asked again."""
NEWS_SECONDS = 5.0
"""After these the notebook asks again which ranks there are."""
GREETING_SECONDS = 1.0
"""After these a rank that has not answered is asked again."""
INTERRUPT_SECONDS = 1.0
"""How long an interrupted rank may take to come to Python; one inside a message never does."""
NEXT_INTERRUPT_SECONDS = 3.0
"""After which it is interrupted again: one that had not begun the cell yet has lost the first."""
LONGEST_INTERRUPT_SECONDS = 20.0
"""How long it may take where no rank is inside a message: on a busy machine, in a long computation."""
AFTER_ERROR_SECONDS = 1.0
"""When a rank has raised, how long the others may stand still before the doctor is asked."""
LOOK_SECONDS = 0.05

FRESH = "Fresh ranks have taken their place, without variables: run the cells above once more."

_current: "LiveRanks | None" = None


class ControllerError(RuntimeError):
    """The controller of live ranks has ended while they were starting."""


def live_ranks(num_ranks: int, hang_timeout: float = 5.0, device: str = "auto") -> "LiveRanks":
    """Starts `num_ranks` ranks for `%%px` cells, in place of earlier ones; says what they run on.

    If no rank moves for `hang_timeout` seconds of a cell and the hang doctor finds that none ever
    will, the ranks are ended and fresh ones started. For `device` see `choose_place`.
    """
    global _current
    if _current is not None:
        _current.stop()
    _current = LiveRanks(num_ranks, hang_timeout, device)
    shell = get_ipython()
    if shell is not None:
        shell.register_magics(RankMagics(shell, _current.run))
    return _current


class RanksPlace(NamedTuple):
    """What live ranks run on."""

    device: str
    backend: str
    text: str


def choose_place(num_ranks: int, device: str = "auto") -> RanksPlace:
    """NCCL where every rank can have a GPU of its own, else gloo on the CPU; `device` "cpu" or "cuda"
    says otherwise, and with "cuda" ranks share GPUs, over gloo, when they outnumber them. In gloo's
    place stands `minimegatron.backend`, which has gloo inside.

    Raises ValueError for another name, and for "cuda" without a GPU. The GPUs are counted, not used:
    the notebook's own process holds none of their memory.

    >>> choose_place(2, "cpu")[:2]
    ('cpu', 'gloo')
    """
    num_gpus = torch.cuda.device_count()
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f'device is {device!r}; use "auto", "cpu" or "cuda"')
    if device == "cuda" and num_gpus == 0:
        raise ValueError('device is "cuda" but torch sees no GPU here; use "cpu" or "auto"')
    if device == "cpu" or (device == "auto" and num_gpus < num_ranks):
        return RanksPlace("cpu", "gloo", f"the CPU, one thread each (GPUs here: {num_gpus})")
    if num_gpus < num_ranks:
        return RanksPlace("cuda", "gloo", f"{num_gpus} GPUs, which they share")
    backend = "nccl" if dist.is_nccl_available() else "gloo"
    return RanksPlace("cuda", backend, f"{num_ranks} of {num_gpus} GPUs, one each")


class LiveRanks:
    """Ranks that stay alive between cells. `ranks["x"]` is the value of `x` on each of them."""

    def __init__(self, num_ranks: int, hang_timeout: float = 5.0, device: str = "auto"):
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; give 1 rank or more")
        self.num_ranks, self.hang_timeout = num_ranks, hang_timeout
        self.device, self.backend, on = choose_place(num_ranks, device)
        self._open = contextlib.ExitStack()
        begun = time.monotonic()
        self._start()
        atexit.register(self.stop)
        word = "rank" if num_ranks == 1 else "ranks"
        print(
            f"{num_ranks} live {word}, {self.backend}, on {on}; "
            f"started in {time.monotonic() - begun:.1f} s"
        )

    def __repr__(self) -> str:
        state = ", stopped" if self._is_stopped else ""
        return f"<{self.num_ranks} live ranks, {self.backend}{state}>"

    # -- Start and end --

    def _start(self) -> None:
        self._is_stopped = False
        for num_left in reversed(range(STARTS)):
            try:
                return self._start_once()
            except ControllerError:
                if num_left == 0:
                    raise

    def _start_once(self) -> None:
        with contextlib.ExitStack() as opened:
            room = self.num_ranks * ROOM_PER_RANK
            self._folder = make_folder("minimegatron-live-", num_bytes=room)
            opened.callback(remove_folder, self._folder)
            folder = str(self._folder)
            controller = launcher.RankProcesses(serve_controller, 1, folder, device="cpu")
            self._controller = opened.enter_context(controller)
            self._processes = launcher.RankProcesses(
                serve_rank,
                self.num_ranks,
                folder,
                backend=self.backend,
                device=self.device,
                folder=self._folder,
            )
            opened.enter_context(self._processes)
            self._client = self._connect(controller)
            opened.callback(self._client.close)
            self._open = opened.pop_all()

    def _connect(self, controller: launcher.RankProcesses) -> Any:
        """A client that every engine answers; raises RankError if a process ends meanwhile."""
        give_up = time.monotonic() + START_SECONDS
        path = connection_file(self._folder, "client")
        while not is_written(path):
            self._check_start(controller, give_up)
            time.sleep(LOOK_SECONDS)
        while True:
            self._check_start(controller, give_up)
            with contextlib.ExitStack() as unless_ready:
                try:
                    client = ipyparallel.Client(str(path), timeout=ANSWER_SECONDS)
                except TimeoutError:  # a first question was not answered in 30 s, on a busy machine
                    continue
                unless_ready.callback(client.close)
                if self._knows_all(client, controller, give_up):
                    self._greet(client, controller, give_up)
                    unless_ready.pop_all()
                    return client

    def _knows_all(self, client: Any, controller: launcher.RankProcesses, give_up: float) -> bool:
        """Whether the client has heard of every engine, some seconds after it was made.

        One that is registered after the controller has counted its engines for the client, but before
        the client listens to its news, is never heard of. A new client is told of it at once.
        """
        end = time.monotonic() + NEWS_SECONDS
        while len(client.ids) < self.num_ranks and time.monotonic() < end:
            self._check_start(controller, give_up)
            time.sleep(LOOK_SECONDS)
        return len(client.ids) == self.num_ranks

    def _greet(self, client: Any, controller: launcher.RankProcesses, give_up: float) -> None:
        greetings: dict[int, list[Any]] = {rank: [] for rank in range(self.num_ranks)}
        while silent := [r for r, sent in greetings.items() if not any(x.ready() for x in sent)]:
            # What is sent to an engine before its connection is complete is lost without a word.
            for rank in silent:
                greetings[rank].append(client[rank].apply_async(os.getpid))
            concurrent.futures.wait([sent[-1] for sent in greetings.values()], GREETING_SECONDS)
            self._check_start(controller, give_up)

    def _check_start(self, controller: launcher.RankProcesses, give_up: float) -> None:
        try:
            controller.check()
        except launcher.RankError as error:
            raise ControllerError(
                f"live ranks did not start, in {STARTS} attempts: {error}"
            ) from None
        self._processes.check()
        if time.monotonic() > give_up:
            raise TimeoutError(
                f"{self.num_ranks} live ranks did not start within {START_SECONDS} s; "
                "is the machine very busy? Run the cell again, or ask for fewer"
            )

    def stop(self) -> None:
        """Ends the ranks and all that belongs to them. May be repeated."""
        self._open.close()
        self._is_stopped = True
        atexit.unregister(self.stop)

    def restart(self) -> None:
        """Fresh ranks, without the variables of the old ones."""
        self._open.close()
        self._start()

    # -- Cells --

    def run(self, cell: str, ranks: Iterable[int] | None = None) -> None:
        """Runs `cell` on `ranks` (None: all) and shows what they print, ordered by rank.

        Raises CellError if a rank raises, after showing each failing rank's traceback.
        """
        chosen = list(range(self.num_ranks)) if ranks is None else sorted(set(ranks))
        if absent := [rank for rank in chosen if not 0 <= rank < self.num_ranks]:
            raise ValueError(f"there is no rank {absent[0]}; ranks are 0 to {self.num_ranks - 1}")
        self._check_alive()
        if (shell := get_ipython()) is not None:
            # `execution_count` may be the next cell's already.
            number = len(shell.history_manager.input_hist_parsed) - 1
            for rank in chosen:
                self._client[rank].apply_async(take_cell_number, number)
        replies = {
            rank: self._client[rank].execute(cell, silent=False, block=False) for rank in chosen
        }
        watch = Watch(self._folder, range(self.num_ranks), self.hang_timeout)
        try:
            diagnosis = self._wait(replies, watch)
        except KeyboardInterrupt:
            diagnosis = self._interrupt(replies, watch)
        lost = [rank for rank, reply in replies.items() if reply is None]
        replies = {rank: reply for rank, reply in replies.items() if reply is not None}
        done = {rank: reply for rank, reply in replies.items() if reply.ready()}
        for reply in done.values():
            reply.wait_for_output(1)
        show(done)
        errors = {rank: reply.error for rank, reply in done.items() if reply.error}
        notes = [f"Interrupted before the cell began on ranks {lost}."] if lost else []
        if len(done) < len(replies):
            notes += [diagnosis.text, places(diagnosis.stacks, cell), FRESH]
            self.restart()
        show_errors(errors)
        if errors or notes:
            raise CellError(errors, notes)

    def __getitem__(self, expression: str) -> list[Any]:
        """The value of a variable, or of an expression, on every rank, rank 0's first.

        All ranks work it out at the same time, so it may communicate. Tensors come as copies on the
        CPU, without their graph. Raises CellError if it raises on a rank.
        """
        self.run(f"_value = (\n{expression}\n)")
        value = ipyparallel.Reference("_value")
        return [self._client[rank].apply_sync(on_the_host, value) for rank in range(self.num_ranks)]

    def push(self, **variables: Any) -> None:
        """Gives every rank a copy of these values, under these names; tensors on its device."""
        self._check_alive()
        for rank in range(self.num_ranks):
            self._client[rank].push(variables, block=True)
            self._client[rank].apply_sync(move_to_device, list(variables))

    def _wait(self, replies: dict[int, Any], watch: Watch) -> Diagnosis | None:
        """Until all have replied, or will never: then returns why."""
        waiting = list(replies.values())
        while waiting:
            concurrent.futures.wait(waiting, timeout=watch.interval)
            waiting = [reply for reply in waiting if not reply.ready()]
            self._check_alive()
            if len(waiting) < len(replies) and any(r.error for r in replies.values() if r.ready()):
                watch.hang_timeout = min(watch.hang_timeout, AFTER_ERROR_SECONDS)
            watch.look()
            if waiting and watch.is_hung():
                diagnosis = watch.diagnose()
                if diagnosis.kind not in launcher.MAY_GO_ON:
                    return diagnosis
                watch.quiet = 0.0
        return None

    def _interrupt(self, replies: dict[int, Any], watch: Watch) -> Diagnosis | None:
        """Interrupts the ranks that still run; returns why some cannot be, if so.

        A rank that is interrupted between receiving a cell and running it drops the cell, and never
        replies. It goes on to the next request: when that is answered, its reply becomes None.
        """
        probes: dict[int, Any] = {}
        began = interrupt_at = time.monotonic()
        ask_at, give_up = began + INTERRUPT_SECONDS, began + LONGEST_INTERRUPT_SECONDS
        while running := [r for r, one in replies.items() if one is not None and not one.ready()]:
            now = time.monotonic()
            if now >= interrupt_at:
                interrupt_at = now + NEXT_INTERRUPT_SECONDS
                for rank in running:
                    os.kill(self._processes.processes[rank].pid, signal.SIGINT)
                    probes[rank] = self._client[rank].apply_async(os.getpid)
            for rank in running:
                if probes[rank].ready() and not replies[rank].ready():
                    replies[rank] = None
            watch.look()
            if now > ask_at:
                diagnosis = watch.diagnose()
                if diagnosis.kind not in launcher.MAY_GO_ON or now > give_up:
                    return diagnosis
                ask_at = time.monotonic() + INTERRUPT_SECONDS
            time.sleep(LOOK_SECONDS)
        return None

    def _check_alive(self) -> None:
        """Raises CellError if a rank, or the controller, has died since; fresh ones are there then."""
        if self._is_stopped:
            raise ValueError(
                f"these ranks were stopped; run live_ranks({self.num_ranks}) for fresh ones"
            )
        text = ""
        try:
            self._processes.check()
        except launcher.RankError as error:
            text = str(error)
        if not text and not self._controller.processes[0].is_alive():
            text = "The controller of the ranks has ended."
        if text:
            self.restart()
            raise CellError({}, [text, FRESH])
