"""What runs behind live ranks: one ipyparallel engine per rank, and their controller.

Megatron has no counterpart.

Both are forked from the launcher's server, which has imported everything already; ipyparallel's own
launchers would start an interpreter for each, which is most of the ten seconds they take.
"""

import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipykernel.debugger  # noqa: F401  (every engine would import it for itself, after the fork)
import torch
import torch.distributed as dist
from ipyparallel.controller.app import IPController
from ipyparallel.engine.app import IPEngine
from IPython import get_ipython

from minimegatron.core.utils import get_device
from minimegatron.doctor.observer import start_recording
from minimegatron.doctor.records import RAISED, RETURNED, RUNNING
from minimegatron.doctor.watch import record_path

PATIENCE_SECONDS = 120
"""How long an engine waits for the controller, on a machine that has much else to do."""
REGISTRATION_SECONDS = 3600
"""How long an engine that was told its number may take to beat. Left alone, the controller forgets it
after 30 s, without a word, and it is never there. Here the launcher knows which engines live."""
NUM_SOCKETS = 30
"""More than the controller has."""
LONGEST_SOCKET = 100
"""Bytes of a socket's path that every system allows."""
LOG_LEVEL = logging.CRITICAL


def connection_file(folder: Path, whose: str) -> Path:
    """What a "client" or an "engine" needs to know to reach the controller."""
    return folder / "security" / f"ipcontroller-{whose}.json"


def is_written(path: Path) -> bool:
    """Whether the controller has written this file, and to its end."""
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return False


class FolderController(IPController):
    """Names a socket in a folder as its clients and engines do: with a colon before the number."""

    def construct_url(self, kind: str, channel: str, index: str | None = None) -> str:
        url = super().construct_url(kind, channel, index)
        if not url.startswith("ipc://"):
            return url
        place, _, number = url.rpartition("-")
        return f"{place}:{number}"


def _where(folder: str) -> list[str]:
    """The controller's options for listening in the folder, unless its name is too long for a socket.

    A port that the controller has chosen may be another program's before the controller listens at it.
    """
    place = f"{folder}/socket"
    if len(os.fsencode(f"{place}:{NUM_SOCKETS}")) > LONGEST_SOCKET:
        return []
    options = [f"--IPController.ports=1-{NUM_SOCKETS}"]
    for side in ("engine", "client", "monitor"):
        options += [f"--IPController.{side}_transport=ipc", f"--IPController.{side}_ip={place}"]
    return options


def serve_controller(folder: str) -> None:
    """Passes messages between the notebook and the engines, until it is killed.

    It ends by itself if one of its parts ends, for whatever reason.
    """
    # The process that beats time logs to stderr, whatever the level.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    controller = FolderController()
    controller.initialize(
        [
            *_where(folder),
            f"--profile-dir={folder}",
            f"--ipython-dir={folder}",
            f"--log-level={LOG_LEVEL}",
            # Threads instead of processes: there are few engines, and less is left to clean up.
            "--IPController.use_threads=True",
            "--TaskScheduler.scheme_name=none",
            f"--IPController.registration_timeout={REGISTRATION_SECONDS}",
            # An engine is registered with its second heartbeat. That it lives is the launcher's care.
            "--HeartMonitor.period=150",
            "--HeartMonitor.max_heartmonitor_misses=1000000000",
        ]
    )
    # A thread that cannot listen would end without a word, and so would the process that beats.
    threading.excepthook = lambda _: os._exit(1)
    heart = controller.heartmonitor_process
    threading.Thread(target=_end_with, args=(heart,), daemon=True).start()
    controller.start()


def _end_with(process: multiprocessing.Process) -> None:
    while process.exitcode is None:  # also before its start
        time.sleep(0.1)
    os._exit(1)


def serve_rank(folder: str) -> None:
    """Runs the cells that the notebook sends to this rank, until it is killed."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # For the doctor. The launcher's file for Python stacks is in this folder already.
    record = start_recording(record_path(Path(folder), rank), rank, world_size)
    record.set_state(RETURNED)
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not is_written(connection_file(Path(folder), "engine")) and time.monotonic() < give_up:
        time.sleep(0.02)
    engine = IPEngine()
    engine.user_ns = {
        "rank": rank,
        "world_size": world_size,
        "torch": torch,
        "dist": dist,
        "device": get_device(),
    }
    engine.initialize(
        [
            f"--profile-dir={folder}",
            f"--ipython-dir={folder}",
            f"--log-level={LOG_LEVEL}",
            f"--IPEngine.id={rank}",
            f"--IPEngine.timeout={PATIENCE_SECONDS}",
            # The launcher watches the processes; another process per rank need not.
            "--IPEngine.enable_nanny=False",
            "--IPEngine.max_heartbeat_misses=0",
            "--HistoryManager.enabled=False",
        ]
    )
    engine.observe(lambda change: _note_cells(change.new.shell, record), "kernel")
    engine.start()


def _note_cells(shell: Any, record: Any) -> None:
    """Between cells a rank waits for nobody: the doctor sees it as one that has returned."""
    shell.events.register("pre_run_cell", lambda info: record.set_state(RUNNING))
    shell.events.register(
        "post_run_cell",
        lambda result: record.set_state(RETURNED if result.success else RAISED),
    )
    _Interrupts(shell)
    sys.path[:] = [entry for entry in sys.path if entry] + [""]


class _Interrupts:
    """From the first traceback of a cell to its end, another interrupt is not obeyed.

    It would cut short what the first one has to say: on a busy machine IPython writes at a traceback
    for seconds, and an interrupt is repeated meanwhile.
    """

    def __init__(self, shell: Any):
        self._show, shell.showtraceback = shell.showtraceback, self.show
        self._is_in_cell = False
        self._before: Any = None
        shell.events.register("pre_run_cell", lambda info: self.begin())
        shell.events.register("post_run_cell", lambda result: self.end())

    def begin(self) -> None:
        """A cell begins."""
        self._is_in_cell = True

    def show(self, *arguments: Any, **options: Any) -> Any:
        """In place of `shell.showtraceback`."""
        if self._is_in_cell and self._before is None:
            self._before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        return self._show(*arguments, **options)

    def end(self) -> None:
        """A cell is over: interrupts count again."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        self._is_in_cell, self._before = False, None


def take_cell_number(number: int) -> None:
    """The next cell is the notebook's `In [number]`, and is called so in tracebacks."""
    get_ipython().execution_count = number


# -- Values that travel between a rank and the notebook --


def on_the_host(value: Any) -> Any:
    """`value` with its tensors, also those in lists, tuples and dicts, detached and on the CPU."""
    return _map_tensors(value, lambda tensor: tensor.detach().cpu())


def move_to_device(names: list[str]) -> None:
    """Moves what was pushed under `names` to this rank's device."""
    variables = get_ipython().user_ns
    for name in names:
        variables[name] = _map_tensors(variables[name], lambda tensor: tensor.to(get_device()))


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(one, change) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(one, change) for one in value)
    return value
