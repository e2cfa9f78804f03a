"""One timer and its clock; what a run's timers have measured, compared over ranks.

Counterpart: `Timer` of `megatron.core.timers`, and the reports of `Timers` there.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import collectives, utils
from minimegatron.core.tracing import Call
from minimegatron.core.utils import get_device

TRACED_LOG_LEVEL = {"forward-backward": 1, "optimizer": 1}
"""Log level of `@traced` calls by name, as Megatron has them; 2 for all others."""


class Timer:
    """Adds up the time between `start` and `stop`.

    `elapsed` is since the last reset; `active_time` is the total, which no reset touches. On a GPU
    each start and stop waits for the GPU, so that the time is that of the work and not of its
    launch; that costs overlap, hence the log levels of `Timers`.
    """

    def __init__(self, name: str):
        self.name = name
        self._elapsed = 0.0
        self._active_time = 0.0
        self._started_at: float | None = None
        self._barrier_group: dist.ProcessGroup | None = None

    def set_barrier_group(self, barrier_group: dist.ProcessGroup | None) -> None:
        """The ranks that `barrier=True` waits for; None for all."""
        self._barrier_group = barrier_group

    def start(self, barrier: bool = False) -> None:
        """Raises RuntimeError if it runs already."""
        if self._started_at is not None:
            raise RuntimeError(f"timer {self.name!r} runs already; stop it before starting again")
        self._started_at = self._now(barrier)

    def stop(self, barrier: bool = False) -> None:
        """Raises RuntimeError if it does not run."""
        if self._started_at is None:
            raise RuntimeError(f"timer {self.name!r} does not run; start it first")
        passed = self._now(barrier) - self._started_at
        self._elapsed += passed
        self._active_time += passed
        self._started_at = None

    def _now(self, barrier: bool) -> float:
        if barrier and dist.is_initialized():
            utils.barrier(self._barrier_group)
        if get_device().type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._started_at is not None

    def reset(self) -> None:
        """Makes `elapsed` start from zero; stops the timer if it runs."""
        self._elapsed = 0.0
        self._started_at = None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the last reset. A running timer goes on running."""
        running = self.is_running()
        if running:
            self.stop(barrier=barrier)
        seconds = self._elapsed
        if reset:
            self.reset()
        if running:
            self.start(barrier=barrier)
        return seconds

    def active_time(self) -> float:
        """Seconds in total, since the timer was made."""
        return self._active_time


class TimerReports(ABC):
    """What `Timers` do besides handing out a timer: observe traced calls, and report.

    Arguments are those of `Timers`.
    """

    def __init__(self, log_level: int, log_option: str):
        self._log_level = log_level
        self._log_option = log_option
        self._timers: dict[str, Timer] = {}
        self._log_levels: dict[str, int] = {}
        self._timed_calls: dict[int, Timer] = {}
        self.barrier_with_L1_time = False

    @abstractmethod
    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of that name."""

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Around what is not to be in the next report, such as an evaluation between two steps.

        Timers run within as always; after it, `elapsed` is what it was before, `active_time` is not.
        """
        before = {name: timer._elapsed for name, timer in self._timers.items()}
        try:
            yield
        finally:
            for name, timer in self._timers.items():
                timer._elapsed = before.get(name, 0.0)

    # -- As an observer --

    def told(self, config: Any) -> None:
        """From now on they do as `config` says: `barrier_with_L1_time`."""
        self.barrier_with_L1_time = config.barrier_with_L1_time

    def start(self, call: Call) -> None:
        """A traced call begins. Inside one of the same name, or where the caller runs that timer
        already, it is not timed again."""
        level = TRACED_LOG_LEVEL.get(call.name, 2)
        if level > self._log_level:
            return
        self._log_levels.setdefault(call.name, level)
        timer = self(call.name)
        if not timer.is_running():
            timer.start(barrier=level == 1 and self.barrier_with_L1_time)
            self._timed_calls[id(call)] = timer

    def stop(self, call: Call) -> None:
        """A traced call ends."""
        timer = self._timed_calls.pop(id(call), None)
        if timer is not None:
            timer.stop()

    # -- Reports --

    def log(
        self,
        names: list[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Prints the named timers (None: all) on `rank` (None: the last). Every rank must call it.

        Times are milliseconds, divided by `normalizer`, for example the number of iterations.
        """
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        if text is not None and _is_rank(rank):
            print(text, flush=True)

    def get_all_timers_string(
        self,
        names: list[str] | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> str | None:
        """What `log` prints; None if none of the timers ran. Every rank must call it."""
        if normalizer <= 0:
            raise ValueError(f"normalizer is {normalizer}; give more than 0")
        seconds_of = self._all_ranks(names, reset, barrier)
        form = {"max": _show_max, "minmax": _show_min_max, "all": _show_all}[self._log_option]
        lines = [
            form(name, [1000.0 * seconds / normalizer for seconds in ran])
            for name, ran in seconds_of.items()
        ]
        if not lines:
            return None
        title = {"max": "max time", "minmax": "(min, max) time", "all": "times"}[self._log_option]
        return "\n".join([f"{title} across ranks (ms):", *lines])

    def write(
        self,
        names: list[str] | None,
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Gives `writer.add_scalar` the slowest rank's seconds as "<name>-time"; None writes none.

        Every rank must call it, also those without a writer.
        """
        if normalizer <= 0:
            raise ValueError(f"normalizer is {normalizer}; give more than 0")
        for name, seconds in self._all_ranks(names, reset, barrier).items():
            if writer is not None:
                writer.add_scalar(f"{name}-time", max(seconds) / normalizer, iteration)

    def _all_ranks(
        self, names: Iterable[str] | None, reset: bool, barrier: bool
    ) -> dict[str, list[float]]:
        """Name -> seconds on every rank that has run that timer; the same on all ranks.

        Stages differ in what they run (only the first has no backward-send), so ranks first agree
        on the names.
        """
        ran = {name: timer for name, timer in self._timers.items() if type(timer) is Timer}
        mine = [name for name in (ran if names is None else names) if name in ran]
        names_of_ranks = _gather_names(mine) if names is None else [list(names)]
        agreed = list(dict.fromkeys(name for names in names_of_ranks for name in names))
        if barrier and dist.is_initialized():
            utils.barrier()
        seconds = torch.full((len(agreed),), -1.0, dtype=torch.float64)
        for column, name in enumerate(agreed):
            if name in ran:
                seconds[column] = ran[name].elapsed(reset=reset)
        table = gather_rows(seconds)
        columns = {name: table[:, column].tolist() for column, name in enumerate(agreed)}
        seen = {name: [s for s in column if s >= 0] for name, column in columns.items()}
        return {name: column for name, column in seen.items() if any(column)}


def _is_rank(rank: int | None) -> bool:
    if not dist.is_initialized():
        return True
    return dist.get_rank() == (dist.get_world_size() - 1 if rank is None else rank)


def _gather_names(names: list[str]) -> list[list[str]]:
    if not dist.is_initialized():
        return [names]
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, names)
    return gathered


def gather_rows(row: torch.Tensor) -> torch.Tensor:
    """[n] on each rank -> [ranks, n] on all, on the CPU. Every rank must call it."""
    if not dist.is_initialized() or row.numel() == 0:
        return row[None]
    device = get_device() if dist.get_backend() == "nccl" else torch.device("cpu")
    table = row.new_empty((dist.get_world_size() * row.numel(),), device=device)
    collectives.all_gather(table, row.to(device), dist.group.WORLD)
    return table.view(-1, row.numel()).cpu()


def _label(name: str) -> str:
    return f"    {name} ".ljust(48, ".")


def _show_max(name: str, times: list[float]) -> str:
    return f"{_label(name)}: {max(times):.2f}"


def _show_min_max(name: str, times: list[float]) -> str:
    return f"{_label(name)}: ({min(times):.2f}, {max(times):.2f})"


def _show_all(name: str, times: list[float]) -> str:
    return f"{_label(name)}: {' '.join(f'{value:.2f}' for value in times)}"
