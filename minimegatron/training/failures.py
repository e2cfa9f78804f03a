"""When a rank fails, every rank ends, and the log says which one it was and where it stood.

Megatron leaves this to its launcher, which knows the number of the process that died, but not its
stage.

Seven ways a job ends early, and what is printed then:

* a rank raises: it prints one block, its place and the traceback, and exits with 1;
* a rank is killed: the survivors' next message to it fails, or the launcher sends them SIGTERM; one
  of them prints whose process is gone;
* torchrun is killed: nobody would end its ranks, so they end themselves;
* the launcher is told to stop: all ranks get SIGTERM while all are alive. During training they
  save and end with 0, otherwise they end quietly;
* a checkpoint cannot be written or read: all ranks know, and one of them says so in one line;
* the data cannot be trained on: each rank that found out says so in one line;
* another file cannot be written (a full disk): the rank that would write it says so, in one line.

A survivor may hang in a C++ wait where no Python runs, so threads do the watching. That for peers
sleeps in `select` until a signal arrives (`signal.set_wakeup_fd` writes to its pipe even then).
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from minimegatron import doctor
from minimegatron.core import dist_checkpointing, network, parallel_state
from minimegatron.core.datasets import atomic_file
from minimegatron.core.datasets.utils import DataError
from minimegatron.core.output import keep_printing
from minimegatron.core.utils import barrier

LOOK_SECONDS = 1.0
"""How often the watching thread looks for peers that died unannounced."""

PATIENCE_SECONDS = 3.0
"""How long a failed message waits for a cause to show: its peer may still be printing why."""

JOIN_SECONDS = 10.0
"""How long the watching thread may take to end; it may be within its patience."""

LINGER_SECONDS = 3.0
"""How long a survivor stays, so that the others can tell it from the dead."""


@dataclass(frozen=True)
class Identity:
    """One rank's place in the model and in the machine."""

    rank: int
    stage: int
    num_stages: int
    tp: int
    dp: int
    host: str
    pid: int
    cp: int | None = None
    """None without context parallelism."""
    machine: str = ""
    """Of processes that see each other. Two machines may have one name: "localhost", say."""

    def __str__(self) -> str:
        place = f"stage {self.stage}/{self.num_stages}, tp {self.tp}, dp {self.dp}"
        return f"rank {self.rank} ({place}{'' if self.cp is None else f', cp {self.cp}'})"

    def is_gone(self) -> bool:
        """True once the process has ended, even if nobody has collected it yet."""
        # None where the system does not tell: zombies pass for alive.
        seen = doctor.processes.sample(self.pid)
        return seen is not None and seen.letter in "ZX"


def identify() -> Identity:
    """This process, once its process groups exist."""
    shares_sequences = parallel_state.get_context_parallel_world_size() > 1
    return Identity(
        rank=dist.get_rank(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        tp=parallel_state.get_tensor_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        host=socket.gethostname(),
        pid=os.getpid(),
        cp=parallel_state.get_context_parallel_rank() if shares_sequences else None,
        machine=network.machine_id(),
    )


class PeerWatch:
    """Watches the ranks on this machine; ends this process when one of them is gone."""

    def __init__(self, me: Identity, everyone: list[Identity]):
        self.me = me
        self.local = [
            peer for peer in everyone if peer.machine == me.machine and peer.rank != me.rank
        ]
        self._ending = threading.Lock()
        self._stopped = threading.Event()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        # The handler itself does nothing: what matters is the byte that its arrival writes.
        self._handler = lambda *_: None
        self._old_handler = signal.signal(signal.SIGTERM, self._handler)
        self._old_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="peer watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; from now on, a peer may leave without being missed."""
        self._stopped.set()
        signal.set_wakeup_fd(self._old_descriptor)
        signal.signal(signal.SIGTERM, self._old_handler)
        os.write(self._writer, b"\0")
        self._thread.join(JOIN_SECONDS)
        if not self._thread.is_alive():
            os.close(self._reader)
            os.close(self._writer)

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], [], [], LOOK_SECONDS)
            signals = os.read(self._reader, 1024) if ready else b""
            if self._stopped.is_set():
                return
            gone = self._gone()
            if gone and signal.SIGTERM not in signals:
                # Without a launcher's SIGTERM there is time: the next message will fail and say why.
                time.sleep(PATIENCE_SECONDS)
            if self._stopped.is_set():
                return
            if gone:
                self.end_without(gone)
            elif signal.SIGTERM in signals and signal.getsignal(signal.SIGTERM) is self._handler:
                # Else training is under way, and ends by itself (see `dist_signal_handler`).
                self._end("", 128 + signal.SIGTERM)

    def _gone(self) -> list[Identity]:
        return [peer for peer in self.local if peer.is_gone()]

    def end_after(self, error: BaseException) -> None:
        """Reports `error`, or the lost peer behind it, and ends this process. Does not return."""
        if isinstance(error, dist_checkpointing.core.CheckpointingException):
            is_first = self.me.rank == 0
            text = f"minimegatron: {error}\n" if is_first else ""
            self._end(text, 1, linger=0.0 if is_first else LINGER_SECONDS)
        if isinstance(error, atomic_file.CannotWrite):
            self._end(f"minimegatron: {self.me}: {error}\n", 1)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while is_lost_connection(error) and time.monotonic() < deadline:
            if gone := self._gone():
                self.end_without(gone)
            time.sleep(0.05)
        self._end(_block(str(self.me), error), 1)

    def end_without(self, gone: list[Identity]) -> None:
        """Says who is gone, if this is the first survivor, and ends this process."""
        lost = {peer.rank for peer in gone}
        is_first = not any(p.rank < self.me.rank for p in self.local if p.rank not in lost)
        names = "; ".join(f"{peer}, process {peer.pid} on {peer.host}" for peer in gone)
        text = (
            f"{self.me} stops, because a rank is gone: {names}. If it printed no error of its own, "
            "it was killed; the kernel does that when memory runs out.\n"
        )
        self._end(text if is_first else "", 1, linger=LINGER_SECONDS)

    def _end(self, text: str, exit_code: int, linger: float = 0.0) -> None:
        # Never released: whichever thread comes second waits here until the process is gone.
        self._ending.acquire()
        _write(text)
        time.sleep(linger)
        os._exit(exit_code)


class LauncherWatch:
    """Watches torchrun, also before the ranks know each other; ends this process when it is gone."""

    def __init__(self):
        self._launcher = os.getppid()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="launcher watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()
        self._thread.join(JOIN_SECONDS)

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            if os.getppid() != self._launcher:
                if os.environ.get("LOCAL_RANK") == "0":
                    rank = os.environ.get("RANK")
                    _write(f"rank {rank} stops: torchrun, process {self._launcher}, is gone\n")
                os._exit(1)


def is_lost_connection(error: BaseException) -> bool:
    """True for what a collective or a message raises when the process at its other end is gone."""
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    words = ("gloo", "Connection closed", "Connection reset", "NCCL", "recvValue failed")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _block(who: str, error: BaseException) -> str:
    """What a failed rank prints: its place and the error first, the traceback below."""
    if isinstance(error, DataError):
        return f"minimegatron: {who}: {DataError.sentence(error)}\n"
    headline = f"{who}: {type(error).__name__}: {error}"
    story = "".join(traceback.format_exception(error))
    rule = "-" * 100
    return f"{rule}\n{headline}\n{story}{rule}\n"


def _write(text: str) -> None:
    """All of it in one system call, so that the lines of several ranks do not mix."""
    with contextlib.suppress(OSError):  # nobody reads it
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, text.encode(errors="backslashreplace"))


_watch: PeerWatch | None = None
_launcher_watch: LauncherWatch | None = None


def watch_launcher() -> None:
    """Starts the watch of torchrun, until `stop_watching_launcher`; before ranks look for each other.

    Does nothing under another launcher, whose processes may outlive their parent: a shell's, say.
    """
    global _launcher_watch
    if dist.is_torchelastic_launched() and _launcher_watch is None:
        _launcher_watch = LauncherWatch()


def stop_watching_launcher() -> None:
    """Ends the watch of torchrun, if there is one."""
    global _launcher_watch
    if _launcher_watch is not None:
        _launcher_watch.stop()
        _launcher_watch = None


def watch_peers() -> None:
    """Tells all ranks each other's identity and starts the watch. Every rank must call it.

    Where this is not the main thread (a notebook's), signals cannot be caught and nothing is watched.
    """
    global _watch
    everyone: list[Identity | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, identify())
    if threading.current_thread() is threading.main_thread():
        _watch = PeerWatch(everyone[dist.get_rank()], everyone)


def leave_together() -> None:
    """The end of a run that went well: nobody leaves before all are here, and nobody is missed."""
    stop_watching()
    barrier()


def stop_watching() -> None:
    """Ends the watch, if there is one."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Within it, an exception ends this process, after its report; a failed print does not.

    Where somebody else started the process group (a notebook, a test), the process is theirs:
    exceptions pass through.
    """
    if dist.is_initialized():
        yield
        return
    keep_printing()
    try:
        yield
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    except Exception as error:
        if _watch is not None:
            _watch.end_after(error)
        if isinstance(error, atomic_file.CannotWrite):
            _write(f"minimegatron: {error}\n")
            os._exit(1)
        _write(_block(f"rank {os.environ.get('RANK', 0)} (not yet in the model)", error))
        os._exit(1)
    finally:
        stop_watching()
